"""Groups of followers whose episodes take different times: none comes too late to be learned from."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from swarm.clock import ManualClock
from swarm.config import NodeConfig, ReplayConfig, WeightsConfig
from swarm.exchange.capacity import GenerationCapacity
from swarm.exchange.draw_journal import DrawJournal
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.peers.peer_table import Peers
from swarm.testing.builders import make_group, make_identity, make_scored
from swarm.types import Digest, NodeId, PolicyVersion, Role
from swarm.weight_sync.credit import CreditLedger

OWN = make_identity(0).node_id
FOLLOWERS = [make_identity(number).node_id for number in range(1, 5)]
TICK_S, STEP_S, TURN_S, FETCH_S = 0.05, 0.25, 0.1, 0.2
MOST_TURNS = 6
BATCH = 8


class Follower:
    """Makes batches of groups with the version that it has; each group is handed over when its longest episode ends."""

    def __init__(self, node_id: NodeId) -> None:
        self.node_id, self.version, self.num_begun = node_id, 0, 0
        self.fetches: list[tuple[float, int]] = []  # when a version is here, and its step
        self.batch: list[tuple[float, int, int]] = []  # when a group is made, its turns, the version at its first token

    def begin(self, now_s: float, num_granted: int, rng: random.Random) -> None:
        while self.fetches and self.fetches[0][0] <= now_s:
            self.version = self.fetches.pop(0)[1]
        if not self.batch:
            count = min(BATCH, num_granted - self.num_begun)
            self.num_begun += count
            turns = [rng.randint(1, MOST_TURNS) for _ in range(count)]
            self.batch = [(now_s + each * TURN_S, each, self.version) for each in turns]


class Run:
    """A trainer that learns only from what its followers make, on its own time."""

    def __init__(self, num_followers: int = 3, max_age_steps: int = 2) -> None:
        self.clock, self.rng, self.head_step, self.step_ends_s = ManualClock(), random.Random(0), 0, 0.0
        config = ReplayConfig(local_groups=8, external_groups=0, max_age_steps=max_age_steps, max_age_s=600.0)
        self.max_age_steps = max_age_steps
        self.buffer = ReplayBuffer(config, OWN, 0, self.clock)
        self.ledger = CreditLedger(
            self.clock, config.max_age_s, 16, num_waiting=self.buffer.num_waiting, groups_per_step=8, max_age_steps=2
        )
        node = NodeConfig(roles=(Role.TRAINER,), replay=config, weights=WeightsConfig(publish=True))
        self.journal = SimpleNamespace(is_under_way=False)
        self.peers = Peers(OWN)
        self.capacity = GenerationCapacity(
            node, self.buffer, cast("DrawJournal", self.journal), self.ledger, self.peers
        )
        self.followers = [Follower(peer) for peer in FOLLOWERS[:num_followers]]
        self.lines = {each.node_id: self.ledger.open(each.node_id, 16) for each in self.followers}
        self.made, self.lost, self.num_drawn = Counter[int](), Counter[int](), 0
        self.turns_of: dict[Digest, int] = {}

    def play(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            self._learn()
            self.ledger.grant(self.capacity.for_followers(), self.head_step)
            for follower in self.followers:
                follower.begin(self.clock.monotonic_s(), self.lines[follower.node_id].num_granted, self.rng)
                self._deliver(follower)

    def _learn(self) -> None:
        now_s = self.clock.monotonic_s()
        if self.journal.is_under_way and now_s >= self.step_ends_s:
            self.journal.is_under_way, self.head_step = False, self.head_step + 1
            self.peers.own_head = self._head
            for follower in self.followers:
                follower.fetches.append((now_s + FETCH_S, self.head_step))
        if not self.journal.is_under_way:
            draw = self.buffer.draw(self.head_step + 1, self._head, lambda _: self._head, {})
            if draw is not None:
                self.num_drawn += len(draw.groups)
                self.lost.update(self.turns_of[digest] for digest in draw.too_old_digests)
                self.journal.is_under_way, self.step_ends_s = True, now_s + STEP_S

    def _deliver(self, follower: Follower) -> None:
        for entry in [each for each in follower.batch if each[0] <= self.clock.monotonic_s()]:
            follower.batch.remove(entry)
            _, num_turns, step = entry
            number = len(self.turns_of)
            group = replace(make_group(OWN, task_id=number, step=step), producer=follower.node_id)
            scored = make_scored(group, digest=number.to_bytes(32, "big"), is_made_here=False)
            self.turns_of[scored.digest] = num_turns
            self.made[num_turns] += 1
            self.buffer.add(replace(scored, first_seen_s=self.clock.now_s()))
            self.ledger.record_delivery(
                follower.node_id, is_admitted=True, is_useful=self.capacity.is_in_time(step), oldest_step=step
            )

    @property
    def lost_share(self) -> dict[int, float]:
        """Number of turns -> share of the groups that were too old before a draw took them."""
        return {turns: self.lost[turns] / self.made[turns] for turns in sorted(self.made)}

    @property
    def _head(self) -> PolicyVersion:
        return PolicyVersion(policy_id=OWN, step=self.head_step)


@pytest.mark.parametrize("num_followers", [2, 3, 4])
def test_one_group_in_a_hundred_comes_too_late_however_long_its_episodes(num_followers: int) -> None:
    run = Run(num_followers)
    run.play(300)
    assert sum(run.lost.values()) <= 0.0125 * sum(run.made.values()), run.lost_share
    assert run.lost_share[MOST_TURNS] <= 0.05, run.lost_share
    assert run.head_step > 450


@pytest.mark.parametrize("num_followers", [2, 3, 4])
def test_mutation_capacity_as_if_all_began_with_the_newest_version_loses_the_long_ones(
    num_followers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CreditLedger, "_taken_off", lambda *_: 0)  # pyright: ignore[reportUnknownLambdaType]
    run = Run(num_followers)
    run.play(150)
    assert sum(run.lost.values()) > 0.1 * sum(run.made.values()), run.lost_share
    assert run.lost_share[MOST_TURNS] > 0.3 > 0.1 > run.lost_share[1], run.lost_share


def test_a_follower_that_lags_behind_all_that_could_be_used_still_shows_when_it_has_caught_up() -> None:
    run = Run(1)
    (follower,) = run.followers
    run.play(10)
    follower.fetches = [(run.clock.monotonic_s() + 10, run.head_step)]
    run.play(10)
    num_drawn = run.num_drawn
    run.play(20)
    assert run.num_drawn > num_drawn
