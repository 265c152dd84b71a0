"""The engine process: `python -m swarm.generation.vllm_server`, started by `EngineProcess`, in vLLM's environment.

Three threads: the main one reads requests, `engine` steps vLLM and answers, `verify` reads a file of new weights while
generation goes on. Invariant: the engine loads only a file whose tensors had the announced digest; the process ends
with its worker, and with any error of the engine, from which it cannot recover.
"""

import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from swarm.errors import ConfigError, WeightsRefused
from swarm.generation.vllm_messages import (
    Continuation,
    EngineSettings,
    GenerateRequest,
    NewWeights,
    decode_line,
    encode_line,
)
from swarm.generation.vllm_step_loop import EngineLoop, Mode, PendingSequence, sequence_to_score
from swarm.process import die_with
from swarm.types import JsonDict, LoadReport, short
from swarm.weights.tensors import PublishedDigest, TorchWeights

logger = logging.getLogger(__name__)

LEAST_TEMPERATURE: Final = 0.01  # vLLM raises lower temperatures, and log-probs would be of another distribution
SIGN_EVERY_S: Final = 1.0
EXIT_CONFIG: Final = 2  # starting again would not help
Shapes = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype as torch names it, shape


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """The largest input an engine takes."""

    max_tokens: int  # of prompt and response together
    vocab_size: int


class RequestHandler:
    """Answers the requests of the worker; no method blocks on the engine.

    Args:
        engine: loop that runs in its own thread.
        limits: largest input of the engine.
        shapes: dtype and shape of each published tensor of the engine's model.
        answer: sends an answer to the worker; called from several threads.
    """

    def __init__(
        self, engine: EngineLoop, limits: EngineLimits, shapes: Shapes, answer: Callable[[JsonDict], None]
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._shapes = shapes
        self._answer = answer

    def handle(self, request: JsonDict) -> None:
        """Begins a request; the answer comes at its end, or at once if it is invalid. A cancel gets no answer."""
        number, body = request["id"], request["body"]
        try:
            if request["call"] == "generate":
                self._generate(number, body)
            elif request["call"] == "score":
                self._score(number, body)
            elif request["call"] == "load":
                self._load(number, body)
            else:
                self._engine.cancel()
        except ConfigError as error:
            self._refuse(number, error)

    def _generate(self, number: int, wanted: GenerateRequest) -> None:
        sampling = wanted.sampling
        if not wanted.greedy and sampling.temperature < LEAST_TEMPERATURE:
            raise ConfigError(
                f"sampling: temperature {sampling.temperature:.3g} is below {LEAST_TEMPERATURE}, vLLM's least"
            )
        if sampling.max_new_tokens < 1:
            raise ConfigError(f"sampling: max_new_tokens {sampling.max_new_tokens} is below 1")
        for prompt in wanted.prompts:
            self._check_length(prompt, sampling.max_new_tokens)
        mode = Mode.GREEDY if wanted.greedy else Mode.SAMPLE
        prompts = [prompt for prompt in wanted.prompts for _ in range(wanted.num_samples)]
        seeds = [0] * len(prompts) if wanted.greedy else wanted.seeds
        if not prompts:
            return self._answer({"id": number, "result": []})
        rows: list[PendingSequence] = []
        ended = _Countdown(len(prompts), lambda: self._answer({"id": number, "result": list(map(_continuation, rows))}))
        rows += [
            PendingSequence(prompt, mode, sampling, seed, ended) for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        self._engine.submit(rows)

    def _score(self, number: int, sequences: Sequence[Sequence[int]]) -> None:
        for sequence in sequences:
            self._check_length(sequence, 1)
        rows: list[PendingSequence] = []
        num_scored = sum(len(sequence) > 1 for sequence in sequences)  # a single token has nothing before it
        ended = _Countdown(num_scored, lambda: self._answer({"id": number, "result": [row.scored() for row in rows]}))
        rows += [sequence_to_score(sequence, ended) for sequence in sequences]
        self._engine.submit([row for row in rows if row.scores is None])
        if num_scored == 0:
            self._answer({"id": number, "result": [row.scored() for row in rows]})

    def _load(self, number: int, new: NewWeights) -> None:
        for canary in new.canaries:
            self._check_length(canary.token_ids.tolist(), 1)

        def verify_then_load() -> None:
            try:
                verify_file(new.path, new.digest, self._shapes)
            except (ConfigError, WeightsRefused) as error:
                return self._refuse(number, error)
            self._engine.load(new).add_done_callback(answer)

        def answer(done: "Future[LoadReport]") -> None:
            error = done.exception()
            if error is None:
                self._answer({"id": number, "result": done.result()})
            else:
                self._refuse(number, error)

        threading.Thread(target=verify_then_load, name="verify", daemon=True).start()

    def _refuse(self, number: int, error: BaseException) -> None:
        self._answer({"id": number, "error": type(error).__name__, "message": str(error)})

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


class _Countdown:
    """Calls `done` in the engine's thread when `num_rows` rows, at least one, have ended."""

    def __init__(self, num_rows: int, done: Callable[[], None]) -> None:
        self._num_left = num_rows
        self._done = done

    def __call__(self, row: PendingSequence) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self._done()


class SignsOfLife:
    """Reports to the worker the number of tokens that the engine has made, at most once per SIGN_EVERY_S."""

    def __init__(self, answer: Callable[[JsonDict], None], monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._answer, self._monotonic_s = answer, monotonic_s
        self._num_tokens = 0
        self._answered_s = -math.inf

    def made(self, num_tokens: int) -> None:
        """Adds a step's tokens (0 if it only reads prompts); reports the total if SIGN_EVERY_S have passed."""
        self._num_tokens += num_tokens
        if self._monotonic_s() - self._answered_s >= SIGN_EVERY_S:
            self._answered_s = self._monotonic_s()
            self._answer({"tokens": self._num_tokens})


def _continuation(row: PendingSequence) -> Continuation:
    """Continuation of an ended row; if any log-prob of the row is not finite, all are left out as unreliable."""
    logprobs = np.asarray(row.logprobs, np.float32) if row.mode is Mode.SAMPLE else None
    if logprobs is not None and not np.isfinite(logprobs).all():
        logger.warning("a log-prob of the engine is no finite number: those of its sequence are left out")
        logprobs = None
    return Continuation(
        token_ids=np.asarray(row.tokens, np.int32), logprobs=logprobs, spans=row.spans, finish=row.finish
    )


# --- files of weights ---------------------------------------------------------------------------


def verify_file(path: Path, digest: bytes, shapes: Shapes) -> None:
    """Checks names, dtypes, shapes and digest of the published tensors in a file (blocking).

    Raises:
        ConfigError: the tensors do not fit this model.
        WeightsRefused: the file cannot be read, or its tensors have another digest.
    """
    from safetensors import SafetensorError, safe_open

    computed = PublishedDigest()
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
                computed.update(weights[name])
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise WeightsRefused(f"{path.name}: cannot be read: {error}") from None
    if computed.digest() != digest:
        raise WeightsRefused(f"digest of the tensors is {short(computed.digest())}, announced was {short(digest)}")


def _check_names(names: Sequence[str], shapes: Shapes) -> None:
    unknown = sorted(set(names) - shapes.keys())
    missing = sorted(shapes.keys() - set(names))
    if unknown or missing:
        side, name = ("unknown", unknown[0]) if unknown else ("missing", missing[0])
        raise ConfigError(f"published tensors do not fit this model: {name!r} is {side}")


def shapes_of(folder: Path, dtype: str) -> Shapes:
    """Dtype and shape of the published tensors of a model, from its checkpoint, without a tied output head."""
    from safetensors import safe_open

    shapes: Shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names: list[str] = file.keys()
            shapes.update({name: (dtype, tuple(file.get_slice(name).get_shape())) for name in names})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("tie_word_embeddings", False):
        shapes.pop("lm_head.weight", None)
    return shapes


# --- the process --------------------------------------------------------------------------------


def main() -> None:
    """Starts the engine, reports it as ready, and answers until standard input ends; `argv[1]` is the worker's pid."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the worker, which ends this process in its turn
    die_with(int(sys.argv[1]))
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # whatever prints from now on goes to the log
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    writing = threading.Lock()

    def answer(message: JsonDict) -> None:
        line = memoryview(encode_line(message))
        with writing:
            while line:
                line = line[answers.write(line) :]

    try:
        from swarm.generation.vllm_adapter import VllmAdapter

        settings: EngineSettings = decode_line(requests.readline())
        adapter = VllmAdapter(settings)
    except (ConfigError, ImportError) as error:
        answer({"missing" if isinstance(error, ImportError) else "error": str(error)})
        sys.exit(EXIT_CONFIG)
    engine = EngineLoop(adapter, settings.version, SignsOfLife(answer).made)
    threading.Thread(target=_run, args=(engine,), name="engine", daemon=True).start()
    limits = EngineLimits(max_tokens=adapter.max_tokens, vocab_size=adapter.vocab_size)
    handler = RequestHandler(engine, limits, shapes_of(Path(settings.model), settings.dtype), answer)
    answer({"ready": adapter.name, "compute_dtype": adapter.compute_dtype})
    for line in requests:  # it ends when the worker closes its side, or ends
        handler.handle(decode_line(line))
    engine.stop()
    os._exit(0)  # vLLM's threads and exit handlers would take seconds; nothing is left to be saved


def _run(engine: EngineLoop) -> None:
    try:
        engine.run()
    except BaseException:
        logger.exception("the engine failed")
        logging.shutdown()
        os._exit(1)


if __name__ == "__main__":
    main()
