"""Virtual swarms in which nobody can dial most nodes: what must hold then, holds, and can fail."""

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager
from itertools import count

import pytest

from swarm.addresses import relayed_endpoint
from swarm.errors import Unavailable
from swarm.interfaces import PeerAddress, StreamItem
from swarm.loops.notices import StreamPositions
from swarm.loops.reach import Reach, ReachKind
from swarm.relay.reservation_table import HeldReservation, RelayedConnection, ReservationTable
from swarm.report.invariants import ADVERTISED, REACHED, RELAY_BUDGET, RESUMED
from swarm.simulate.virtual.faults import Crash, FaultPlan, RelayFault, RelayVice, Turncoat, with_outward
from swarm.simulate.virtual.loop import run_virtual
from swarm.simulate.virtual.node import Parts
from swarm.simulate.virtual.reach_checks import SNAPSHOT_S, _groups
from swarm.simulate.virtual.run import draw_plan, run_seed
from swarm.testing.builders import HoldsNothing
from swarm.types import Cursor, NodeId, StreamFilter
from tests.worlds.fault_sweep import NUM_NODES, NUM_ROUNDS, failures

NUM_PLANS = int(os.environ.get("SWARM_FAULT_PLANS", "16")) // 4  # half of test_virtual_swarm.py's have such nodes, too
FEW = 12


@pytest.mark.timeout(900)
def test_invariants_hold_where_nobody_can_dial_seven_nodes_in_ten() -> None:
    found = failures(range(NUM_PLANS), outward_share=0.7)
    assert not found, "\n\n".join(found[:5])


def test_half_of_the_plans_have_such_nodes_and_all_else_of_a_plan_is_as_without() -> None:
    plans = [draw_plan(seed, NUM_NODES, NUM_ROUNDS) for seed in range(200)]
    assert 70 < sum(plan.outward_share is not None for plan in plans) < 130
    for seed, plan in enumerate(plans):
        without = with_outward(plan, None, random.Random(seed), NUM_NODES, 0.0)
        assert plan.outward_share is not None or plan == without
    assert {fault.vice for plan in plans for fault in plan.relay_faults} == set(RelayVice)


def test_where_nobody_can_be_dialled_the_coordinator_relays_for_all() -> None:
    run = run_seed(5, 4, 6, FaultPlan(outward_share=1.0))
    assert run.invariants.hold, run.invariants.violations
    assert run.network["reserve"] == 4 and run.network["connect_through"] >= 12
    assert "connect" not in run.network
    alone = run_seed(5, 4, 6, FaultPlan())
    assert sum(run.steps.values()) >= 0.9 * sum(alone.steps.values())


def test_streams_go_on_through_another_relay_when_theirs_dies() -> None:
    run = run_seed(2, 6, 12, RELAYS_DIE)
    assert run.invariants.hold, run.invariants.violations


# --- the invariants can fail: each broken part turns its own red --------------------------------------


class GenerousTable(ReservationTable):
    """Gives every node a reservation, and counts no connection."""

    def _make_room(self, node_id: NodeId, subnet: str, reservations: list[HeldReservation]) -> None:
        pass

    @contextmanager
    def connection(
        self, node_id: NodeId, caller: NodeId, subnet: str, end: Callable[[], None]
    ) -> Generator[RelayedConnection]:
        yield RelayedConnection(caller, subnet, node_id, end)


class LeakingTable(ReservationTable):
    """Counts no connection as over."""

    num_begun = 0

    @contextmanager
    def connection(
        self, node_id: NodeId, caller: NodeId, subnet: str, end: Callable[[], None]
    ) -> Generator[RelayedConnection]:
        if self.num_begun >= FEW:
            raise Unavailable(f"{FEW} connections are open")
        self.num_begun += 1
        yield RelayedConnection(caller, subnet, node_id, end)


class BoastfulReach(Reach):
    """Advertises the reservations that it asked for, held or not."""

    def _advertise(self) -> None:
        super()._advertise()
        if self.state.kind is ReachKind.OUTWARD:
            asked = [*self._agent.config.coordinator.address.split(","), *self._agent.endpoints]
            relay_id = self._agent.config.coordinator.fingerprint
            self._agent.endpoints = (relayed_endpoint(asked[0], relay_id), *self._agent.endpoints)


class OnceReach(Reach):
    """Holds no reservation again once it lost one."""

    def _candidates(self, now_s: float) -> list[PeerAddress]:
        return [address for address in super()._candidates(now_s) if address not in self._pauses]


RELAYS_DIE = FaultPlan(
    outward_share=0.7,
    latency_s=0.02,
    crashes=tuple(Crash(node=node, at_s=14.0 + 4 * node, down_s=3.0) for node in (0, 2, 3)),
    coordinator_crash=Crash(node=-1, at_s=9.0, down_s=4.0),
)
ONE_DIES = FaultPlan(outward_share=1.0, coordinator_crash=Crash(node=-1, at_s=9.0, down_s=4.0))
TIGHT = FaultPlan(outward_share=0.7, relay_reservations=2)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("parts", "plan", "broken"),
    [
        (Parts(reservations=GenerousTable), TIGHT, RELAY_BUDGET),
        (Parts(reservations=LeakingTable), RELAYS_DIE, REACHED),
        (Parts(reach=BoastfulReach), RELAYS_DIE, ADVERTISED),
        (Parts(reach=OnceReach), ONE_DIES, REACHED),
    ],
    ids=["budget", "leak", "advert", "once"],
)
def test_a_broken_part_turns_its_invariant_red(parts: Parts, plan: FaultPlan, broken: str) -> None:
    sound = run_seed(6, 8, 12, plan)
    assert sound.invariants.hold, sound.invariants.violations
    run = run_seed(6, 8, 12, plan, parts)
    assert run.invariants.violations.get(broken), run.invariants.verdicts()


def test_who_makes_room_at_a_relay_without_delay_counts_there_no_more() -> None:
    members = (Turncoat(attack="rare", is_member=True, honest_s=10.8), Turncoat(attack="flood", is_member=False))
    away = Crash(node=-1, at_s=8.204626700724864, down_s=1.811641854574492)
    plan = FaultPlan(outward_share=0.7, relay_reservations=4, coordinator_crash=away, turncoats=members)
    run = run_seed(16861, NUM_NODES, NUM_ROUNDS, plan)
    assert run.invariants.hold, run.invariants.violations


class SkippingCursors(dict[NodeId, Cursor]):
    """Goes on one group behind where it was."""

    def get(self, key: NodeId, default: Cursor = Cursor()) -> Cursor:  # type: ignore[override]
        cursor = super().get(key, default)
        return Cursor(epoch=cursor.epoch, sequence=cursor.sequence + 1) if cursor.sequence else cursor


@pytest.mark.sweep
def test_a_stream_that_goes_on_behind_a_group_turns_its_invariant_red(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = StreamPositions.__init__

    def begin_skipping(self: StreamPositions, *arguments: int) -> None:
        begin(self, *arguments)
        monkeypatch.setattr(self, "cursors", SkippingCursors())

    monkeypatch.setattr(StreamPositions, "__init__", begin_skipping)
    run = run_seed(6, 8, 12, RELAYS_DIE)
    assert run.invariants.violations.get(RESUMED), run.invariants.verdicts()


def _vice(vice: RelayVice) -> FaultPlan:
    return FaultPlan(
        outward_share=0.7,
        relay_faults=tuple(RelayFault(node=node, vice=vice, start_s=0.0, end_s=30.0) for node in (0, 2)),
    )


@pytest.mark.parametrize("vice", sorted(RelayVice))
def test_nodes_learn_from_each_other_past_relays_with_a_vice(vice: RelayVice) -> None:
    run, alone = run_seed(4, 6, 12, _vice(vice)), run_seed(4, 6, 12, FaultPlan(outward_share=0.7))
    assert run.invariants.hold, run.invariants.violations
    assert sum(run.steps.values()) >= 0.9 * sum(alone.steps.values())


class NeverQuiet(HoldsNothing):
    """Has two groups, and makes another one twice a second."""

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncGenerator[StreamItem]:
        for sequence in count(1):
            await asyncio.sleep(0.5 if sequence > 2 else 0.0)
            digest = sequence.to_bytes(32, "big")
            yield StreamItem(cursor=Cursor(epoch="e", sequence=sequence), digest=digest, size_bytes=1, sealed=None)


def test_what_a_node_owes_is_known_though_it_goes_on_making_groups() -> None:
    assert 2 <= len(run_virtual(_groups(NeverQuiet()))) <= 2 + 2 * SNAPSHOT_S
