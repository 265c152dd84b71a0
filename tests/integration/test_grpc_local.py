"""The agent as its worker sees it over the Unix socket."""

import asyncio
import socket as socketlib
import stat
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from sealed_groups import assert_same_group, assert_same_scored

from swarm.activity import Activity
from swarm.episode import Actions, EpisodeOutcome, Message
from swarm.errors import ConfigError, NotHeld, RolloutFailed, StorageFull, TooLarge, Unavailable
from swarm.exchange.local_rpc import LocalClient, LocalServer, fresh_socket
from swarm.interfaces import Verdict
from swarm.testing.builders import answer_outcome, answers
from swarm.types import (
    ApplyReport,
    Attempt,
    Correction,
    Digest,
    Draw,
    DrawnGroup,
    EdgeReport,
    Evaluation,
    FinishReason,
    PatchChain,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    Sampling,
    ScoredGroup,
    SealedManifest,
    StepReport,
    Task,
    TokenTrace,
    VersionSpan,
    WarmUpReport,
)
from swarm.wire.rollout_groups import version_to_message
from swarm.wire.v1 import local_service_pb2 as pb

HEAD = PolicyVersion(policy_id="lineage", step=3, digest=b"d" * 32)


def make_group(num_tokens: int = 5) -> RolloutGroup:
    mask = np.arange(num_tokens) != 2
    trace = TokenTrace(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        action_mask=mask,
        logprobs=np.where(mask, np.float32(-0.25), np.float32(np.nan)),
        turn_ids=(np.arange(num_tokens) > 2).astype(np.int16),
        spans=(VersionSpan(start=0, version=HEAD),),
    )
    rollout = Rollout(
        actions=("5",),
        trace=trace,
        sampling=Sampling(temperature=0.7),
        finish=FinishReason.STOP,
        claimed_reward=float("nan"),
    )
    return RolloutGroup(
        run_id="run",
        producer="ab" * 32,
        policy_id="lineage",
        env="sums",
        task_id=9,
        tokenizer_digest=b"t" * 32,
        prompt_ids=np.array([1, 2, 3], dtype=np.int32),
        rollouts=(rollout, rollout),
        verifier="v/1",
        created_at_s=12.5,
    )


def make_draw(step: int, num_groups: int = 3) -> Draw:
    scored = ScoredGroup(
        digest=b"g" * 32,
        group=make_group(),
        rewards=np.array([1.0, 0.0], dtype=np.float32),
        correction=Correction.EXACT,
        is_made_here=False,
        first_seen_s=4.5,
        size_bytes=321,
    )
    groups = tuple(DrawnGroup(scored=scored, age_steps=i, use=1, is_established=i % 2 == 0) for i in range(num_groups))
    return Draw(step=step, groups=groups, num_zero_variance=2, source_weights={"cd" * 32: 0.5})


@dataclass
class ScriptedAgent:
    """A LocalExchange whose answers a test sets and whose calls it reads."""

    draws: asyncio.Queue[Draw] = field(default_factory=asyncio.Queue)
    room: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    updates: asyncio.Queue[PatchChain] = field(default_factory=asyncio.Queue)
    num_waiting: int = 0
    published: list[list[bytes]] = field(default_factory=list)
    num_draw_calls: int = 0
    seen: list[object] = field(default_factory=list)
    error: Exception | None = None

    async def wait_capacity(self) -> int:
        return await self.room.get()

    async def num_asked(self) -> int:
        return 17

    async def put(self, group: RolloutGroup, outcomes: Sequence[EpisodeOutcome] = ()) -> float:
        if self.error is not None:
            raise self.error
        self.seen.append(group)
        return 0.25

    async def draw(self, head: PolicyVersion) -> Draw:
        self.num_draw_calls += 1
        self.seen.append(head)
        return await self.draws.get()

    async def redraw(self, from_step: int) -> list[Draw]:
        return [make_draw(from_step), make_draw(from_step + 1, num_groups=0), make_draw(from_step + 2)]

    async def begin_again(self, step: int, passed: Digest | None = None) -> Attempt:
        self.seen.append((step, passed))
        return Attempt(trial=None if passed else b"g" * 32, left_out=frozenset({b"h" * 32, b"i" * 32}))

    async def report_checkpoint(self, next_draw: int, error: str = "") -> None:
        self.seen.append((next_draw, error))

    async def publish(self, version: PolicyVersion, manifests: Sequence[bytes] = ()) -> None:
        self.seen.append(version)
        self.published.append(list(manifests))

    async def next_update(self, held: PolicyVersion | None, *, wait: bool) -> PatchChain | None:
        self.seen.append((held, wait))
        if not wait and self.updates.empty():
            return None
        self.num_waiting += 1
        try:
            return await self.updates.get()
        finally:
            self.num_waiting -= 1

    async def report_update(self, report: ApplyReport) -> None:
        self.seen.append(report)

    async def report_step(self, report: StepReport) -> None:
        self.seen.append(report)

    async def report_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        self.seen.append(list(evaluations))

    async def report_warm_up(self, report: WarmUpReport) -> None:
        self.seen.append(report)

    async def report_activity(self, activity: Activity) -> None:
        self.seen.append(activity)

    async def verify(self, env: str, task_id: int, episodes: Sequence[Actions]) -> Verdict:
        if env != "sums":
            raise LookupError(f"unknown environment {env}")
        task = Task(env=env, task_id=task_id, messages=(Message(role="user", content="2 + 3?"),), is_held_out=True)
        outcomes = tuple(answer_outcome(float(text == "5")) for *_, text in episodes)
        return Verdict(task=task, outcomes=outcomes, verifier="v/1", reference="5")

    async def step(self, env: str, task_id: int, actions: Actions) -> EpisodeOutcome:
        return (await self.verify(env, task_id, [actions])).outcomes[0]


@dataclass
class Bench:
    agent: ScriptedAgent
    server: LocalServer
    client: LocalClient
    socket: Path


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    agent, socket = ScriptedAgent(), tmp_path / "n" / "agent.sock"
    server = LocalServer(agent, socket)
    await server.start()
    client = LocalClient(socket)
    yield Bench(agent, server, client, socket)
    await client.close()
    await server.stop()


def assert_same_draw(left: Draw, right: Draw) -> None:
    assert (left.step, left.num_zero_variance, left.source_weights) == (
        right.step,
        right.num_zero_variance,
        right.source_weights,
    )
    for a, b in zip(left.groups, right.groups, strict=True):
        assert (a.age_steps, a.use, a.is_established) == (b.age_steps, b.use, b.is_established)
        assert_same_scored(a.scored, b.scored)


async def test_unscored_group_arrives_whole(bench: Bench):
    assert await bench.client.put(make_group()) == 0.25
    (group,) = bench.agent.seen
    assert isinstance(group, RolloutGroup)
    assert_same_group(group, make_group())


async def test_draw_waits_and_arrives_as_it_was_made(bench: Bench):
    waiting = asyncio.ensure_future(bench.client.draw(HEAD))
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    bench.agent.draws.put_nowait(make_draw(3))
    assert_same_draw(await waiting, make_draw(3))
    assert bench.agent.seen == [HEAD]


async def test_abandoned_draw_is_joined_by_the_next_call(bench: Bench):
    abandoned = asyncio.ensure_future(bench.client.draw(HEAD))
    while not bench.agent.num_draw_calls:
        await asyncio.wait([abandoned], timeout=0.01)
    abandoned.cancel()
    with pytest.raises(asyncio.CancelledError):
        await abandoned
    again = asyncio.ensure_future(bench.client.draw(HEAD))
    await asyncio.wait([again], timeout=0.1)
    bench.agent.draws.put_nowait(make_draw(3))
    assert_same_draw(await again, make_draw(3))
    assert bench.agent.num_draw_calls == 1


async def test_redraw_brings_every_draw_even_an_empty_one(bench: Bench):
    draws = await bench.client.redraw(7)
    assert [draw.step for draw in draws] == [7, 8, 9]
    assert_same_draw(draws[0], make_draw(7))
    assert draws[1].groups == ()


async def test_what_comes_before_a_step_is_made_again_round_trips(bench: Bench):
    assert await bench.client.begin_again(4) == await bench.agent.begin_again(4)
    assert await bench.client.begin_again(4, b"g" * 32) == await bench.agent.begin_again(4, b"g" * 32)
    await bench.client.report_checkpoint(7, "no room")
    assert bench.agent.seen == [(4, None), (4, None), (4, b"g" * 32), (4, b"g" * 32), (7, "no room")]


async def test_capacity_is_waited_for_and_the_number_of_questions_is_not(bench: Bench):
    assert await bench.client.num_asked() == 17
    waiting = asyncio.ensure_future(bench.client.wait_capacity())
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    bench.agent.room.put_nowait(2)
    assert await waiting == 2


async def test_figures_and_verdicts_round_trip(bench: Bench):
    report = StepReport(
        version=HEAD,
        loss=0.5,
        grad_norm=float("inf"),
        num_tokens=10,
        was_skipped=True,
        diagnostics={"ratio": 1.5},
        seconds={"draw": 0.1},
        edges=(
            EdgeReport(
                source="ab" * 32, num_groups=1, age_mean_steps=1.5, ess_share=0.5, mismatch_kl=0.01, reward_mean=0.5
            ),
        ),
        ages_steps=(0, 2),
        num_local=1,
        num_external=1,
    )
    evaluation = Evaluation(
        step=3, env="sums", split="all", accuracy=0.5, num_problems=2, majority_baseline=0.1, at_s=9.0, problems="ab",
        num_right=(1, -1, 0), rewards=(1.0, 0.0, 0.5),
    )  # fmt: skip
    await bench.client.publish(HEAD)
    await bench.client.report_step(report)
    await bench.client.report_evaluations([evaluation])
    warm_up = WarmUpReport(num_steps=8, num_groups=16, signal_before=0, signal_after=9, accuracy={"sums": 0.1})
    await bench.client.report_warm_up(warm_up)
    assert bench.agent.seen == [HEAD, report, [evaluation], warm_up]
    verdict = await bench.client.verify("sums", 3, answers("5", "6"))
    assert verdict.task.messages[0].content == "2 + 3?" and verdict.task.is_held_out
    assert verdict.rewards.tolist() == [1.0, 0.0] and (verdict.verifier, verdict.reference) == ("v/1", "5")


def manifest(byte: int, size: int = 100) -> SealedManifest:
    return SealedManifest(body=bytes([byte]) * size, public_key=b"k" * 32, signature=b"s" * 64)


async def test_manifests_of_a_version_arrive_with_it_in_order(bench: Bench):
    bodies = [b"patch", bytes(5 * 2**20), b"full"]
    await bench.client.publish(HEAD, bodies)
    assert bench.agent.seen == [HEAD] and bench.agent.published == [bodies]


async def test_manifests_beyond_the_bound_are_refused_on_both_sides_of_the_socket(bench: Bench):
    too_large = bytes(16 * 2**20 + 1)
    for manifests in ([too_large], [b"x"] * 17):
        with pytest.raises(TooLarge):
            await bench.client.publish(HEAD, manifests)
    request = pb.PublishRequest(version=version_to_message(HEAD), manifests=[too_large])
    with pytest.raises(TooLarge, match="16777217 bytes exceeds"):
        await bench.client._call("Publish", request)
    assert bench.agent.seen == []


async def test_way_arrives_in_order_also_one_of_large_manifests_or_none_comes(bench: Bench):
    update = (manifest(1), manifest(2, 16 * 2**20), manifest(3))
    assert await bench.client.next_update(None, wait=False) is None
    bench.agent.updates.put_nowait(update)
    assert await bench.client.next_update(HEAD, wait=False) == update
    assert bench.agent.seen == [(None, False), (HEAD, False)]


async def test_wait_for_a_way_that_a_dead_worker_left_takes_nothing_from_the_next_one(bench: Bench):
    abandoned = asyncio.ensure_future(bench.client.next_update(HEAD, wait=True))
    while not bench.agent.seen:
        await asyncio.wait([abandoned], timeout=0.01)
    abandoned.cancel()
    with pytest.raises(asyncio.CancelledError):
        await abandoned
    again = asyncio.ensure_future(bench.client.next_update(HEAD, wait=True))
    while len(bench.agent.seen) < 2 or bench.agent.num_waiting > 1:
        await asyncio.wait([again], timeout=0.01)
    bench.agent.updates.put_nowait((manifest(1),))
    assert await again == (manifest(1),)


async def test_what_became_of_a_version_round_trips(bench: Bench):
    taken = ApplyReport(version=HEAD, num_bytes=12, seconds={"stage": 0.5, "pause": 0.25}, mismatch_nats=0.03)
    refused = ApplyReport(version=HEAD, error="canary 2: 1.5 nats exceed 0.04")
    await bench.client.report_update(taken)
    await bench.client.report_update(refused)
    assert bench.agent.seen == [taken, refused]


@pytest.mark.parametrize("error", [StorageFull("full"), RolloutFailed("crashed"), ConfigError("bad"), NotHeld("gone")])
async def test_errors_of_the_agent_are_raised_by_the_client(bench: Bench, error: Exception):
    bench.agent.error = error
    with pytest.raises(type(error), match=str(error)):
        await bench.client.put(make_group())


async def test_unknown_environment_is_a_lookup_error(bench: Bench):
    with pytest.raises(LookupError, match="unknown environment other"):
        await bench.client.verify("other", 1, answers("x"))


async def test_agent_that_is_gone_is_unavailable_also_for_waiting_calls(bench: Bench):
    draw = asyncio.ensure_future(bench.client.draw(HEAD))
    capacity = asyncio.ensure_future(bench.client.wait_capacity())
    update = asyncio.ensure_future(bench.client.next_update(HEAD, wait=True))
    while not bench.agent.num_draw_calls:
        await asyncio.wait([draw], timeout=0.01)
    await bench.server.stop()
    for waiting in (draw, capacity, update):
        with pytest.raises(Unavailable):
            await waiting
    with pytest.raises(Unavailable):
        await bench.client.num_asked()


async def test_only_the_owner_can_open_the_socket_and_a_stale_one_is_replaced(bench: Bench, tmp_path: Path):
    assert stat.S_IMODE(bench.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(bench.socket.parent.stat().st_mode) == 0o700
    await bench.server.stop()
    assert not bench.socket.exists()


async def test_socket_that_cannot_be_made_is_a_config_error(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "agent.sock", tmp_path / ("x" * 120)):
        with pytest.raises(ConfigError):
            await LocalServer(ScriptedAgent(), path).start()
    assert (tmp_path / "file").read_text() == "x"


def test_every_start_has_a_socket_of_its_own_and_clears_away_those_before(tmp_path: Path):
    first = fresh_socket(tmp_path)
    with socketlib.socket(socketlib.AF_UNIX) as listening:
        listening.bind(str(first))
    (tmp_path / "agent-notes.txt").write_text("keep")
    second = fresh_socket(tmp_path)
    assert second != first
    assert not first.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["agent-notes.txt"]
