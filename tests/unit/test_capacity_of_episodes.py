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
from swarm.testing.nodes import make_context
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
            self.clock,
            config.max_age_s,
            16,
            num_waiting=self.buffer.num_waiting,
            most_taken_off=self.buffer.most_taken_off,
        )
        node = NodeConfig(roles=(Role.TRAINER,), replay=config, weights=WeightsConfig(publish=True))
        self.journal = SimpleNamespace(is_under_way=False)
        self.peers = Peers(OWN)
        self.capacity = GenerationCapacity(
            make_context(node), self.buffer, cast("DrawJournal", self.journal), self.ledger, self.peers
        )
        self.followers = [Follower(peer) for peer in FOLLOWERS[:num_followers]]
        self.lines = {each.node_id: self.ledger.open(each.node_id, BATCH) for each in self.followers}
        self.made, self.lost, self.drawn_of = Counter[int](), Counter[int](), Counter[NodeId]()
        self.turns_of: dict[Digest, int] = {}

    def play(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            self._learn()
            self.ledger.grant(self.capacity.for_followers())
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
            draw = self.buffer.draw(self.head_step + 1, self._head, lambda _: self._head, {}, self.ledger)
            if draw is not None:
                self.drawn_of.update(each.scored.group.producer for each in draw.groups)
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
            self.ledger.record_delivery(follower.node_id, is_admitted=True)

    @property
    def _head(self) -> PolicyVersion:
        return PolicyVersion(policy_id=OWN, step=self.head_step)


def lost_later(run: Run) -> dict[int, float]:
    """Number of turns -> share of the groups that were too old, once credit has found what is too much; 0: of all."""
    run.play(100)
    made, lost = run.made.copy(), run.lost.copy()
    run.play(300)
    shares = {turns: (run.lost[turns] - lost[turns]) / (run.made[turns] - made[turns]) for turns in run.made}
    return shares | {0: (run.lost.total() - lost.total()) / (run.made.total() - made.total())}


@pytest.mark.parametrize("num_followers", [2, 3, 4])
def test_less_than_one_group_in_a_hundred_is_too_old_and_long_episodes_are_learned_from(num_followers: int) -> None:
    run = Run(num_followers)
    lost = lost_later(run)
    assert lost[0] < 0.01 and lost[MOST_TURNS] < 0.04, lost
    assert len(run.drawn_of) == num_followers and min(run.drawn_of.values()) > 300, run.drawn_of


def test_a_party_that_says_its_groups_are_old_takes_no_credit_of_the_others() -> None:
    run = Run(4)
    run.play(100)
    for _ in range(1000):
        run.ledger.record_too_old(FOLLOWERS[0])
    assert run.ledger.num_taken_off <= max(round(run.lines[peer].record.too_many) for peer in FOLLOWERS[1:])
    for _ in range(1000):
        run.ledger.record_too_old(FOLLOWERS[1])
        run.ledger.record_too_old(FOLLOWERS[2])
    assert run.ledger.num_taken_off == run.max_age_steps * 8 - 1, "where most say so it is believed"


def steps_while_tight(run: Run) -> int:
    """Steps in the end of a long time for which the age bound is tightened to 0."""
    run.play(60)
    run.buffer.limit_age(0)
    run.play(100)
    before = run.head_step
    run.play(200)
    return run.head_step - before


@pytest.mark.parametrize("num_followers", [1, 4])
def test_a_bound_that_is_tightened_later_leaves_enough_for_a_draw(num_followers: int) -> None:
    assert steps_while_tight(Run(num_followers)) > 20


class Instant(Follower):
    """Has each version at once, and makes a whole batch of it in no time."""

    def begin(self, now_s: float, num_granted: int, rng: random.Random) -> None:
        self.version = self.fetches[-1][1] if self.fetches else self.version
        self.fetches.clear()
        if not self.batch:
            count = min(BATCH, num_granted - self.num_begun)
            self.num_begun += count
            self.batch = [(now_s, 1, self.version)] * count


@pytest.mark.parametrize("max_age_steps", [0, 1, 2, 4])
def test_one_that_is_fast_leaves_the_others_their_share(max_age_steps: int) -> None:
    run = Run(4, max_age_steps)
    run.followers[0] = Instant(FOLLOWERS[0])
    run.play(200)
    assert min(run.drawn_of[peer] for peer in FOLLOWERS) > run.drawn_of[FOLLOWERS[0]] / 3, run.drawn_of


def test_one_whose_groups_are_refused_stops_no_step() -> None:
    run = Run(2, max_age_steps=1)
    run.play(30)
    evil, before = FOLLOWERS[0], run.head_step
    run.followers = run.followers[1:]
    for _ in range(round(60 / TICK_S)):
        run.play(TICK_S)
        while run.lines[evil].num_outstanding:
            run.ledger.record_delivery(evil, is_admitted=False)
        run.ledger.grant(run.capacity.for_followers())
    assert run.head_step - before > 30
