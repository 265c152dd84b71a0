"""A node killed before each single thing it would have written, and started again: the same curve every time.

Agent, store, replay and loops are the real ones; learner and generator are hashes of everything that could
differ, the composition of a generated batch among it (which decides the low bits of a real log-prob).
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarm.clock import ManualClock
from swarm.config import EnvironmentConfig, EvaluationConfig, GeneratorConfig, LearnerConfig, NodeConfig, ReplayConfig
from swarm.environments.curriculum import TaskMixture, evaluation_tasks
from swarm.environments.load import build_environments
from swarm.environments.look_up import LookUpEnvironment
from swarm.events import Event, GroupPut, GroupsDrawn, Kind, PolicyEvaluated, StepMade, events_of
from swarm.exchange import group_database
from swarm.exchange.agent import Agent
from swarm.exchange.group_store import SqliteGroupStore
from swarm.loops import Worker, run_worker
from swarm.testing.builders import InlineVerifier, ToyTokenizer, make_identity, make_rollout
from swarm.testing.episodes import make_episode
from swarm.testing.nodes import inline, make_agent, make_context
from swarm.types import (
    Draw,
    Evaluation,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    Sampling,
    StepReport,
    Task,
    VersionSpan,
)

NUM_STEPS = 6
LOCAL_GROUPS = 3
IDENTITY = make_identity(1)
ENVIRONMENTS = {
    "answers": EnvironmentConfig(name="sort", kind="char", dataset="sort", num_tasks=500),
    "episodes": EnvironmentConfig(name="look_up", kind="look_up", params={"style": "char"}, num_tasks=500),
}
CONFIG = NodeConfig(
    run_id="local",
    environments=(ENVIRONMENTS["answers"],),
    generator=GeneratorConfig(group_size=2),
    replay=ReplayConfig(local_groups=LOCAL_GROUPS, external_groups=0, max_age_steps=2),
    learner=LearnerConfig(num_steps=NUM_STEPS, checkpoint_every=2, deterministic=True),
    evaluation=EvaluationConfig(every_steps=3, num_problems=3),
)


class Killed(BaseException):
    """The process is gone: nothing is written any more."""


class Machine:
    """The parts of a machine that survive a kill, and the moment of the kill."""

    def __init__(self, directory: Path, plays: str = "answers") -> None:
        self.plays = plays
        self.config = CONFIG.model_copy(update={"environments": (ENVIRONMENTS[plays],)})
        self.environments = build_environments(self.config.environments)
        (self.environment,) = self.environments.values()
        self.path = directory / "groups.sqlite"
        self.events: list[Event] = []
        first = PolicyVersion(policy_id=IDENTITY.node_id, step=0, digest=b"\0" * 32)
        self.checkpoint: tuple[PolicyVersion, int] = (first, 1)
        self.saved: list[int] = []
        self.num_writes = 0
        self.kill_at: int | None = None
        self.is_dead = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def write(self, _: int = 0) -> None:
        """Called before each write of any kind, from any thread."""
        if self.kill_at is not None and self.num_writes >= self.kill_at:
            self._loop.call_soon_threadsafe(self.is_dead.set)
            raise Killed
        self.num_writes += 1

    def emit(self, event: Event) -> None:
        self.write()
        self.events.append(event)

    def of(self, kind: type[Kind]) -> list[Kind]:
        return events_of(kind, self.events)


def digest_of(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def _content(rollout: Rollout) -> tuple[object, ...]:
    assert rollout.trace is not None
    assert rollout.trace.logprobs is not None
    token_ids, logprobs = rollout.trace.token_ids.tolist(), rollout.trace.logprobs.tolist()
    return rollout.actions, token_ids, logprobs, rollout.oldest_step


class HashLearner:
    """Weights and loss are a hash of what was learned from; every fourth draw is skipped."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.version, self.next_draw = machine.checkpoint

    def step(self, draw: Draw) -> StepReport:
        seen = [
            (
                d.age_steps,
                d.use,
                d.scored.rewards.tolist(),
                d.scored.group.task_id,
                d.scored.outcomes,
                *map(_content, d.scored.group.rollouts),
            )
            for d in draw.groups
        ]
        digest = digest_of(self.version.digest, draw.step, draw.num_zero_variance, seen)
        was_skipped = draw.step % 4 == 2
        if not was_skipped:
            self.version = PolicyVersion(policy_id=IDENTITY.node_id, step=self.version.step + 1, digest=digest)
        self.next_draw = draw.step + 1
        return StepReport(
            version=self.version,
            loss=digest[1] / 256,
            grad_norm=1.0,
            num_tokens=1,
            was_skipped=was_skipped,
            diagnostics={},
            seconds={},
            num_local=len(draw.groups),
            draw_step=draw.step,
        )

    def snapshot(self) -> tuple[PolicyVersion, object]:
        return self.version, None

    def answer(self, task: Task) -> str:
        """The greedy one: right or wrong by the weights."""
        reference = self._machine.environment.reference(task.task_id)
        return reference if digest_of(self.version.digest, task.task_id)[0] % 2 else ""

    def dry_run(self, draw: Draw) -> None:
        """Leaves no trace in the weights."""

    def evaluated(self, evaluations: Sequence[Evaluation]) -> None:
        pass

    def save(self) -> None:
        self._machine.write()
        self._machine.checkpoint = (self.version, self.next_draw)
        self._machine.saved.append(self.version.step)


class HashGenerator:
    """Answers are a hash of weights, question and number; four of five groups have no signal."""

    def __init__(self, version: PolicyVersion, machine: Machine) -> None:
        self.version = version
        self.tokenizer = ToyTokenizer()
        self.environment = machine.environment
        self.mixture = TaskMixture(machine.environments, {}, seed=0, spacing=8)

    def load(self, version: PolicyVersion, weights: object) -> None:
        del weights
        self.version = version

    def produce(self, first: int, count: int) -> list[RolloutGroup]:
        tasks = self.mixture.tasks(first, count)
        low_bits = digest_of([task.task_id for task in tasks])[0] / 4096
        return [self._group(first + place, task, low_bits) for place, task in enumerate(tasks)]

    def _group(self, number: int, task: Task, low_bits: float) -> RolloutGroup:
        luck = digest_of(self.version.digest, task.task_id, number)
        right, wrong = self.environment.reference(task.task_id), f"no {luck[1]}"
        texts, logprob = [right, right if luck[0] % 5 else wrong], -luck[2] / 256 - low_bits
        return RolloutGroup(
            run_id="local",
            producer=IDENTITY.node_id,
            policy_id=IDENTITY.node_id,
            env=task.env,
            task_id=task.task_id,
            tokenizer_digest=self.tokenizer.digest,
            prompt_ids=np.array(self.tokenizer.encode_prompt(task), np.int32),
            rollouts=tuple(self._rollout(task, text, logprob) for text in texts),
            verifier="unscored",
            created_at_s=0.0,
        )

    def _rollout(self, task: Task, text: str, logprob: float) -> Rollout:
        """The text is an answer, or the last action of an episode."""
        if task.max_turns == 1:
            return make_rollout(text, policy_id=IDENTITY.node_id, step=self.version.step, logprob=logprob)
        assert isinstance(self.environment, LookUpEnvironment)
        *searches, _ = self.environment.demonstration(task.task_id)
        rollout = make_episode(
            self.environment,
            task.task_id,
            (*searches, text),
            self.tokenizer,
            policy_id=IDENTITY.node_id,
            sampling=Sampling(max_new_tokens=CONFIG.generator.max_new_tokens),
            logprob=logprob,
        )
        assert rollout.trace is not None
        version = PolicyVersion(policy_id=IDENTITY.node_id, step=self.version.step)
        trace = replace(rollout.trace, spans=(VersionSpan(start=0, version=version),))
        return replace(rollout, trace=trace)


async def run_once(machine: Machine, kill_at: int | None = None) -> None:
    """One life of the node: until it has made its steps, or is killed before that write."""
    machine.kill_at = kill_at
    machine.is_dead.clear()
    clock = ManualClock()
    try:
        store = await SqliteGroupStore.open(machine.path, clock, 2**24, before_write=machine.write)
    except Killed:
        return
    verifier = InlineVerifier(machine.environments)
    context = make_context(machine.config, IDENTITY, clock=clock, emit=machine.emit)
    agent = make_agent(context, store, verifier=verifier, environments=frozenset(machine.environments))
    working = asyncio.create_task(live(agent, machine, clock))
    dying = asyncio.create_task(machine.is_dead.wait())
    await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
    for task in (working, dying):
        task.cancel()
    results = await asyncio.gather(working, dying, return_exceptions=True)
    with contextlib.suppress(Killed):  # a dead process writes nothing at its end either
        await store.close()
    if machine.kill_at is None:
        assert results[0] is None, results[0]


async def live(agent: Agent, machine: Machine, clock: ManualClock) -> None:
    await agent.restore()
    learner = HashLearner(machine)
    generator = HashGenerator(learner.version, machine)
    worker = Worker(
        config=machine.config,
        exchange=agent.local,
        generator=generator,  # pyright: ignore[reportArgumentType]
        produce=generator.produce,
        evaluate=lambda tasks: [[(learner.answer(task),)] for task in tasks],
        learner=learner,
        tokenizer=generator.tokenizer,
        evaluation_tasks={(machine.plays, "all"): evaluation_tasks(machine.environment, "all", 3, 0)},
        clock=clock,
        offload=inline,
    )
    await run_worker(worker)


def curve(machine: Machine) -> list[tuple[object, ...]]:
    """The last report of each draw's step."""
    steps = machine.of(StepMade)
    rows = {e.draw_step: (e.draw_step, e.step, e.digest, e.loss, e.was_skipped) for e in steps}
    return [rows[draw] for draw in sorted(rows)]


def evaluations(machine: Machine) -> dict[int, float]:
    return {event.step: event.accuracy for event in machine.of(PolicyEvaluated)}


def asked(machine: Machine) -> Sequence[tuple[int, float]]:
    return [(put.oldest_step, put.reward_mean) for put in machine.of(GroupPut)]


@pytest.fixture(params=ENVIRONMENTS)
async def whole(tmp_path: Path, request: pytest.FixtureRequest) -> Machine:
    """A run that nobody disturbed, of single answers or of episodes of several turns."""
    directory = tmp_path / "whole"
    directory.mkdir()
    machine = Machine(directory, request.param)
    await run_once(machine)
    return machine


async def test_the_undisturbed_run_has_what_a_kill_could_spoil(whole: Machine) -> None:
    rows = curve(whole)
    assert [row[1] for row in rows if not row[4]] == list(range(1, NUM_STEPS + 1))
    assert any(row[4] for row in rows), "no step was skipped"
    assert evaluations(whole).keys() == {0, 3, 6}
    zero_variance = sum(draw.num_zero_variance for draw in whole.of(GroupsDrawn))
    assert zero_variance > 0
    assert len(whole.of(GroupPut)) > LOCAL_GROUPS * len(rows), "no draw found nothing but groups without signal"
    assert whole.saved == [2, 4, 6], "every second step, and none twice: the last is one of them"


async def test_a_kill_before_any_write_changes_nothing(whole: Machine, tmp_path: Path) -> None:
    every = {"answers": 1, "episodes": 3}[whole.plays]  # what is written is the same, in the same order
    for kill_at in range(0, whole.num_writes, every):
        directory = tmp_path / f"killed-{kill_at}"
        directory.mkdir()
        machine = Machine(directory, whole.plays)
        await run_once(machine, kill_at)
        await run_once(machine)
        assert curve(machine) == curve(whole), kill_at
        assert evaluations(machine) == evaluations(whole), kill_at
        told = {(e.draw_step, e.digest) for e in machine.of(StepMade)}
        assert len(told) == len(curve(whole)), f"a step made again became another (killed before write {kill_at})"


async def test_being_killed_again_and_again_changes_nothing(whole: Machine, tmp_path: Path) -> None:
    directory = tmp_path / "often"
    directory.mkdir()
    machine = Machine(directory, whole.plays)
    num_lives = 0
    while len(curve(machine)) < len(curve(whole)) or len(evaluations(machine)) < len(evaluations(whole)):
        await run_once(machine, machine.num_writes + 12 + 7 * num_lives % 17)
        num_lives += 1
        assert num_lives < 100, "it makes no progress"
    assert num_lives > 5
    assert curve(machine) == curve(whole)
    assert evaluations(machine) == evaluations(whole)


async def test_what_the_replay_found_comes_back_from_the_disk_of_a_killed_node(tmp_path: Path) -> None:
    """Without it, steps of episodes that are made again become others."""
    changed: list[int] = []
    for kill_at in (32, 40):
        steps: list[list[tuple[int, str]]] = []
        for forgets in (False, True):
            directory = tmp_path / f"{kill_at}-{forgets}"
            directory.mkdir()
            machine = Machine(directory, "episodes")
            await run_once(machine, kill_at)
            with pytest.MonkeyPatch.context() as patch:
                if forgets:
                    patch.setattr(group_database, "_unpacked", lambda data, count: ())  # pyright: ignore
                await run_once(machine)
            steps.append(sorted({(e.draw_step, e.digest) for e in machine.of(StepMade)}))
        if steps[0] != steps[1]:
            changed.append(kill_at)
    assert changed
