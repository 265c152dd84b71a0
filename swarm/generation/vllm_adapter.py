"""Adapter that makes vLLM a step-wise engine: the only module that calls vLLM.

Invariant: log-probs are those of the distribution that was sampled from, at the sampling temperature, and NaN if vLLM
returns none; steps are synchronous, so that no token is being computed between two steps. Runs in vLLM's environment
only.
"""

import faulthandler
import logging
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from swarm.errors import ConfigError
from swarm.generation.vllm_messages import EngineSettings
from swarm.generation.vllm_step_loop import Job, Mode, Progress
from swarm.types import FinishReason, FloatArray

logger = logging.getLogger(__name__)

TESTED: Final = ("0.32.",)  # vLLM's interfaces move; with another version expect to adapt this module
CPU_CACHE_BYTES: Final = 1 << 30  # vLLM would take most of the machine's memory
_FINISH: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}  # all other reasons: aborted
# Settings that the other modules rely on; engine.options cannot change them.
_FIXED: Final[Mapping[str, Any]] = {
    "skip_tokenizer_init": True,
    "generation_config": "vllm",  # not the model's own sampling defaults
    "logprobs_mode": "processed_logprobs",  # after temperature: of the distribution that is sampled
    "async_scheduling": False,
    "worker_extension_cls": "swarm.generation.vllm_adapter.SwarmWorker",
    "disable_log_stats": True,
}


class VllmAdapter:
    """A vLLM engine in this process; implements `swarm.generation.vllm_step_loop.StepEngine`.

    Raises:
        ConfigError: vLLM does not take these settings.
    """

    def __init__(self, settings: EngineSettings) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # read when vllm is imported
        import vllm
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        if not vllm.__version__.startswith(TESTED):
            logger.warning("not tested with this vLLM", extra={"version": vllm.__version__, "tested": TESTED})
        options = settings.options
        forbidden = sorted(options.keys() & _FIXED.keys())
        if forbidden:
            raise ConfigError(f"engine.options.{forbidden[0]}: is not to be changed; remove it")
        own: dict[str, Any] = {"max_num_seqs": settings.max_rows, "enable_prefix_caching": True}
        if current_platform.is_cpu():
            own["enforce_eager"] = True  # compiling needs a C++ compiler and minutes
            # A prompt in parts ends the engine there: it rewinds the random numbers of a seeded request, which a
            # generator of the CPU cannot ("CPU Generator does not use offset", seen with 0.32.0).
            own["enable_chunked_prefill"] = False
            if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
                own["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
        automatic = settings.cpu_dtype if current_platform.is_cpu() else settings.dtype
        self.compute_dtype = automatic if settings.compute_dtype == "auto" else settings.compute_dtype
        try:
            arguments = vllm.EngineArgs(model=settings.model, dtype=self.compute_dtype, **{**own, **options, **_FIXED})
        except TypeError as error:
            raise ConfigError(f"engine.options: {error}") from None
        try:
            self._engine: Any = LLMEngine.from_engine_args(arguments)
        except (ValueError, NotImplementedError) as error:  # of its own checks of model and arguments
            raise ConfigError(f"vLLM does not run this model with these engine.options: {error}") from error
        self._eos_ids = settings.eos_ids
        self._stall_s = settings.stall_s
        self.name = f"vllm {vllm.__version__}"
        self.max_tokens = int(self._engine.model_config.max_model_len)
        self.vocab_size = int(self._engine.model_config.get_vocab_size())

    def add(self, name: str, job: Job) -> None:
        """Schedules a sequence; later calls of `step` report its progress under `name`."""
        prompt: Any = {"type": "token", "prompt_token_ids": list(job.token_ids), "cache_salt": job.salt}
        self._engine.add_request(name, prompt, self._parameters(job))

    def drop(self, names: Sequence[str]) -> None:
        """Aborts sequences in progress; later steps do not report them."""
        if names:
            self._engine.abort_request(list(names))

    def step(self) -> list[Progress]:
        """Makes one step of the scheduled sequences and returns their progress; a hung step ends the process."""
        with at_most(self._stall_s):
            return [_progress(output) for output in self._engine.step()]

    def reload(self, path: Path | None) -> None:
        """Loads the weights from a safetensors file; if `path` is None, restores the engine's initial weights."""
        with at_most(self._stall_s):
            if path is None:
                self._engine.collective_rpc("swarm_reload_first")
            else:
                self._engine.collective_rpc("swarm_reload", args=(str(path),))

    def _parameters(self, job: Job) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        common: dict[str, Any] = {
            "max_tokens": job.max_new_tokens,
            "stop_token_ids": self._eos_ids,
            "detokenize": False,
            "output_kind": RequestOutputKind.DELTA,
            "flat_logprobs": True,
        }
        if job.mode is Mode.SCORE:
            return SamplingParams(temperature=0.0, prompt_logprobs=0, **{**common, "max_tokens": 1})
        if job.mode is Mode.GREEDY:
            return SamplingParams(temperature=0.0, **common)
        sampling = job.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            seed=job.seed,
            logprobs=0,
            **common,
        )


def _progress(output: Any) -> Progress:
    made = output.outputs[0]
    finish = _FINISH.get(made.finish_reason, FinishReason.ABORTED) if output.finished else None
    if output.prompt_logprobs is not None:
        return Progress(name=output.request_id, finish=finish, scores=_scores(output))
    logprobs = [] if made.logprobs is None else [_at_most_0(value) for value in made.logprobs.logprobs]
    assert made.logprobs is None or len(logprobs) == len(made.token_ids), "one log-prob a token was asked for"
    return Progress(name=output.request_id, token_ids=list(made.token_ids), logprobs=logprobs, finish=finish)


def _scores(output: Any) -> FloatArray:
    """[T] log-probs of the prompt, the first NaN; vLLM may give the likeliest token beside the actual one."""
    flat, ids = output.prompt_logprobs, output.prompt_token_ids
    scores = np.full(len(ids), np.nan, np.float32)
    for place, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        for at in range(start, end):
            if flat.token_ids[at] == ids[place]:
                scores[place] = _at_most_0(flat.logprobs[at])
    return scores


def _at_most_0(logprob: float) -> float:
    """The log-prob, or 0 where rounding made it positive. NaN stays NaN: min(0.0, nan) would be 0, a certain token."""
    return 0.0 if logprob > 0.0 else logprob


@contextmanager
def at_most(seconds: float) -> Generator[None]:
    """Watchdog: ends the process, with a traceback of every thread on stderr, if the block takes longer.

    Must not be nested. The bound also holds if native code never releases the interpreter's lock.

    Example:
        with at_most(600.0):
            engine.step()
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


# --- in each of vLLM's workers, one per device ---------------------------------------------------


class SwarmWorker:
    """Mix-in for vLLM's worker class, set by `worker_extension_cls`; called through `collective_rpc`."""

    model_runner: Any

    def swarm_reload(self, path: str) -> None:
        """Loads the weights from a safetensors file with checkpoint names."""
        self.model_runner.reload_weights(weights_iterator=_tensors(path))
        _pack_again(self.model_runner.get_model())

    def swarm_reload_first(self) -> None:
        """Restores the weights that the engine started with."""
        self.model_runner.reload_weights()
        _pack_again(self.model_runner.get_model())


def _tensors(path: str) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        names: list[str] = file.keys()
        for name in names:
            yield name, file.get_tensor(name)


def _pack_again(model: Any) -> None:
    """Renews packed copies that reload_weights leaves as they are.

    On CPU, an output head that is tied to the embedding multiplies with its own packed copy. reload_weights renews the
    embedding only, as no tensor of the checkpoint has the head's name (seen with vLLM 0.32.0: log-probs were wrong by
    0.3 nats on average, without any error).
    """
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        # A layer that is not tied no longer has the weight that its copy was made from, and was renewed already.
        if hasattr(module, "cpu_linear") and weight is not None and weight.dim() == 2 and weight.numel() > 0:
            module.quant_method.process_weights_after_loading(module)
