"""The process of a vLLM engine: `python -m swarm.generation.vllm_server`, started by `VllmGenerator`, not by people.

Invariant: the engine is touched only with a file whose tensors have the announced digest; the process ends with the
worker that started it, and with any error of the engine, which nothing can mend from inside.
"""

import argparse
import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from swarm.errors import ConfigError, WeightsRefused
from swarm.generation.vllm_settings import EngineSettings
from swarm.generation.vllm_step_loop import EngineLoop, Mode, Row, score_row
from swarm.types import FloatArray, LoadReport, Rollout, TokenTrace, short
from swarm.weights.tensors import PublishedDigest, TorchWeights
from swarm.wire.engine import EngineState, GenerateRequest, Made, NewWeights, serve_engine

if TYPE_CHECKING:
    from swarm.generation.vllm_adapter import VllmAdapter

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
LEAST_TEMPERATURE: Final = 0.01  # vLLM replaces a lower one, and log-probs would be of another distribution
EXIT_CONFIG: Final = 2  # starting again would not help
Shapes = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype as torch names it, shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the engine can take."""

    max_tokens: int  # of prompt and response together
    vocab_size: int


class _Ended:
    """Rows on their way from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rows: asyncio.Queue[Row] = asyncio.Queue()

    def put(self, row: Row) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._rows.put_nowait, row)

    async def get(self) -> Row:
        """The next one."""
        return await self._rows.get()


class Handler:
    """Answers the calls of the worker; see `swarm.wire.engine.EngineHandler`. Lives on the event loop.

    Args:
        engine: runs in a thread of its own.
        name: of the engine, for people.
        limits: what it takes.
        shapes: of the tensors of the model it was started with.
    """

    def __init__(self, engine: EngineLoop, name: str, limits: Limits, shapes: Shapes) -> None:
        self._engine = engine
        self._name = name
        self._limits = limits
        self._shapes = shapes

    def state(self) -> EngineState:
        """What it serves now."""
        return EngineState(name=self._name, version=self._engine.version, num_loads=self._engine.num_loads)

    async def generate(self, wanted: GenerateRequest) -> AsyncIterator[Made]:
        """Sequences as they end. Raises ConfigError."""
        self._check(wanted)
        ended = _Ended()
        mode = Mode.GREEDY if wanted.greedy else Mode.SAMPLE
        seeds = wanted.seeds if not wanted.greedy else [0] * (len(wanted.prompts) * wanted.num_samples)
        prompts = [prompt for prompt in wanted.prompts for _ in range(wanted.num_samples)]
        rows = [
            Row(prompt, mode, wanted.sampling, seed, ended.put) for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        places = {id(row): divmod(place, wanted.num_samples) for place, row in enumerate(rows)}
        self._engine.submit(rows)
        try:
            for _ in rows:
                row = await ended.get()
                prompt, sample = places[id(row)]
                yield Made(prompt=prompt, sample=sample, rollout=_rollout(row))
        finally:
            self._engine.forget(rows)

    def cancel(self) -> None:
        """Ends all sequences in the making: they come out aborted."""
        self._engine.cancel()

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """[T] log-probs of each sequence. Raises ConfigError."""
        for sequence in sequences:
            self._check_length(sequence, 1)
        ended = _Ended()
        rows = [score_row(sequence, ended.put) for sequence in sequences]
        asked = [row for row in rows if row.scores is None]
        self._engine.submit(asked)
        try:
            for _ in asked:
                await ended.get()
        finally:
            self._engine.forget(asked)
        return [row.scored() for row in rows]

    async def load(self, new: NewWeights) -> LoadReport:
        """Becomes that version. Raises WeightsRefused, ConfigError."""
        for canary in new.canaries:
            self._check_length(canary.token_ids.tolist(), 1)
        await asyncio.to_thread(verify_file, new.path, new.digest, self._shapes)
        done = self._engine.load(
            new.version,
            new.path,
            new.canaries,
            tolerance_nats=new.tolerance_nats,
            in_flight=new.in_flight,
        )
        return await asyncio.wrap_future(done)

    def _check(self, wanted: GenerateRequest) -> None:
        sampling = wanted.sampling
        if not wanted.greedy and sampling.temperature < LEAST_TEMPERATURE:
            raise ConfigError(
                f"sampling: temperature {sampling.temperature:.3g} is below {LEAST_TEMPERATURE}, vLLM's least"
            )
        if sampling.max_new_tokens < 1:
            raise ConfigError(f"sampling: max_new_tokens {sampling.max_new_tokens} is below 1")
        for prompt in wanted.prompts:
            self._check_length(prompt, sampling.max_new_tokens)

    def _check_length(self, token_ids: Sequence[int], num_more: int) -> None:
        if len(token_ids) == 0:
            raise ConfigError("an empty prompt has no next token")
        if len(token_ids) + num_more > self._limits.max_tokens:
            raise ConfigError(
                f"{len(token_ids)} tokens and {num_more} more exceed the {self._limits.max_tokens} of this engine; "
                "see engine.options.max_model_len"
            )
        if max(token_ids) >= self._limits.vocab_size:
            raise ConfigError(f"token id {max(token_ids)} is outside the vocabulary of {self._limits.vocab_size}")


def _rollout(row: Row) -> Rollout:
    num_tokens = len(row.tokens)
    trace = TokenTrace(
        token_ids=np.asarray(row.tokens, np.int32),
        action_mask=np.ones(num_tokens, np.bool_),
        logprobs=_logprobs(row),
        turn_ids=np.zeros(num_tokens, np.int16),
        spans=tuple(row.spans),
    )
    return Rollout(text="", trace=trace, sampling=row.sampling, finish=row.finish, claimed_reward=float("nan"))


def _logprobs(row: Row) -> FloatArray | None:
    """[T] of a sampled sequence; None where one is no finite number, since what the others are worth nobody knows."""
    logprobs = np.asarray(row.logprobs, np.float32)
    if row.mode is not Mode.SAMPLE:
        return None
    if not np.isfinite(logprobs).all():
        logger.warning("a log-prob of the engine is no finite number: those of its sequence are left out")
        return None
    return logprobs


def verify_file(path: Path, digest: bytes, shapes: Shapes) -> None:
    """Reads a file of published tensors once.

    Raises:
        ConfigError: the tensors are not those of this model.
        WeightsRefused: it cannot be read, or its digest is another.
    """
    from safetensors import SafetensorError, safe_open

    found = PublishedDigest()
    try:
        with safe_open(path, "pt") as file:
            names: list[str] = sorted(file.keys())
            _check_names(names, shapes)
            for name in names:
                weights = TorchWeights({name: file.get_tensor(name)})
                spec = weights.specs[0]
                if (spec.dtype, spec.shape) != shapes[name]:
                    raise ConfigError(
                        f"published tensor {name!r}: got {spec.dtype} {spec.shape}, this engine has {shapes[name]}"
                    )
                found.update(weights[name])
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise WeightsRefused(f"{path.name}: cannot be read: {error}") from None
    if found.digest() != digest:
        raise WeightsRefused(f"digest of the tensors is {short(found.digest())}, announced was {short(digest)}")


def _check_names(names: Sequence[str], shapes: Shapes) -> None:
    unknown = sorted(set(names) - shapes.keys())
    missing = sorted(shapes.keys() - set(names))
    if unknown or missing:
        side, name = ("unknown", unknown[0]) if unknown else ("missing", missing[0])
        raise ConfigError(f"published tensors do not fit this model: {name!r} is {side}")


def shapes_of(folder: Path, dtype: str) -> Shapes:
    """What the published tensors of a model look like: those of its checkpoint, a tied output head once."""
    from safetensors import safe_open

    found: Shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names: list[str] = file.keys()
            found.update({name: (dtype, tuple(file.get_slice(name).get_shape())) for name in names})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("tie_word_embeddings", False):
        found.pop("lm_head.weight", None)
    return found


# --- the process -------------------------------------------------------------------------------


def main() -> None:
    """Starts the engine, says on standard output that it is ready, and serves until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the worker, which ends this process in its turn
    parser = argparse.ArgumentParser(description="A vLLM engine of a node.")
    parser.add_argument("--settings", type=Path, required=True, help="JSON, written by the worker")
    parser.add_argument("--socket", required=True, help="path to serve on")
    parser.add_argument("--parent", type=int, required=True, help="process id of the worker")
    arguments = parser.parse_args()
    _die_with(arguments.parent)
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints from now on goes to the log
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = EngineSettings.read(arguments.settings)
        adapter = _start(settings)
    except (ConfigError, ImportError) as error:
        kind = "missing" if isinstance(error, ImportError) else "error"
        print(json.dumps({kind: str(error)}), file=answer, flush=True)
        sys.exit(EXIT_CONFIG)
    engine = EngineLoop(adapter, settings.version)
    threading.Thread(target=_run, args=(engine,), name="engine", daemon=True).start()
    limits = Limits(max_tokens=adapter.max_tokens, vocab_size=adapter.vocab_size)
    handler = Handler(engine, adapter.name, limits, shapes_of(Path(settings.model), settings.dtype))

    def tell() -> None:
        print(json.dumps({"ready": adapter.name}), file=answer, flush=True)

    asyncio.run(_serve(handler, arguments.socket, tell))
    engine.stop()
    os._exit(0)  # vLLM's threads and exit handlers would take seconds; nothing is left to be saved


def _start(settings: EngineSettings) -> "VllmAdapter":
    from swarm.generation.vllm_adapter import VllmAdapter

    return VllmAdapter(
        Path(settings.model),
        dtype=settings.dtype,
        max_rows=settings.max_rows,
        eos_ids=settings.eos_ids,
        options=settings.options,
        stall_s=settings.stall_s,
    )


async def _serve(handler: Handler, socket_path: str, tell: Any) -> None:
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait_for_the_end() -> None:
        sys.stdin.buffer.read()  # the worker writes nothing: this ends when it closes its side, or ends
        loop.call_soon_threadsafe(closed.set)

    async def until() -> None:
        tell()
        await closed.wait()

    threading.Thread(target=wait_for_the_end, name="stdin", daemon=True).start()
    await serve_engine(handler, socket_path, until())


def _run(engine: EngineLoop) -> None:
    try:
        engine.run()
    except BaseException:
        logger.exception("the engine failed")
        logging.shutdown()
        os._exit(1)


def _die_with(parent: int) -> None:
    """Has the kernel end this process when the thread that started it ends, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this was in force
        sys.exit(f"the worker (process {parent}) is gone")


if __name__ == "__main__":
    main()
