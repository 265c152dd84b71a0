"""vLLM as the engine of a node: a process in its own environment, which is started, called and replaced from here.

Invariant: the process serves `version`, also after a crash: a new process first loads the last weights that took
effect. Adapters are merged into the base model's weights before they are loaded.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from swarm.activity import OnProgress, ignore_progress
from swarm.config import ModelConfig, NodeConfig
from swarm.config.generation_config import SHIPPED
from swarm.episode import Actions
from swarm.errors import ConfigError, RolloutFailed, Unavailable, WeightsRefused
from swarm.flow import Backoff
from swarm.generation.canaries import tolerance_nats
from swarm.generation.rollouts import SampleSeeds, by_prompt, published_tensors, to_rollout
from swarm.generation.turn_by_turn import play_episodes
from swarm.generation.vllm_messages import Continuation, EngineSettings, GenerateRequest, NewWeights
from swarm.generation.vllm_process import EngineProcess, vllm_python
from swarm.interfaces import Observe, Prompts, Tokenizer
from swarm.model.lora import merged_tensors
from swarm.model.network import load_model, save_tensors
from swarm.model.source import resolve_source
from swarm.model.version_digest import PublishedTensors, published_state, weights_digest
from swarm.types import Canary, Digest, FloatArray, LoadReport, PolicyVersion, Rollout, Sampling

logger = logging.getLogger(__name__)

FOLDER: Final = "engine"  # of the node's directory: weights and log
STALL_S: Final = 600.0  # a step or a change of weights that takes longer counts as hung, and ends the process
RESTARTS: Final = 5  # attempts to start a new process after a crash
FIRST_RESTART_S: Final = 1.0  # before the second attempt; doubled for each further one
_SEED_BITS: Final = 63  # of vLLM's seeds


class VllmGenerator:
    """Samples from a vLLM engine; implements `swarm.interfaces.Generator`, which documents its methods.

    Calls may come from several threads; a call that samples or scores raises RolloutFailed if the engine crashes twice
    during the call, and Unavailable if RESTARTS attempts start no engine. When weights are replaced in flight,
    sequences in progress keep their entries of the KV cache; prompts without a token of their answer are read again by
    the new weights.

    Seeds come from `SampleSeeds`, as in every engine; equal seeds give equal samples as far as vLLM computes the same
    numbers in different batches (on CPU in float32 nearly always).

    Example:
        generator = VllmGenerator.from_config(config, tokenizer, PolicyVersion(policy_id=node_id, step=0))
        groups = generator.generate([tokenizer.encode_prompt(task)], 8, Sampling(max_new_tokens=64))
        generator.close()
    """

    def __init__(
        self,
        launch: Callable[[], EngineProcess],
        directory: Path,
        tokenizer: Tokenizer,
        version: PolicyVersion,
        seed: int,
        tolerance: float,
        merge: Callable[[PublishedTensors], PublishedTensors] | None = None,
    ) -> None:
        """`merge`: makes full weights of published adapters; None: published tensors are full weights."""
        self._launch = launch
        self._directory = directory
        self._tokenizer = tokenizer
        self._base = version  # what a new process starts with
        self._version = version
        self._good: Path | None = None  # file of `version`; None: the base
        self._seeds = SampleSeeds(seed)
        self._tolerance = tolerance
        self._merge = merge
        self._loading = threading.Lock()
        self._starting = threading.Lock()  # also of what a new process is started with
        self._closed = threading.Event()
        self._process = launch()

    @classmethod
    def from_config(
        cls,
        config: NodeConfig,
        tokenizer: Tokenizer,
        version: PolicyVersion,
        cpu_dtype: str = "",
        on_progress: OnProgress = ignore_progress,
    ) -> "VllmGenerator":
        """Starts the engine with the run's base model (blocking, about half a minute for a small one).

        Args:
            config: configuration of the node; `engine.python` names the interpreter that has vLLM.
            tokenizer: the model's tokenizer.
            version: version of the base model.
            cpu_dtype: dtype that `compute_dtype = "auto"` stands for on this CPU; "": the published dtype.
            on_progress: takes the number of tokens made while the engine generates.

        Raises:
            ConfigError: the interpreter is missing or has no vLLM, or vLLM does not run this model.
            Unavailable: the process ended while it started, or logged nothing for SILENCE_S.
        """
        if config.model.source in SHIPPED:
            raise ConfigError("engine.kind vllm: its kernels lack heads of the tiny model's size; use transformers")
        directory = config.dir / FOLDER
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _delete_weights(directory)  # of a worker that was killed
        settings = EngineSettings(
            model=str(resolve_source(config.model, None, with_weights=True)),
            dtype=config.model.dtype,
            compute_dtype=config.compute_dtype,
            cpu_dtype=cpu_dtype or config.model.dtype,
            max_rows=config.engine.max_rows,
            eos_ids=sorted(tokenizer.eos_ids),
            version=version,
            options=config.engine.options,
            stall_s=STALL_S,
        )
        python = vllm_python(config.engine)
        tolerance = tolerance_nats("vllm", config.model.dtype, config.engine.tolerance_nats)
        return cls(
            lambda: EngineProcess(python, settings, directory, config.num_threads, on_progress),
            directory,
            tokenizer,
            version,
            config.seed,
            tolerance,
            _merging(config.model) if config.model.lora_rank else None,
        )

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def compute_dtype(self) -> str:
        return self._process.compute_dtype

    @property
    def pid(self) -> int:
        """Id of the engine's process."""
        return self._process.pid

    def generate(
        self,
        prompts: Prompts,
        num_samples: int,
        sampling: Sampling,
        numbers: Sequence[int] | None = None,
        observe: Observe | None = None,
    ) -> list[list[Rollout]]:
        make = partial(self._actions, sampling)
        return by_prompt(play_episodes(make, prompts, num_samples, numbers, observe), num_samples)

    def greedy(self, prompts: Prompts, max_new_tokens: int, observe: Observe | None = None) -> list[Actions]:
        make = partial(self._greedy_actions, max_new_tokens)
        return [rollout.actions for rollout in play_episodes(make, prompts, 1, None, observe)]

    def _actions(
        self, sampling: Sampling, prompts: Prompts, num_samples: int, numbers: Sequence[int] | None
    ) -> list[Rollout]:
        """One action for each sample of each prompt."""
        seeds = self._seeds.of(self._version, prompts, num_samples, numbers)
        request = GenerateRequest(
            prompts=prompts,
            num_samples=num_samples,
            sampling=sampling,
            seeds=[seed >> (128 - _SEED_BITS) for row in seeds for seed in row],
        )
        made: list[Continuation] = self._call("generate", request)
        return [self._rollout(each, sampling) for each in made]

    def _greedy_actions(
        self, max_new_tokens: int, prompts: Prompts, num_samples: int, numbers: Sequence[int] | None
    ) -> list[Rollout]:
        """One greedy action for each prompt; `num_samples` must be 1, and `numbers` None."""
        assert num_samples == 1 and numbers is None
        sampling = Sampling(max_new_tokens=max_new_tokens)
        request = GenerateRequest(prompts=prompts, num_samples=1, sampling=sampling, greedy=True)
        return [self._rollout(each, sampling) for each in self._call("generate", request)]

    def score(self, sequences: Prompts) -> list[FloatArray]:
        return self._call("score", sequences)

    def load(
        self, version: PolicyVersion, weights: object, *, canaries: Sequence[Canary] = (), in_flight: bool = False
    ) -> LoadReport:
        tensors = published_tensors(weights)
        with self._loading:
            if self._merge is not None:
                tensors = self._merge(tensors)
                digest = weights_digest(tensors)  # the version's is that of its adapters
            else:
                digest = version.digest or weights_digest(tensors)
            path = self._staged(digest, tensors)
            process = self._alive()
            try:
                report = process.call("load", self._new_weights(version, path, digest, canaries, in_flight=in_flight))
            except Unavailable as error:
                self._discard(path)
                self._revive(process)
                raise WeightsRefused(f"step {version.step}: the engine's process ended: {error}") from None
            except (ConfigError, WeightsRefused):
                self._discard(path)
                raise
            with self._starting:
                if self._process is not process:  # it ended since, and the next one has the former weights
                    self._discard(path)
                    raise WeightsRefused(f"step {version.step}: the engine's process ended right after it took them")
                old, self._good, self._version = self._good, path, version
            self._seeds.forget()
            if old is not None and old != path:
                old.unlink(missing_ok=True)
            return report

    def cancel(self) -> None:
        self._process.cancel()

    def close(self) -> None:
        """Ends the engine's process, and deletes the weights that were written for it."""
        self._closed.set()  # before the lock: a thread that holds it to start a process gives up
        with self._starting:
            self._process.close()
            _delete_weights(self._directory)

    def _rollout(self, made: Continuation, sampling: Sampling) -> Rollout:
        logprobs = made.logprobs if made.token_ids.size else []  # of no tokens all are known
        return to_rollout(self._tokenizer, sampling, made.token_ids, logprobs, made.spans, made.finish)

    def _new_weights(
        self, version: PolicyVersion, path: Path, digest: Digest, canaries: Sequence[Canary] = (), *, in_flight: bool
    ) -> NewWeights:
        return NewWeights(
            version=version,
            path=path,
            digest=digest,
            canaries=canaries,
            tolerance_nats=self._tolerance,
            in_flight=in_flight,
        )

    def _staged(self, digest: Digest, tensors: "PublishedTensors") -> Path:
        """Writes the tensors atomically to a file named by their digest; returns its path. Raises WeightsRefused."""
        path = self._directory / f"{digest.hex()}.safetensors"
        if path == self._good:  # the same weights under another name: read and verified again
            return path
        try:
            save_tensors(tensors, path)
        except OSError as error:
            raise WeightsRefused(f"{path}: cannot be written: {error}") from None
        return path

    def _discard(self, path: Path) -> None:
        if path != self._good:
            path.unlink(missing_ok=True)

    # --- the process ---------------------------------------------------------------------------

    def _call(self, name: str, body: object) -> Any:
        """Makes a call that changes nothing, once more if the process ends during the call. Raises RolloutFailed."""
        for _ in range(2):
            process = self._alive()
            try:
                return process.call(name, body)
            except Unavailable as error:
                logger.warning("the engine was lost", extra={"call": name, "error": str(error)})
                self._revive(process)
        raise RolloutFailed(f"vllm: the engine's process ended twice over one call of {name}")

    def _alive(self) -> EngineProcess:
        process = self._process
        return process if process.is_running else self._revive(process)

    def _revive(self, lost: EngineProcess) -> EngineProcess:
        """Replaces a lost process by a new one with the last good weights. Raises Unavailable if none starts."""
        with self._starting:
            if self._process is not lost:  # another thread was first
                return self._process
            lost.close()
            backoff = Backoff(None, FIRST_RESTART_S)  # no other process competes
            for attempt in range(RESTARTS):
                if self._closed.wait(backoff.next_s() if attempt else 0.0):  # no event says when there is room again
                    raise Unavailable("vllm: the engine was closed")
                try:
                    self._process = self._started_again()
                    return self._process
                except (Unavailable, WeightsRefused) as error:
                    logger.warning("the engine did not start", extra={"attempt": attempt + 1, "error": str(error)})
            raise Unavailable(f"vllm: no engine could be started in {RESTARTS} attempts; see its log")

    def _started_again(self) -> EngineProcess:
        process = self._launch()
        if self._good is None:
            return process
        version, digest = self._version, bytes.fromhex(self._good.stem)
        try:
            process.call("load", self._new_weights(version, self._good, digest, in_flight=False))
        except BaseException:
            process.close()
            raise
        return process


def _merging(model: ModelConfig) -> Callable[[PublishedTensors], PublishedTensors]:
    """Loads the base model (blocking, slow); returns a function that merges adapters into the model's weights."""
    base = published_state(load_model(model.model_copy(update={"lora_rank": 0})).network)
    return lambda adapters: merged_tensors(base, adapters, model.lora_scale)


def _delete_weights(directory: Path) -> None:
    for path in (*directory.glob("*.safetensors"), *directory.glob(".*.safetensors.partial")):
        path.unlink()
