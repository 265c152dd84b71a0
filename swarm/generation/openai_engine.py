"""OpenAI-style server (vLLM, SGLang) run by somebody else as the engine of a node that only generates.

Invariant: every token is attributed to the version that the server loaded last, between two calls of generate. Inexact
values of the server are left out: a rollout has no log-probs rather than those of another distribution.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from swarm.activity import GENERATING, OnProgress, ignore_progress
from swarm.config import NodeConfig
from swarm.episode import Actions
from swarm.errors import ConfigError, Unavailable, WeightsRefused
from swarm.generation.canaries import check_canaries, tolerance_nats
from swarm.generation.http_json import Cancelled, JsonClient
from swarm.generation.openai_dialects import (
    RemoteCompletion,
    Server,
    SglangServer,
    VllmServer,
    find_server,
    log_probs_are_scaled,
)
from swarm.generation.openai_weights import DiskWeights, LoraAdapters, NoWeights, Taking
from swarm.generation.rollouts import SampleSeeds, by_prompt, check_vocabulary, published_tensors, to_rollout
from swarm.generation.turn_by_turn import play_episodes
from swarm.identity import Identity
from swarm.interfaces import Observe, Prompts, Tokenizer
from swarm.model.network import load_model
from swarm.model.version_digest import PublishedTensors, snapshot
from swarm.types import (
    Canary,
    FinishReason,
    FloatArray,
    LoadReport,
    PolicyVersion,
    Rollout,
    Sampling,
    VersionSpan,
)

logger = logging.getLogger(__name__)

Given = TypeVar("Given")
Made = TypeVar("Made")

_OPTIONS: Final = ("api_key_env", "model", "timeout_s", "weights", "weights_dir")
_NOTHING: Final = RemoteCompletion(token_ids=[], logprobs=[], finish=FinishReason.ABORTED)
_PROBES: Final = ("1", "what is 7+5?", "a")  # prompts of the samples that show what a server's log-probs are
_SEED_BITS: Final = 63  # of a server's seeds


class OpenAIGenerator:
    """Samples from a remote server; implements `swarm.interfaces.Generator`, which documents its methods.

    Each sample is a separate request with its own seed, at most `max_rows` at a time: servers differ in what a seed
    means for several samples of one request, and prefix caching makes the shared prompt cheap. Samples are
    reproducible as far as the server's are. Weights are loaded after the call in progress, even with `in_flight`, since
    the server's replies do not name the weights that made a token. If the server neither loads a version nor returns to
    the previous version, every further call raises Unavailable until it loads a version. Samples that were unfinished
    when a call was cancelled are empty.

    Options (`engine.options`): `model`, the served name (by default the first one that the server lists);
    `api_key_env`, the environment variable that holds the key; `weights`, "sglang_disk", "vllm_lora" or "none";
    `weights_dir`, a directory that the server sees under the same path (each node has its own folder in it);
    `timeout_s`, the longest silence of the server. No option changes the sampling: tokens are drawn exactly as the
    rollout's `Sampling` says.

    Example:
        generator = OpenAIGenerator.from_config(config, tokenizer, PolicyVersion(policy_id="", step=0))
    """

    def __init__(
        self,
        client: JsonClient,
        server: Server,
        taking: Taking,
        tokenizer: Tokenizer,
        version: PolicyVersion,
        seed: int,
        *,
        max_rows: int,
        tolerance: float,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        self._on_progress = on_progress
        self._client = client
        self._server = server
        self._taking = taking
        self._tokenizer = tokenizer
        self._version = version
        self._model = taking.model
        self._seeds = SampleSeeds(seed)
        self._tolerance = tolerance
        self._call = threading.Lock()  # held by one call of anything but cancel
        self._ending = threading.Lock()  # so that `cancel` ends only the call that samples, if any
        self._is_sampling = False
        self._pool = ThreadPoolExecutor(max_rows, thread_name_prefix="openai")
        self._lost = ""  # reason why the server's weights are unknown
        scaled = log_probs_are_scaled(server, self._model, [tokenizer.encode_response(text)[:-1] for text in _PROBES])
        self._gives_logprobs = scaled is not None
        self._scales = bool(scaled)

    @classmethod
    def from_config(
        cls, config: NodeConfig, tokenizer: Tokenizer, version: PolicyVersion, on_progress: OnProgress = ignore_progress
    ) -> "OpenAIGenerator":
        """Connects to the configured server, and detects its dialect and the temperature of its log-probs (blocking).

        Args:
            config: configuration of the node.
            tokenizer: the model's tokenizer.
            version: version of the weights that the server holds.
            on_progress: called after each answer of the server.

        Raises:
            ConfigError: an option is wrong or missing, or the server lacks a feature that is needed.
            Unavailable: the server does not answer.
        """
        engine, options = config.engine, config.engine.options
        if not engine.url:
            raise ConfigError("engine.url: needed for kind = 'openai', such as http://127.0.0.1:8000/v1")
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise ConfigError(
                f"engine.options.{unknown[0]}: unknown with kind = 'openai'; known are {', '.join(_OPTIONS)}"
            )
        client = JsonClient(
            engine.url.rstrip("/").removesuffix("/v1"), _api_key(options), float(options.get("timeout_s", 600.0))
        )
        server = find_server(client, str(options.get("model", "")), tokenizer.eos_ids)
        return cls(
            client,
            server,
            _taking(config, client, server),
            tokenizer,
            version,
            config.seed,
            max_rows=engine.max_rows,
            tolerance=tolerance_nats("vllm", config.model.dtype, engine.tolerance_nats),
            on_progress=on_progress,
        )

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def compute_dtype(self) -> str:
        return ""  # a matter of the server

    def generate(
        self,
        prompts: Prompts,
        num_samples: int,
        sampling: Sampling,
        numbers: Sequence[int] | None = None,
        observe: Observe | None = None,
    ) -> list[list[Rollout]]:
        if sampling.temperature <= 0:
            raise ConfigError(f"sampling: temperature {sampling.temperature} must be above 0")
        with self._call, self._sampling():
            make = partial(self._actions, sampling)
            return by_prompt(play_episodes(make, prompts, num_samples, numbers, observe), num_samples)

    def greedy(self, prompts: Prompts, max_new_tokens: int, observe: Observe | None = None) -> list[Actions]:
        with self._call, self._sampling():
            make = partial(self._greedy_actions, max_new_tokens)
            return [rollout.actions for rollout in play_episodes(make, prompts, 1, None, observe)]

    def _actions(
        self, sampling: Sampling, prompts: Prompts, num_samples: int, numbers: Sequence[int] | None
    ) -> list[Rollout]:
        """One action for each sample of each prompt."""
        seeds = self._seeds.of(self._version, prompts, num_samples, numbers)
        requests = [(prompt, seed) for prompt, own in zip(prompts, seeds, strict=True) for seed in own]
        made = self._each(requests, lambda one: self._complete(one[0], sampling, one[1]), _NOTHING)
        return [self._rollout(completion, sampling) for completion in made]

    def _greedy_actions(
        self, max_new_tokens: int, prompts: Prompts, num_samples: int, numbers: Sequence[int] | None
    ) -> list[Rollout]:
        """One greedy action for each prompt; `num_samples` must be 1, and `numbers` None."""
        assert num_samples == 1 and numbers is None
        sampling = Sampling(temperature=0.0, max_new_tokens=max_new_tokens)
        made = self._each(list(prompts), lambda prompt: self._complete(prompt, sampling, 0), _NOTHING)
        return [self._rollout(completion, sampling) for completion in made]

    def score(self, sequences: Prompts) -> list[FloatArray]:
        with self._call:
            self._require_known_weights()
            return self._score(self._model, sequences)

    def load(
        self, version: PolicyVersion, weights: object, *, canaries: Sequence[Canary] = (), in_flight: bool = False
    ) -> LoadReport:
        tensors = published_tensors(weights)
        with self._call:
            began_s = time.monotonic()
            try:
                mismatch = self._replace(version, tensors, canaries)
            except (ConfigError, WeightsRefused):
                raise  # the server has the weights that it had
            except Exception as error:
                self._lost = f"it may have other weights than those before step {version.step}: {error}"
                raise WeightsRefused(f"step {version.step}: {error}") from error
            return LoadReport(pause_s=time.monotonic() - began_s, mismatch_nats=mismatch)

    def cancel(self) -> None:
        with self._ending:
            if self._is_sampling:
                self._client.cancel()

    def close(self) -> None:
        """Ends the requests in progress; the server keeps running."""
        self._client.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _replace(self, version: PolicyVersion, weights: PublishedTensors, canaries: Sequence[Canary]) -> float:
        change = self._taking.take(version, weights)
        try:
            mismatch = check_canaries(version, canaries, lambda ids: self._score(change.model, ids), self._tolerance)
        except Exception as error:
            change.undo()
            if isinstance(error, WeightsRefused):
                raise
            raise WeightsRefused(f"step {version.step}: a canary cannot be scored: {error}") from error
        self._model, self._version, self._lost = change.model, version, ""
        self._seeds.forget()
        change.keep()
        return mismatch

    @contextmanager
    def _sampling(self) -> Generator[None]:
        """Lets `cancel` end the sampling call in this block. Raises Unavailable if the server's weights are unknown."""
        self._require_known_weights()
        with self._ending:
            self._is_sampling = True
        try:
            yield
        finally:
            with self._ending:
                self._is_sampling = False
                self._client.resume()

    def _require_known_weights(self) -> None:
        if self._lost:
            raise Unavailable(f"engine {self._client.url}: {self._lost}")

    def _complete(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> RemoteCompletion:
        return self._server.complete(self._model, prompt, sampling, seed % 2**_SEED_BITS)

    def _score(self, model: str, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        check_vocabulary(sequences, self._tokenizer)
        scored = [sequence for sequence in sequences if len(sequence) > 1]
        made = iter(self._each(scored, lambda sequence: self._server.score(model, sequence), []))
        scores = [np.full(len(sequence), np.nan, np.float32) for sequence in sequences]
        for score in scores:
            if len(score) > 1:
                score[1:] = next(made)
        return scores

    def _each(self, inputs: Sequence[Given], do: Callable[[Given], Made], otherwise: Made) -> list[Made]:
        """Results of `do` for all inputs, at most `max_rows` at a time; `otherwise` for cancelled inputs."""

        num_done = itertools.count(1)

        def one(given: Given) -> Made:
            try:
                made = do(given)
            except Cancelled:
                return otherwise
            self._on_progress(GENERATING, next(num_done), len(inputs))
            return made

        return list(self._pool.map(one, inputs))  # the first error ends those that have not begun

    def _rollout(self, completion: RemoteCompletion, sampling: Sampling) -> Rollout:
        is_exact = self._gives_logprobs and sampling.is_exact and (self._scales or sampling.temperature == 1.0)
        # log-probs of a distribution other than the sampled one are not claimed
        logprobs = completion.logprobs if is_exact else None
        spans = [VersionSpan(start=0, version=self._version)]
        return to_rollout(self._tokenizer, sampling, completion.token_ids, logprobs, spans, completion.finish)


def _api_key(options: dict[str, Any]) -> str:
    name = str(options.get("api_key_env", ""))
    key = os.environ.get(name, "") if name else ""
    if name and not key:
        raise ConfigError(f"engine.options.api_key_env {name!r}: this environment variable is empty; set it to the key")
    return key


def _taking(config: NodeConfig, client: JsonClient, server: Server) -> Taking:
    kind = str(config.engine.options.get("weights", "none"))
    if kind == "sglang_disk" and isinstance(server, SglangServer):
        return DiskWeights(client, _own_folder(config), snapshot(load_model(config.model).network))
    if kind == "vllm_lora" and isinstance(server, VllmServer):
        return LoraAdapters(client, server.model, _own_folder(config), config.model.lora_scale)
    if kind != "none":
        known = "sglang_disk with an SGLang server, vllm_lora with a vLLM one, or none"
        raise ConfigError(f"engine.options.weights {kind!r}: {client.url} is a {type(server).__name__}; use {known}")
    return NoWeights(server.model)


def _own_folder(config: NodeConfig) -> Path:
    """This node's folder in the directory for weights, which several nodes may share."""
    shared = Path(str(config.engine.options.get("weights_dir", "") or config.dir / "engine"))
    return shared / Identity.load(config.dir / "identity.key").node_id
