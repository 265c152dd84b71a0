"""The vLLM adapter's reading of vLLM's outputs: a scripted LLMEngine in place of vLLM's."""

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from waits import HANG_S

from swarm.errors import WeightsRefused
from swarm.generation.vllm_adapter import TESTED, VllmAdapter
from swarm.generation.vllm_messages import EngineSettings, GenerateRequest, NewWeights
from swarm.generation.vllm_server import EngineLimits, RequestHandler
from swarm.generation.vllm_step_loop import EngineLoop, Mode, PendingSequence, sequence_to_score
from swarm.types import Canary, FinishReason, PolicyVersion, Sampling

NAN = float("nan")
VERSION = PolicyVersion(policy_id="a", step=1)


class ScriptedLLMEngine:
    """Ends every request in its first step, with the output that was scripted for requests of its kind."""

    model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 32)

    def __init__(self) -> None:
        self.outputs: dict[str, Any] = {}  # by "sample" and "score"
        self._asked: dict[str, Any] = {}  # prompt ids and parameters, by request

    def add_request(self, name: str, prompt: Any, parameters: Any) -> None:
        self._asked[name] = (prompt["prompt_token_ids"], parameters)

    def step(self) -> list[Any]:
        asked, self._asked = self._asked, {}
        return [self._output(name, ids, hasattr(how, "prompt_logprobs")) for name, (ids, how) in asked.items()]

    def abort_request(self, names: list[str]) -> None:
        """Forgets requests."""
        for name in names:
            self._asked.pop(name, None)

    def collective_rpc(self, what: str, args: tuple[object, ...] = ()) -> None:
        """New weights."""

    def _output(self, name: str, ids: list[int], is_score: bool) -> Any:
        scripted = self.outputs["score" if is_score else "sample"]
        return SimpleNamespace(request_id=name, finished=True, prompt_token_ids=ids, **vars(scripted))


def sampled(tokens: list[int], logprobs: list[float], reason: str = "length") -> Any:
    made = SimpleNamespace(token_ids=tokens, logprobs=SimpleNamespace(logprobs=logprobs), finish_reason=reason)
    return SimpleNamespace(outputs=[made], prompt_logprobs=None)


def scored(tokens: list[int], logprobs: list[float]) -> Any:
    """Of a prompt, whose first token has no log-prob."""
    places = range(len(tokens))
    flat = SimpleNamespace(
        start_indices=[max(place - 1, 0) for place in places],
        end_indices=list(places),
        token_ids=tokens[1:],
        logprobs=logprobs,
    )
    made = SimpleNamespace(token_ids=[9], logprobs=None, finish_reason="length")
    return SimpleNamespace(outputs=[made], prompt_logprobs=flat)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ScriptedLLMEngine:
    """The engine that an adapter finds where vLLM would be."""
    engine = ScriptedLLMEngine()
    names = ("vllm", "vllm.platforms", "vllm.sampling_params", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.llm_engine")
    package, platforms, parameters, _, _, llm_engine = modules = [ModuleType(name) for name in names]
    package.__dict__.update(__version__=f"{TESTED[0]}0", EngineArgs=SimpleNamespace, SamplingParams=SimpleNamespace)
    platforms.__dict__.update(current_platform=SimpleNamespace(is_cpu=lambda: False))
    parameters.__dict__.update(RequestOutputKind=SimpleNamespace(DELTA=1))
    llm_engine.__dict__.update(LLMEngine=SimpleNamespace(from_engine_args=lambda arguments: engine))
    for name, module in zip(names, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return engine


def settings_of(compute_dtype: str) -> EngineSettings:
    return EngineSettings(
        model="model",
        dtype="bfloat16",
        compute_dtype=compute_dtype,
        cpu_dtype="float32",
        max_rows=4,
        eos_ids=[1],
        version=VERSION,
        options={},
        stall_s=60.0,
    )


@pytest.fixture
def loop(vllm: ScriptedLLMEngine) -> Iterator[EngineLoop]:
    """An adapter's loop, in its thread."""
    made = EngineLoop(VllmAdapter(settings_of("auto")), VERSION)
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    thread.join()


def ended(loop: EngineLoop, row: Callable[[Callable[[PendingSequence], None]], PendingSequence]) -> PendingSequence:
    """A sequence after its end."""
    over = threading.Event()
    made = row(lambda _: over.set())
    loop.submit([made])
    assert over.wait(HANG_S), "it never ended"
    return made


def sample(loop: EngineLoop) -> PendingSequence:
    return ended(loop, lambda tell: PendingSequence([1], Mode.SAMPLE, Sampling(max_new_tokens=4), 0, tell))


def answer_to(loop: EngineLoop, call: str, body: object) -> Any:
    """The engine process's answer to a request."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    RequestHandler(loop, EngineLimits(max_tokens=64, vocab_size=32), {}, answers.put).handle(
        {"id": 7, "call": call, "body": body}
    )
    answer = answers.get(timeout=HANG_S)
    assert answer["id"] == 7 and answers.empty()
    return answer["result"]


def test_rounding_above_zero_is_taken_off_and_nan_stays_nan(vllm: ScriptedLLMEngine, loop: EngineLoop) -> None:
    vllm.outputs = {"sample": sampled([5, 6, 7], [NAN, -1.0, 1e-6]), "score": scored([6, 7, 8, 9], [NAN, -1.0, 1e-6])}
    np.testing.assert_array_equal(sample(loop).logprobs, [NAN, -1.0, 0.0])
    scores = ended(loop, lambda tell: sequence_to_score([6, 7, 8, 9], tell)).scores
    np.testing.assert_array_equal(scores, [NAN, NAN, -1.0, 0.0])


def test_canaries_without_numbers_refuse_a_version(vllm: ScriptedLLMEngine, loop: EngineLoop) -> None:
    vllm.outputs = {"score": scored([6, 7, 8], [NAN, 0.0])}
    canary = Canary(token_ids=np.array([6, 7, 8], np.int32), logprobs=np.array([np.nan, 0.0, 0.0], np.float32))
    done = loop.load(
        NewWeights(version=VERSION, path=Path("new"), digest=b"", canaries=[canary], tolerance_nats=0.1, in_flight=True)
    )
    with pytest.raises(WeightsRefused, match="inf"):
        done.result()


@pytest.mark.parametrize("reason", ["error", "abort", "repetition", "invented later", None])
@pytest.mark.parametrize("tokens", [[5], []])
def test_an_end_for_another_reason_is_an_abortion(
    vllm: ScriptedLLMEngine, loop: EngineLoop, reason: Any, tokens: list[int]
) -> None:
    vllm.outputs = {"sample": sampled(tokens, [-1.0] * len(tokens), reason)}
    row = sample(loop)
    assert row.finish is FinishReason.ABORTED and row.tokens == tokens
    assert [(span.start, span.version) for span in row.spans] == [(0, VERSION)]


def test_scores_that_the_engine_gave_up_are_nan(vllm: ScriptedLLMEngine, loop: EngineLoop) -> None:
    vllm.outputs = {"score": sampled([], [], "error")}
    (scores,) = answer_to(loop, "score", [[6, 7, 8]])
    assert scores.shape == (3,) and np.isnan(scores).all()


@pytest.mark.parametrize(("given", "claimed"), [([-1.0, -2.0], [-1.0, -2.0]), ([-1.0, NAN], None)])
def test_logprobs_that_are_no_numbers_are_not_claimed(
    vllm: ScriptedLLMEngine, loop: EngineLoop, given: list[float], claimed: list[float] | None
) -> None:
    vllm.outputs = {"sample": sampled([5, 6], given)}
    wanted = GenerateRequest(prompts=[[1]], num_samples=1, sampling=Sampling(max_new_tokens=2), seeds=[0])
    (made,) = answer_to(loop, "generate", wanted)
    assert made.token_ids.tolist() == [5, 6]
    assert (None if made.logprobs is None else made.logprobs.tolist()) == claimed


def test_requests_for_nothing_are_answered_at_once(loop: EngineLoop) -> None:
    assert answer_to(loop, "score", []) == []
    (alone,) = answer_to(loop, "score", [[5]])
    assert np.isnan(alone).all() and alone.shape == (1,)
    assert answer_to(loop, "generate", GenerateRequest(prompts=[], num_samples=2, sampling=Sampling())) == []


@pytest.mark.parametrize(
    ("asked", "is_cpu", "expected"),
    [
        ("auto", True, "float32"),
        ("auto", False, "bfloat16"),
        ("float32", False, "float32"),
        ("bfloat16", True, "bfloat16"),
    ],
)
def test_auto_is_what_was_measured_on_a_cpu_and_the_published_dtype_on_a_gpu(
    asked: str, is_cpu: bool, expected: str, vllm: ScriptedLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["vllm.platforms"], "current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    assert VllmAdapter(settings_of(asked)).compute_dtype == expected
