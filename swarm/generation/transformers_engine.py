"""Exact generator over any Hugging Face causal language model.

Invariant: the log-prob of a token and the random number that chose it depend on its own row only, never on the rest of
the batch: a rollout depends on (seed, version, prompt, number of the question, sample).
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, Final, Self

import numpy as np
import torch
from torch import nn

from swarm.activity import GENERATING, OnProgress, ignore_progress
from swarm.config import NodeConfig
from swarm.episode import Actions
from swarm.errors import ConfigError, WeightsRefused
from swarm.generation.canaries import check_canaries
from swarm.generation.canaries import tolerance_nats as tolerance_for
from swarm.generation.completion_loop import CompletionLoop
from swarm.generation.continuous_batching import Decoding
from swarm.generation.priority_lock import PriorityLock
from swarm.generation.rollouts import (
    SampleSeeds,
    actions_of,
    by_prompt,
    check_vocabulary,
    published_tensors,
    to_rollout,
)
from swarm.generation.sampling import Row
from swarm.interfaces import Completion, CompletionRequest, Observe, OnTokens, Prompts, Tokenizer
from swarm.model.compute_dtype import place
from swarm.model.network import entry_bytes, load_model, most_tokens
from swarm.model.published_dtype import network_dtype, published_dtype
from swarm.model.version_digest import PublishedTensors, load_published, snapshot
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

MAX_COMPLETION_BYTES: Final = 2 * 2**30  # of cache for completions; requests beyond it wait
_MOST_SCORED_TOKENS: Final = 512  # of one forward pass of `score`: bounds its logits


class TransformersGenerator:
    """Samples from a network that it owns; implements `swarm.interfaces.Generator`, which documents its methods.

    If weights are replaced in flight, later tokens come from the new weights and the cache that the old weights made;
    random numbers stay those of the version at the start of the call. New weights are copied; the old weights are kept
    until the canaries agree, and restored if they disagree. No token is made before that.

    Args:
        network: a transformers causal LM in eval mode, which nothing else may use (load another copy, or deepcopy).
        tokenizer: tokenizer of the network.
        version: version of the network's weights.
        seed: seed of all sampling.
        max_rows: bound of the sequences decoded together; larger groups are made in parts, with the same results.
        tolerance_nats: largest mean |difference| of the canaries' log-probs; 0: the entry of TOLERANCE_NATS.
        is_deterministic: equal calls give equal log-probs to the last bit, however fast environments answer.
        activity: name under which `generate` and `greedy` report progress, after each token of the running sequences.
        on_progress: takes these reports.

    Example:
        generator = TransformersGenerator(model.network, model.tokenizer, PolicyVersion(policy_id="a", step=0), seed=0)
        rollouts = generator.generate([tokenizer.encode_prompt(task)], 8, Sampling(max_new_tokens=6))
    """

    def __init__(
        self,
        network: nn.Module,
        tokenizer: Tokenizer,
        version: PolicyVersion,
        seed: int,
        *,
        max_rows: int = 64,
        tolerance_nats: float = 0.0,
        is_deterministic: bool = False,
        activity: str = GENERATING,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        assert max_rows > 0, max_rows
        self._network = network.eval()
        self._tokenizer = tokenizer
        self._version = version
        self._seeds = SampleSeeds(seed)
        self._max_rows = max_rows
        self._is_deterministic = is_deterministic
        self._activity, self._on_progress = activity, on_progress
        dtype = str(published_dtype(network)).removeprefix("torch.")
        self._tolerance_nats = tolerance_for("transformers", dtype, tolerance_nats)
        self._call = threading.Lock()  # held by one call of generate, greedy or score
        self._weights = PriorityLock()  # taken for each token of generate, and for the whole of everything else
        self._cancelled = threading.Event()
        self._decoding: Decoding | None = None  # of the newest call
        room = max(1, MAX_COMPLETION_BYTES // entry_bytes(network))
        self._completions = CompletionLoop(lambda: self._begin((), None), self._step, room)

    @classmethod
    def from_config(
        cls,
        config: NodeConfig,
        tokenizer: Tokenizer,
        version: PolicyVersion,
        network: nn.Module | None = None,
        on_progress: OnProgress = ignore_progress,
    ) -> Self:
        """Builds an engine on the node's device (blocking, slow).

        Args:
            config: configuration of the node.
            tokenizer: the model's tokenizer.
            version: version of the base model.
            network: the base model, which the engine then owns; None: the engine loads a copy.
            on_progress: as for the class.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        network = network or load_model(config.model).network
        place(network, config.device, config.compute_dtype)
        return cls(
            network,
            tokenizer,
            version,
            config.seed,
            max_rows=config.engine.max_rows,
            tolerance_nats=config.engine.tolerance_nats,
            is_deterministic=config.learner.deterministic,
            on_progress=on_progress,
        )

    def close(self) -> None:
        """Ends all calls in progress, so that no thread outlives the node to finish a long episode."""
        self.cancel()
        self._completions.close()

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def compute_dtype(self) -> str:
        return str(network_dtype(self._network)).removeprefix("torch.")

    def generate(
        self,
        prompts: Prompts,
        num_samples: int,
        sampling: Sampling,
        numbers: Sequence[int] | None = None,
        observe: Observe | None = None,
    ) -> list[list[Rollout]]:
        if sampling.temperature <= 0 or sampling.repetition_penalty != 1.0:
            raise ConfigError(
                f"sampling: temperature {sampling.temperature} must be above 0 and repetition_penalty "
                f"{sampling.repetition_penalty} must be 1 with the transformers engine"
            )
        self._require_room(prompts)
        with self._call:
            self._cancelled.clear()
            with self._weights.held():
                seeds = self._seeds.of(self._version, prompts, num_samples, numbers)
            of_prompts = [(prompt, seed) for prompt, own in enumerate(seeds) for seed in own]
            rows = [
                Row(prompt_ids=prompts[prompt], sampling=sampling, prompt=prompt, index=index, seed=seed)
                for index, (prompt, seed) in enumerate(of_prompts)
            ]
            decoding = self._begin(rows, observe)
            while self._goes_on(decoding):
                self._step(decoding)
                self._report(rows)
            return by_prompt([self._rollout(row, sampling) for row in rows], num_samples)

    def greedy(self, prompts: Prompts, max_new_tokens: int, observe: Observe | None = None) -> list[Actions]:
        self._require_room(prompts)
        with self._call, self._weights.held():
            self._cancelled.clear()
            sampling = Sampling(temperature=0.0, max_new_tokens=max_new_tokens)
            rows = [
                Row(prompt_ids=prompt, sampling=sampling, prompt=index, index=index)
                for index, prompt in enumerate(prompts)
            ]
            decoding = self._begin(rows, observe)
            while self._goes_on(decoding):
                decoding.step(self._version)
                self._report(rows)
            return [actions_of(self._tokenizer, row.tokens, row.bounds) for row in rows]

    def complete(self, request: CompletionRequest, on_tokens: OnTokens | None = None) -> "Future[Completion]":
        """Queues a request; see `swarm.interfaces.Completer`. Raises ValueError for a token id out of range."""
        check_vocabulary([request.prompt_ids], self._tokenizer)
        return self._completions.complete(request, on_tokens)

    def score(self, sequences: Prompts) -> list[FloatArray]:
        with self._weights.held():
            return self._score(sequences)

    def load(
        self, version: PolicyVersion, weights: object, *, canaries: Sequence[Canary] = (), in_flight: bool = False
    ) -> LoadReport:
        tensors = published_tensors(weights)
        with nullcontext() if in_flight else self._call, self._weights.held(first=True):
            return self._replace(version, tensors, canaries)

    def cancel(self) -> None:
        self._cancelled.set()
        if self._decoding is not None:
            self._decoding.news.set()

    def _require_room(self, prompts: Prompts) -> None:
        """Raises ConfigError if a prompt leaves no position of the network for an answer."""
        longest, positions = max(map(len, prompts), default=0), most_tokens(self._network)
        if 0 < positions <= longest:
            raise ConfigError(
                f"a prompt has {longest:,} tokens, and the model has {positions:,} positions for it and its answer; "
                "shorten the question, or take a model with more"
            )

    def _report(self, rows: Sequence[Row]) -> None:
        num_over, num_tokens = sum(row.is_over for row in rows), sum(len(row.tokens) for row in rows)
        self._on_progress(self._activity, num_over, len(rows), num_tokens)

    def _step(self, decoding: Decoding) -> None:
        with self._weights.held():
            decoding.step(self._version)

    def _begin(self, rows: Sequence[Row], observe: Observe | None) -> Decoding:
        return Decoding(
            self._network,
            rows,
            max_rows=self._max_rows,
            eos_ids=self._tokenizer.eos_ids,
            observe=observe,
            waits_for_all=self._is_deterministic,
        )

    def _goes_on(self, decoding: Decoding) -> bool:
        """Waits for an environment if no row can go on; False once all rows have ended or the call is cancelled."""
        self._decoding = decoding  # first: a cancellation from now on ends the wait
        while decoding.is_stalled and decoding.goes_on and not self._cancelled.is_set():
            decoding.news.wait()
            decoding.news.clear()
        return decoding.goes_on and not self._cancelled.is_set()

    def _replace(self, version: PolicyVersion, weights: PublishedTensors, canaries: Sequence[Canary]) -> LoadReport:
        began_s = time.monotonic()
        try:
            mismatch = self._swap(version, weights, canaries)
        except (ConfigError, WeightsRefused):
            raise
        except Exception as error:
            logger.exception("weights could not be loaded", extra={"step": version.step})
            raise WeightsRefused(f"step {version.step}: {type(error).__name__}: {error}") from error
        self._version = version
        self._seeds.forget()
        return LoadReport(pause_s=time.monotonic() - began_s, mismatch_nats=mismatch)

    def _swap(self, version: PolicyVersion, weights: PublishedTensors, canaries: Sequence[Canary]) -> float:
        """Loads new weights and returns the canaries' mismatch; if anything fails, restores the old weights."""
        before = snapshot(self._network)
        try:
            load_published(self._network, weights)
            return check_canaries(version, canaries, self._score, self._tolerance_nats)
        except Exception:
            load_published(self._network, before)
            raise

    @torch.inference_mode()
    def _score(self, sequences: Prompts) -> list[FloatArray]:
        check_vocabulary(sequences, self._tokenizer)
        scores = [np.full(len(sequence), np.nan, np.float32) for sequence in sequences]
        order = sorted((i for i in range(len(sequences)) if len(sequences[i]) > 1), key=lambda i: len(sequences[i]))
        while order:
            longest = len(sequences[order[-1]])
            size = max(1, min(self._max_rows, _MOST_SCORED_TOKENS // longest))
            indices, order = order[-size:], order[:-size]
            for index, logprobs in zip(indices, self._forward([sequences[i] for i in indices]), strict=True):
                scores[index][1:] = logprobs[: len(sequences[index]) - 1]
        return scores

    def _forward(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """[longest - 1] log-probs of each sequence from its second token on; no token attends to padding."""
        network: Any = self._network
        longest = max(len(sequence) for sequence in sequences)
        device = next(self._network.parameters()).device
        ids = torch.tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences], device=device)
        mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sequences], device=device)
        logits: torch.Tensor = network(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        rows: list[FloatArray] = []
        for row, targets in zip(logits, ids[:, 1:], strict=True):  # one by one: float32 logits of one row at a time
            logprobs = torch.log_softmax(row.float(), dim=-1).gather(-1, targets[:, None])[:, 0]
            rows.append(logprobs.cpu().numpy())
        return rows

    def _rollout(self, row: Row, sampling: Sampling) -> Rollout:
        spans = row.spans or [VersionSpan(start=0, version=self._version)]
        finish = row.finish if row.is_over else FinishReason.ABORTED
        return to_rollout(self._tokenizer, sampling, row.tokens, row.logprobs, spans, finish, row.bounds)


class SnapshotEvaluator(TransformersGenerator):
    """Evaluates the newest version of a learner whose network is spread over several processes.

    The evaluator owns a network, and loads the newest snapshot before each call of `generate`, `greedy` and `score`.

    Args:
        newest: returns the learner's newest version and its published tensors.
    """

    def __init__(
        self,
        network: nn.Module,
        tokenizer: Tokenizer,
        newest: Callable[[], tuple[PolicyVersion, PublishedTensors]],
        seed: int,
        activity: str = GENERATING,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        version, weights = newest()
        super().__init__(network, tokenizer, version, seed, activity=activity, on_progress=on_progress)
        self._newest = newest
        self.load(version, weights)

    def generate(
        self,
        prompts: Prompts,
        num_samples: int,
        sampling: Sampling,
        numbers: Sequence[int] | None = None,
        observe: Observe | None = None,
    ) -> list[list[Rollout]]:
        self._load_newest()
        return super().generate(prompts, num_samples, sampling, numbers, observe)

    def greedy(self, prompts: Prompts, max_new_tokens: int, observe: Observe | None = None) -> list[Actions]:
        self._load_newest()
        return super().greedy(prompts, max_new_tokens, observe)

    def score(self, sequences: Prompts) -> list[FloatArray]:
        self._load_newest()
        return super().score(sequences)

    def _load_newest(self) -> None:
        version, weights = self._newest()
        if version != self.version:
            self.load(version, weights)
