"""Capacity of a trainer's lineage: the groups that its own generator and its followers may begin."""

from dataclasses import dataclass
from typing import cast

import pytest

from swarm.clock import ManualClock
from swarm.config import GeneratorConfig, NodeConfig, ReplayConfig, WeightsConfig
from swarm.exchange.capacity import GenerationCapacity
from swarm.exchange.draw_journal import DrawJournal
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.peers.peer_table import Peers
from swarm.testing.builders import make_identity
from swarm.testing.nodes import make_context
from swarm.types import Role
from swarm.weight_sync.credit import CreditLedger

ROOM = 8  # groups that the draws of one group's life use: two in each of four steps
BATCH = 2
BOTH = (Role.TRAINER, Role.GENERATOR)


@dataclass
class NoDraw:
    """No draw is possible."""

    is_under_way: bool = False  # a step
    comes_first = False


def allowance(
    num_followers: int,
    roles: tuple[Role, ...] = BOTH,
    *,
    barrier: bool = False,
    num_given: int = 0,
    is_under_way: bool = False,
) -> GenerationCapacity:
    replay = ReplayConfig(local_groups=2, external_groups=0, max_age_steps=3, barrier=barrier)
    generator, weights = GeneratorConfig(groups_per_batch=BATCH), WeightsConfig(publish=True)
    config = NodeConfig(roles=roles, replay=replay, generator=generator, weights=weights)
    clock = ManualClock()
    credit_ledger = CreditLedger(clock, replay.max_age_s, max_window=4)
    for number in range(num_followers):
        credit_ledger.open(f"follower {number}", window=4)
        credit_ledger.record_delivery(f"follower {number}", is_admitted=True)  # so its credit takes up room
    credit_ledger.grant(num_given)
    buffer = ReplayBuffer(replay, make_identity(1).node_id, 0, clock)
    peers, journal = Peers(make_identity(1).node_id), cast("DrawJournal", NoDraw(is_under_way))
    return GenerationCapacity(make_context(config), buffer, journal, credit_ledger, peers)


@pytest.mark.parametrize(("num_followers", "theirs"), [(0, 0), (1, 4), (2, 6), (3, 6), (8, 8)])
def test_the_own_generator_keeps_one_share_among_as_many_as_there_are(num_followers: int, theirs: int) -> None:
    assert allowance(num_followers).for_followers() == theirs


def test_what_begins_during_a_step_is_a_step_older_when_it_ends() -> None:
    """So one draw less can use it: all that the room of a standing head would allow was two groups too many."""
    assert allowance(0, is_under_way=True).for_own() == ROOM - 2
    assert allowance(3, (Role.TRAINER,), is_under_way=True).for_followers() == ROOM - 2


def test_without_a_generator_of_its_own_all_is_for_followers() -> None:
    assert allowance(3, (Role.TRAINER,)).for_followers() == ROOM


def test_what_the_own_generator_has_begun_is_part_of_its_share_and_no_more_of_it_than_a_batch() -> None:
    rooms = allowance(1)
    assert rooms.begin_own_batch(rooms.for_own()) == ROOM
    assert rooms.for_followers() == ROOM // 2
    rooms = allowance(7)  # its share is one group, and it began two
    rooms.begin_own_batch(ROOM)
    assert rooms.for_followers() == ROOM - BATCH
    rooms.end_own_group()
    assert rooms.for_followers() == ROOM - 1


def test_what_followers_have_leave_for_is_not_for_the_own_generator() -> None:
    assert allowance(3, num_given=3).for_own() == ROOM - 3


def test_with_a_barrier_followers_get_what_a_round_still_lacks() -> None:
    rooms = allowance(1, barrier=True)
    assert rooms.for_followers() == 2
    rooms.begin_own_batch(1)
    assert rooms.for_followers() == 1
