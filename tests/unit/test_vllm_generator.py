"""The vLLM generator without vLLM: the real process and pipes around a scripted engine, and scripted processes."""

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from waits import HANG_S

from swarm.errors import Unavailable, WeightsRefused
from swarm.generation.vllm_engine import VllmGenerator
from swarm.generation.vllm_messages import EngineSettings
from swarm.generation.vllm_process import EngineProcess
from swarm.model.network import save_tensors
from swarm.model.tokenizer import CharTokenizer
from swarm.types import FinishReason, FloatArray, LoadReport, PolicyVersion, Sampling

START = PolicyVersion(policy_id="a", step=0, digest=bytes(32))
NEXT = PolicyVersion(policy_id="a", step=1)
PROMPTS = [[1, 2], [3]]
WEIGHTS = {"w": torch.ones(4096)}

SCRIPTED = """
import sys, time
import numpy as np
from swarm.generation import vllm_adapter, vllm_server
from swarm.generation.vllm_step_loop import Mode, Progress
from swarm.types import FinishReason

class Scripted:
    name, max_tokens, vocab_size = "scripted", 10_000, 64

    compute_dtype = "float32"

    def __init__(self):
        self.jobs = {}

    def add(self, name, job):
        self.jobs[name] = [job, job.max_new_tokens]

    def drop(self, names):
        for name in names:
            self.jobs.pop(name, None)

    def step(self):
        time.sleep(0.01)  # a step takes its time
        found = []
        for name, made in list(self.jobs.items()):
            made[1] -= 1
            job = made[0]
            if job.mode is Mode.SCORE:
                scores = np.full(len(job.token_ids), -1.0, np.float32)
                found.append(Progress(name=name, finish=FinishReason.LENGTH, scores=scores))
            else:
                finish = FinishReason.LENGTH if made[1] == 0 else None
                found.append(Progress(name=name, token_ids=[5], logprobs=[-0.5], finish=finish))
            if found[-1].finish is not None:
                del self.jobs[name]
        return found

    def reload(self, path):
        pass

vllm_adapter.VllmAdapter = lambda settings: Scripted()
sys.argv = sys.argv[:1] + sys.argv[4:]  # without -P -m MODULE
vllm_server.main()
"""


SIGNS: list[int] = []  # tokens that the engine said it has made


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[VllmGenerator]:
    """A generator whose process is real, and whose engine makes a token 5 in 10 ms."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    save_tensors(WEIGHTS, tmp_path / "model" / "model.safetensors")
    (tmp_path / "scripted.py").write_text(SCRIPTED, encoding="utf-8")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path / "scripted.py"}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    settings = EngineSettings(
        model=str(tmp_path / "model"),
        dtype="float32",
        compute_dtype="auto",
        cpu_dtype="float32",
        max_rows=8,
        eos_ids=[1],
        version=PolicyVersion(policy_id="a", step=0, digest=bytes(32)),
        options={},
        stall_s=60.0,
    )

    def note(what: str, done: int = 0, total: int = 0, num_tokens: int = 0) -> None:
        SIGNS.append(num_tokens)

    def launch() -> EngineProcess:
        return EngineProcess(str(python), settings, tmp_path, 1, note)

    made = VllmGenerator(launch, tmp_path, CharTokenizer(), START, 0, 0.1)
    yield made
    made.close()


class Background:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except Exception as error:
            self._result = error

    def is_over(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def result(self) -> Any:
        """The result of the call, or the error that it raised."""
        assert self.is_over(15.0)
        return self._result


def test_an_engine_gives_signs_of_life_within_a_batch(engine: VllmGenerator) -> None:
    SIGNS.clear()
    asked = Background(lambda: engine.generate([[2, 3]], 1, Sampling(max_new_tokens=9000)))
    deadline_s = time.monotonic() + HANG_S
    while len(SIGNS) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert len(SIGNS) >= 3 and SIGNS[0] < SIGNS[1] < SIGNS[2]
    assert not asked.is_over(0.0)
    assert engine.compute_dtype == "float32"
    engine.cancel()
    asked.result()


def test_an_interrupt_from_the_keyboard_does_not_end_the_engine(engine: VllmGenerator) -> None:
    pid = engine.pid
    making = Background(lambda: engine.generate(PROMPTS, 2, Sampling(max_new_tokens=30)))
    for _ in range(3):
        os.kill(pid, signal.SIGINT)
    assert [len(group) for group in making.result()] == [2, 2]
    engine.generate(PROMPTS, 1, Sampling(max_new_tokens=2))
    assert engine.pid == pid


def test_cancel_ends_a_call_and_never_waits_for_the_engine(engine: VllmGenerator) -> None:
    os.kill(engine.pid, signal.SIGSTOP)
    making = Background(lambda: engine.generate(PROMPTS, 1, Sampling(max_new_tokens=9000)))
    engine.cancel()  # comes back, though the engine stands still
    os.kill(engine.pid, signal.SIGCONT)
    while not making.is_over(0.05):  # that one may have come before the call did
        engine.cancel()
    assert all(rollout.finish is FinishReason.ABORTED for group in making.result() for rollout in group)


def test_a_closed_engine_is_unavailable_and_has_nothing_to_cancel(engine: VllmGenerator) -> None:
    engine.close()
    engine.cancel()
    with pytest.raises(Unavailable):
        engine.generate(PROMPTS, 1, Sampling(max_new_tokens=2))
    with pytest.raises(Unavailable):
        engine.score(PROMPTS)


def test_a_full_disk_refuses_a_version_and_the_one_before_is_served(engine: VllmGenerator, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))  # fails as a full disk does
    try:
        with pytest.raises(WeightsRefused, match="cannot be written"):
            engine.load(NEXT, WEIGHTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert set(tmp_path.iterdir()) == before and engine.version == START
    ((rollout,), _) = engine.generate(PROMPTS, 1, Sampling(max_new_tokens=2))
    assert rollout.trace is not None and rollout.trace.spans[0].version == START
    engine.load(NEXT, WEIGHTS)
    assert engine.version == NEXT


# --- scripted processes ------------------------------------------------------------------------


class Process:
    """A process that scores, and takes weights; `during_load` happens before it answers."""

    pid = 1

    def __init__(self) -> None:
        self.is_running = True
        self.loads: list[PolicyVersion] = []
        self.during_load: Callable[[], object] = lambda: None

    def call(self, name: str, body: Any) -> list[FloatArray] | LoadReport:
        if name == "load":
            self.loads.append(body.version)
            self.during_load()
            return LoadReport(pause_s=0.0, mismatch_nats=0.0)
        if not self.is_running:
            raise Unavailable("gone")
        return [np.zeros(len(sequence), np.float32) for sequence in body]

    def close(self) -> None:
        self.is_running = False


def generator(directory: Path, launch: Callable[[], Process]) -> VllmGenerator:
    return VllmGenerator(cast(Any, launch), directory, CharTokenizer(), START, 0, 0.1)


def test_weights_taken_by_a_process_that_then_ended_are_not_said_to_be_served(tmp_path: Path) -> None:
    processes: list[Process] = []

    def launch() -> Process:
        processes.append(Process())
        return processes[-1]

    engine = generator(tmp_path, launch)

    def crash() -> None:
        processes[0].is_running = False
        engine.score(PROMPTS)  # another call has it started again, with the weights before

    processes[0].during_load = crash
    with pytest.raises(WeightsRefused, match="ended"):
        engine.load(NEXT, WEIGHTS)
    assert engine.version == START and not processes[1].loads and not list(tmp_path.iterdir())
    engine.load(NEXT, WEIGHTS)
    processes[1].is_running = False
    engine.score(PROMPTS)
    assert engine.version == NEXT and processes[2].loads == [NEXT]


def test_closing_ends_the_attempts_to_start_an_engine_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.generation.vllm_engine.FIRST_RESTART_S", 1e6)
    first, tried = Process(), threading.Event()

    def launch() -> Process:
        if first.is_running:
            return first
        tried.set()
        raise Unavailable("no room")

    engine = generator(tmp_path, launch)
    first.is_running = False
    scoring = Background(lambda: engine.score(PROMPTS))
    assert tried.wait(HANG_S)
    engine.close()  # does not wait for the next attempt
    assert isinstance(scoring.result(), Unavailable)
