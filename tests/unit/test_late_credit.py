"""Draws from the groups of followers that are late, slow, or have few tasks: buffer, credit and shares together."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from swarm.clock import ManualClock
from swarm.config import EntryConfig, NodeConfig, ReplayConfig, WeightsConfig
from swarm.exchange.capacity import GenerationCapacity
from swarm.exchange.draw_journal import DrawJournal
from swarm.exchange.draw_shares import DrawShares
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.peers.entry import EntryRule
from swarm.peers.parties import Parties
from swarm.peers.peer_table import Peers
from swarm.testing.builders import make_group, make_identity, make_scored
from swarm.testing.nodes import make_context
from swarm.types import NodeId, PolicyVersion, Role
from swarm.weight_sync.credit import CreditLedger

OWN = make_identity(0).node_id
MEMBERS = [make_identity(number).node_id for number in range(1, 10)]
STEP_S, GROUP_S = 2.0, 3.0
SECONDS = 900


class Course:
    """A trainer whose nine followers all are members, second by second.

    Each of them makes its groups one after the other, as long as it has credit.
    """

    def __init__(self, seconds_of: dict[NodeId, float], num_tasks: int = 0) -> None:
        self.clock = ManualClock()
        self.seconds_of, self.num_tasks = seconds_of, num_tasks
        self.config = ReplayConfig(local_groups=8, external_groups=0, max_age_steps=2, max_age_s=600.0)
        parties = Parties(EntryRule(EntryConfig(members=tuple(MEMBERS)), "run", self.clock))
        self.buffer = ReplayBuffer(self.config, OWN, 0, self.clock, DrawShares(parties))
        self.ledger = CreditLedger(
            self.clock, self.config.max_age_s, 16, num_waiting=self.buffer.num_waiting, parties=parties
        )
        node = NodeConfig(roles=(Role.TRAINER,), replay=self.config, weights=WeightsConfig(publish=True))
        journal, peers = cast("DrawJournal", SimpleNamespace(is_under_way=False)), Peers(OWN)
        self.capacity = GenerationCapacity(make_context(node), self.buffer, journal, self.ledger, peers)
        self.lines = [self.ledger.open(peer, 16) for peer in MEMBERS]
        self.left_s = Counter[NodeId]()  # until the group in work is made
        self.num_made = Counter[NodeId]()
        self.idle_s = Counter[NodeId]()
        self.drawn = Counter[NodeId]()
        self.steps_s: list[float] = []
        self.holding: set[NodeId] = set()  # they keep what they have credit for

    def play(self, seconds: int) -> int:
        """Steps made meanwhile."""
        before = len(self.steps_s)
        for _ in range(seconds):
            self.clock.advance(1.0)
            self.ledger.expire()
            self.ledger.grant(self.capacity.for_followers())
            for line in self.lines:
                self._work(line.peer, line.num_outstanding)
            if not self.steps_s or self.clock.monotonic_s() >= self.steps_s[-1] + STEP_S:
                self._step()
        return len(self.steps_s) - before

    def _work(self, peer: NodeId, num_left: int) -> None:
        if peer in self.holding:
            return
        self.idle_s[peer] += num_left == 0
        self.left_s[peer] += 1 if num_left else 0
        if self.left_s[peer] < self.seconds_of.get(peer, GROUP_S):
            return
        self.left_s[peer] = 0
        self.num_made[peer] += 1
        number = self.num_made.total()
        task_id = number * 7919 % self.num_tasks if self.num_tasks else number
        group = replace(make_group(OWN, task_id=task_id, created_at_s=self.clock.now_s()), producer=peer)
        scored = make_scored(replace(group, producer=peer), digest=number.to_bytes(32, "big"), is_made_here=False)
        is_useful = self.buffer.add(replace(scored, first_seen_s=self.clock.now_s()))
        self.ledger.record_delivery(peer, is_admitted=True, is_useful=is_useful)

    def _step(self) -> None:
        head = PolicyVersion(policy_id=OWN, step=0)
        draw = self.buffer.draw(len(self.steps_s) + 1, head, lambda _: head, {})
        if draw is not None:
            self.steps_s.append(self.clock.monotonic_s())
            self.drawn.update(drawn.scored.group.producer for drawn in draw.groups)


def test_members_that_hold_credit_slow_no_step_by_half() -> None:
    """They bring a group whenever their credit expired, and so are trusted with more."""
    course = Course({})
    honest = course.play(SECONDS)
    num_steps = 0
    for _ in range(4):
        course.holding = set()
        course.play(60)
        course.holding = {*MEMBERS[-3:]}
        num_steps += course.play(SECONDS // 4)
    assert num_steps > honest / 2


def test_slow_members_bring_what_they_make_and_steps_do_not_wait_for_them() -> None:
    slow = MEMBERS[:3]
    course = Course(dict.fromkeys(slow, 10 * GROUP_S))
    course.play(300)
    course.idle_s.clear()
    course.drawn.clear()
    before = course.num_made.copy()
    num_made_by_others = SECONDS / GROUP_S * (len(MEMBERS) - len(slow))
    assert course.play(SECONDS) >= 0.9 * num_made_by_others / course.config.local_groups
    for peer in slow:
        num_made = course.num_made[peer] - before[peer]
        assert course.idle_s[peer] <= 0.05 * SECONDS
        assert num_made >= 0.9 * SECONDS / (10 * GROUP_S)
        assert course.drawn[peer] >= 0.9 * num_made, "what it makes is learned from"


@pytest.mark.parametrize("num_tasks", [8, 32])
def test_a_run_of_few_tasks_is_as_fast_as_one_of_many(num_tasks: int) -> None:
    assert Course({}, num_tasks).play(SECONDS) >= 0.9 * Course({}).play(SECONDS)
