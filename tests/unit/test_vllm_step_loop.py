"""The engine loop with a scripted engine: spans, refusals taken back, cancelled and held sequences."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from waits import HANG_S

from swarm.errors import WeightsRefused
from swarm.generation.vllm_messages import NewWeights
from swarm.generation.vllm_step_loop import EngineLoop, Job, Mode, PendingSequence, Progress, sequence_to_score
from swarm.types import Canary, FinishReason, LoadReport, PolicyVersion, Sampling

OLD = PolicyVersion(policy_id="a", step=1)
NEW = PolicyVersion(policy_id="a", step=2)


class ScriptedEngine:
    """Each token is the number of the weights that made it; log-probs of a text are minus that number.

    A prompt is read when its job is taken up, and the first token after it is of the weights that read it.
    """

    def __init__(self) -> None:
        self.weights = 1  # of OLD; a file named "2" holds those of NEW
        self.jobs: dict[str, Job] = {}
        self.made: dict[str, int] = {}
        self.read_by: dict[str, int] = {}  # the weights, by job
        self.taken: list[Job] = []
        self.before_step: Callable[[int], None] = lambda number: None
        self.num_steps = 0
        self.fails_on = ""

    def add(self, name: str, job: Job) -> None:
        assert job.max_new_tokens > 0
        self.jobs[name], self.made[name] = job, 0
        self.read_by[name] = self.weights
        self.taken.append(job)

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            self.jobs.pop(name, None)

    def step(self) -> list[Progress]:
        self.num_steps += 1
        self.before_step(self.num_steps)
        found: list[Progress] = []
        for name, job in list(self.jobs.items()):
            self.made[name] += 1
            if job.mode is Mode.SCORE:
                scores = np.full(len(job.token_ids), -float(self.weights), np.float32)
                scores[0] = np.nan
                found.append(Progress(name=name, finish=FinishReason.LENGTH, scores=scores))
            else:
                is_over = self.made[name] == job.max_new_tokens
                finish = FinishReason.LENGTH if is_over else None
                token = self.read_by[name] if self.made[name] == 1 else self.weights
                found.append(Progress(name=name, token_ids=[token], logprobs=[-0.5], finish=finish))
            if found[-1].finish is not None:
                del self.jobs[name]
        return found

    def reload(self, path: Path | None) -> None:
        if path is not None and path.name == self.fails_on:
            self.weights = -1  # half-way
            raise RuntimeError("no memory")
        self.weights = 1 if path is None else int(path.name)


class Running:
    """A loop in its thread, and what it told."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.loop = EngineLoop(self.engine, OLD)
        self.ended: list[PendingSequence] = []
        self.all_ended = threading.Event()
        self._expected = 0
        self._thread = threading.Thread(target=self.loop.run)

    def start(self, *sizes: int) -> list[PendingSequence]:
        """Submits a sequence of each size, then begins to work."""
        rows = [PendingSequence([7, 8], Mode.SAMPLE, Sampling(max_new_tokens=size), 3, self._end) for size in sizes]
        self._expected += len(rows)
        self.loop.submit(rows)
        self._thread.start()
        return rows

    def load(self, name: str, *canaries: Canary, in_flight: bool = True) -> "Future[LoadReport]":
        return self.loop.load(to_become(NEW, name, canaries, in_flight))

    def at(self, number: int, act: Callable[[], object]) -> None:
        """Does something right before a step."""

        def before(step: int) -> None:
            if step == number:
                act()

        self.engine.before_step = before

    def wait(self) -> None:
        assert self.all_ended.wait(HANG_S)

    def stop(self) -> None:
        self.loop.stop()
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()

    def _end(self, row: PendingSequence) -> None:
        self.ended.append(row)
        if len(self.ended) == self._expected:
            self.all_ended.set()


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.stop()


def to_become(version: PolicyVersion, name: str, canaries: Sequence[Canary], in_flight: bool) -> NewWeights:
    return NewWeights(
        version=version, path=Path(name), digest=b"", canaries=canaries, tolerance_nats=0.1, in_flight=in_flight
    )


def canary(logprob: float) -> Canary:
    return Canary(token_ids=np.array([1, 2, 3], np.int32), logprobs=np.array([np.nan, logprob, logprob], np.float32))


def spans(row: PendingSequence) -> list[tuple[int, int]]:
    return [(span.start, span.version.step) for span in row.spans]


def test_every_token_is_of_the_weights_its_span_names(running: Running) -> None:
    loaded: list[Future[LoadReport]] = []
    running.at(3, lambda: loaded.append(running.load("2", canary(-2.0))))
    rows = running.start(6, 3, 9)
    running.wait()
    assert loaded[0].result().mismatch_nats == 0.0
    assert [row.tokens for row in rows] == [[1, 1, 1, 2, 2, 2], [1, 1, 1], [1, 1, 1, 2, 2, 2, 2, 2, 2]]
    assert [spans(row) for row in rows] == [[(0, 1), (3, 2)], [(0, 1)], [(0, 1), (3, 2)]]
    assert running.loop.version == NEW


def test_a_prompt_without_an_answer_yet_is_read_anew_by_new_weights(running: Running) -> None:
    loaded = running.load("2", canary(-2.0))  # heard together with the sequence, right after which it is taken up
    (row,) = running.start(3)
    running.wait()
    assert loaded.result().mismatch_nats == 0.0
    assert row.tokens == [2, 2, 2] and spans(row) == [(0, 2)]


def test_a_sequence_that_goes_on_after_a_refusal_does_not_repeat_its_random_numbers(running: Running) -> None:
    running.at(3, lambda: running.load("2", canary(-1.0)))
    (row,) = running.start(6)
    running.wait()
    first, again = [job for job in running.engine.taken if job.mode is Mode.SAMPLE]
    assert list(again.token_ids) == [7, 8, 1, 1, 1] and again.max_new_tokens == 3 and len(row.tokens) == 6
    assert first.seed == row.seed != again.seed


def test_what_a_refused_version_made_is_taken_back(running: Running) -> None:
    loaded: list[Future[LoadReport]] = []
    running.at(3, lambda: loaded.append(running.load("2", canary(-1.0))))
    rows = running.start(6, 4)  # the second one ends while the canaries are scored, by the wrong weights
    running.wait()
    with pytest.raises(WeightsRefused, match="tolerance"):
        loaded[0].result()
    assert [row.tokens for row in rows] == [[1] * 6, [1] * 4] and all(row.finish is FinishReason.LENGTH for row in rows)
    assert [spans(row) for row in rows] == [[(0, 1)], [(0, 1)]]
    assert [len(row.logprobs) for row in rows] == [6, 4]
    assert running.loop.version == OLD and len(running.ended) == 2


def test_a_refusal_of_the_second_version_goes_back_to_the_first_one_taken(running: Running) -> None:
    running.start()
    running.load("2", canary(-2.0)).result()
    third = running.loop.load(to_become(PolicyVersion(policy_id="a", step=3), "3", [canary(-9.0)], in_flight=True))
    with pytest.raises(WeightsRefused):
        third.result()
    assert running.engine.weights == 2 and running.loop.version == NEW


def test_weights_that_cannot_be_loaded_leave_the_old_ones(running: Running) -> None:
    running.engine.fails_on = "2"
    loaded: list[Future[LoadReport]] = []
    running.at(2, lambda: loaded.append(running.load("2")))
    (row,) = running.start(4)
    running.wait()
    with pytest.raises(WeightsRefused, match="no memory"):
        loaded[0].result()
    assert row.tokens == [1, 1, 1, 1] and running.loop.version == OLD


def test_a_change_that_is_not_in_flight_waits_for_what_runs_and_holds_what_comes(running: Running) -> None:
    later: list[PendingSequence] = []

    def act() -> None:
        running.load("2", canary(-2.0), in_flight=False)
        row = PendingSequence([9], Mode.SAMPLE, Sampling(max_new_tokens=2), 0, running._end)
        running._expected += 1
        later.append(row)
        running.loop.submit([row])

    running.at(2, act)
    rows = running.start(5, 3)
    running.wait()
    assert [row.tokens for row in rows] == [[1] * 5, [1] * 3]
    assert later[0].tokens == [2, 2] and spans(later[0]) == [(0, 2)]


def test_prefixes_of_other_weights_are_not_reused_even_after_a_refusal(running: Running) -> None:
    running.start()
    for last in (-1.0, -2.0):  # refused, then taken
        change = running.load("2", canary(last))
        assert change.exception(5.0) is None or last == -1.0
    refused, taken = running.engine.taken
    assert refused.salt != taken.salt


def test_after_a_refusal_prefixes_of_before_and_of_the_refused_weights_are_both_left(running: Running) -> None:
    loaded: list[Future[LoadReport]] = []
    running.at(2, lambda: loaded.append(running.load("2", canary(-1.0))))
    (row,) = running.start(6)
    running.wait()
    assert isinstance(loaded[0].exception(), WeightsRefused) and row.tokens == [1] * 6
    before, refused, after = running.engine.taken  # the sequence, the canary, the sequence again
    assert len({before.salt, refused.salt, after.salt}) == 3


def test_cancel_gives_sequences_as_they_are_and_lets_scores_end(running: Running) -> None:
    scored = threading.Event()
    scores = sequence_to_score([1, 2, 3], lambda row: scored.set())

    def act() -> None:
        running.loop.submit([scores])
        running.loop.cancel()

    running.at(3, act)
    rows = running.start(50, 60)
    running.wait()
    assert [row.finish for row in rows] == [FinishReason.ABORTED] * 2 and [len(row.tokens) for row in rows] == [3, 3]
    assert scored.wait(HANG_S) and scores.scores is not None and scores.scores[1:].tolist() == [-1.0, -1.0]
