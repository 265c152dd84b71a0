"""The whole swarm under seeded fault plans on virtual time: what must hold, holds; what is seeded, repeats."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import zstandard
from google.protobuf.message import DecodeError
from rich.console import Console

from swarm.exchange.admission import Admission, Arrival
from swarm.exchange.checks.admission_limits import Finding
from swarm.exchange.checks.reward_recheck import to_scored_group
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.report.invariants import ADMITTED, AGE, BOUNDS, NO_FAILURE, ONCE, PROGRESS, REPEAT, REUSE
from swarm.simulate.virtual.faults import Crash, FaultPlan, Partition
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.node import Parts
from swarm.simulate.virtual.run import run_seed, run_virtual_command
from swarm.simulate.virtual.scale import LARGE, LARGE_SWARM
from swarm.types import Draw, RefusalReason
from swarm.wire.rollout_groups import Malformed, body_to_group
from swarm.wire.v1 import rollout_pb2
from tests.worlds.fault_sweep import NUM_NODES, NUM_ROUNDS, failures

NUM_PLANS = int(os.environ.get("SWARM_FAULT_PLANS", "4"))  # 300 in make nightly


@pytest.mark.timeout(900)
def test_invariants_hold_under_every_fault_plan() -> None:
    found = failures(range(NUM_PLANS))
    assert not found, "\n\n".join(found[:5])


def test_the_seed_alone_decides_the_event_log_bit_for_bit() -> None:
    first, second = (run_seed(17, NUM_NODES, NUM_ROUNDS) for _ in range(2))
    plan = first.plan
    assert plan.turncoats and plan.crashes and plan.outward_share, "faults, newcomers and relays are part of it"
    assert first.log_digest == second.log_digest != run_seed(18, NUM_NODES, NUM_ROUNDS).log_digest


def test_nodes_learn_from_each_other_on_a_perfect_network() -> None:
    run = run_seed(5, 4, 6, plan=FaultPlan())
    assert run.invariants.hold
    assert not set(run.refusals) - {"too_old", "duplicate"}
    assert min(run.steps.values()) > 0


def test_every_node_makes_steps_again_after_all_faults_have_healed() -> None:
    crashes = tuple(Crash(node=node, at_s=20.0 + node, down_s=5.0) for node in range(3))
    plan = FaultPlan(
        latency_s=0.05,
        drop_rate=0.02,
        crashes=crashes,
        partitions=(Partition(start_s=10.0, end_s=40.0, island=frozenset({0, 4})),),
        coordinator_crash=Crash(node=-1, at_s=8.0, down_s=20.0),
    )
    run = run_seed(2, 5, 16, plan)
    verdicts = {verdict.name: verdict for verdict in run.invariants.verdicts()}
    assert run.invariants.hold, run.invariants.violations
    assert verdicts[REPEAT].detail != "0 steps made again", "no crash came between a step and its checkpoint"


def test_a_node_that_restarts_too_late_for_a_first_step_owes_none() -> None:
    plan = FaultPlan(crashes=tuple(Crash(node=node, at_s=1.9, down_s=16.0) for node in range(4)))
    run = run_seed(3, 4, NUM_ROUNDS, plan)
    assert min(run.steps.values()) == 0, "every node was fast enough"
    assert run.invariants.hold, run.invariants.violations


def test_a_hostile_node_is_refused_and_stops_nobody() -> None:
    run = run_seed(4, 4, 6, FaultPlan(num_hostile=1))
    assert run.invariants.hold, run.invariants.violations
    assert {"false_reward", "too_old"} <= set(run.refusals)
    assert not run.refusals.get("low_reputation"), "its streams end before anything has to be refused unseen"
    alone = run_seed(4, 4, 6, FaultPlan())
    assert sum(run.steps.values()) >= 0.9 * sum(alone.steps.values())


def test_a_restart_finds_its_groups_in_a_tight_store_or_says_what_it_lost() -> None:
    crashes = tuple(Crash(node=node, at_s=20.0 + 5 * node, down_s=3.0) for node in range(3))
    details: list[str] = []
    for store_bytes in (4 * 2**10, 16 * 2**10):
        run = run_seed(2, 4, 12, FaultPlan(latency_s=0.05, crashes=crashes, store_bytes=store_bytes))
        assert run.invariants.hold, run.invariants.violations
        details += [verdict.detail for verdict in run.invariants.verdicts() if verdict.name == REPEAT]
    assert "lost and announced" in details[0] and "0 steps" not in details[1] and "lost" not in details[1], details


def test_a_large_swarm_ends_when_every_node_has_made_its_steps() -> None:
    shares: list[float] = []
    run = run_seed(3, LARGE_SWARM, 3, FaultPlan(latency_s=0.05), on_progress=shares.append)
    assert run.scale is LARGE
    assert run.invariants.hold, run.invariants.violations
    assert set(run.steps.values()) == {3}
    assert shares == sorted(shares) and shares[-1] == 1.0


@pytest.mark.sweep
def test_a_large_swarm_with_a_node_that_cannot_finish_says_so() -> None:
    run = run_seed(3, LARGE_SWARM, 2, FaultPlan(crashes=(Crash(node=1, at_s=0.5, down_s=1e6),)))
    assert run.invariants.violations[NO_FAILURE], run.invariants.verdicts()
    assert sorted(run.steps.values())[:2] == [0, 2]


# --- the invariants can fail: each broken part turns its own red --------------------------------------


class CarelessAdmission(Admission):
    """Lets in whatever can be parsed."""

    async def _check_sealed(self, arrival: Arrival) -> Finding:
        sealed = arrival.sealed
        try:
            plain = zstandard.ZstdDecompressor().decompress(sealed.body) if sealed.is_compressed else sealed.body
            arrival.group = body_to_group(rollout_pb2.GroupBody.FromString(plain), sealed.producer)
        except (Malformed, DecodeError, zstandard.ZstdError):
            return RefusalReason.MALFORMED, ""
        return None

    async def _check_opened(self, arrival: Arrival) -> Finding:
        group = arrival.group
        assert group is not None
        verdict = await self._verifier.verify(group.env, group.task_id, [r.actions for r in group.rollouts])
        outcomes = [replace(outcome, reward=float(i)) for i, outcome in enumerate(verdict.outcomes)]
        verdict = replace(verdict, outcomes=tuple(outcomes))  # looks like signal
        arrival.scored = to_scored_group(
            group,
            arrival.sealed,
            verdict.rewards,
            self._tokenizer,
            is_made_here=False,
            now_s=self._context.clock.now_s(),
        )
        return await self._duplicate(arrival) or await self._form(group, arrival) or await self._storage(arrival)


class ForgetfulStore(MemoryGroupStore):
    """Loses its journal of draws."""

    async def record_draw(self, draw: Draw) -> None:
        pass


class OverfullBuffer(ReplayBuffer):
    """Holds twice what it may, as its own figures say."""

    @property
    def fill(self) -> float:
        return 2.0


def _ignoring(**bounds: float) -> Callable[..., ReplayBuffer]:
    return lambda config, *rest: ReplayBuffer(config.model_copy(update=bounds), *rest)


CRASH = FaultPlan(crashes=(Crash(node=1, at_s=18.0, down_s=3.0),))
EARLY_CRASHES = FaultPlan(crashes=tuple(Crash(node=node, at_s=3.0, down_s=2.0) for node in range(4)))
PARTED = FaultPlan(partitions=(Partition(start_s=4.0, end_s=20.0, island=frozenset({1})),))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("parts", "plan", "broken"),
    [
        (Parts(replay=_ignoring(max_reuse=1000)), FaultPlan(), REUSE),
        (Parts(replay=_ignoring(max_age_steps=1000)), PARTED, AGE),
        (Parts(admission=CarelessAdmission), FaultPlan(num_hostile=1), ADMITTED),
        (Parts(store=ForgetfulStore), CRASH, ONCE),
        (Parts(store=ForgetfulStore), CRASH, REUSE),
        (Parts(store=ForgetfulStore), CRASH, REPEAT),
        (Parts(replay=OverfullBuffer), FaultPlan(), BOUNDS),
        (Parts(replay=_ignoring(local_groups=1000)), FaultPlan(), PROGRESS),
        (Parts(replay=_ignoring(local_groups=1000)), EARLY_CRASHES, PROGRESS),
    ],
    ids=[
        "reuse",
        "age",
        "admission",
        "journal-once",
        "journal-reuse",
        "journal-repeat",
        "bounds",
        "progress",
        "progress-after-crashes",
    ],
)
def test_a_broken_part_turns_its_invariant_red(parts: Parts, plan: FaultPlan, broken: str) -> None:
    sound = run_seed(6, 4, 8, plan)
    assert sound.invariants.hold, sound.invariants.violations
    run = run_seed(6, 4, 8, plan, parts)
    assert run.invariants.violations.get(broken), run.invariants.verdicts()


@pytest.mark.parametrize(
    ("options", "flags"),
    [({}, ""), ({"outward_share": 0.7}, "--outward 0.7 "), ({"has_episodes": True}, "--episodes ")],
)
def test_the_command_of_a_run_replays_it(options: dict[str, Any], flags: str) -> None:
    run = run_seed(7, 3, 2, **options)
    assert run.command == f"swarm simulate --virtual {flags}--nodes 3 --rounds 2 --seed 7"
    console = Console(record=True, width=200)
    assert run_virtual_command(3, 2, 7, console, **options)
    shown = console.export_text()
    assert run.command in shown and run.log_digest in shown
