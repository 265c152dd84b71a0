"""Fault plans: drawn from a seed, made smaller while they fail, and carried out at each seam."""

import asyncio
import errno
from collections.abc import Callable, Sequence

import pytest

from swarm.clock import ManualClock
from swarm.episode import Actions, EpisodeOutcome
from swarm.errors import RolloutFailed, StorageFull
from swarm.interfaces import Producer, Verdict
from swarm.objectives.methods import recipes_of
from swarm.simulate.virtual.faults import Crash, FaultPlan, SeamRates, WrongClock, shrink
from swarm.simulate.virtual.scale import virtual_config
from swarm.simulate.virtual.seam_faults import NodeClock, SeamFaults

ALWAYS = SeamRates(full_disk=1.0, unsaved_checkpoint=1.0, failing_verifier=1.0, slow_thread=1.0)


def make_faults(rates: SeamRates = ALWAYS, clock: ManualClock | None = None) -> SeamFaults:
    return SeamFaults(rates, seed="1 0", clock=clock or ManualClock(), until_s=10.0)


def test_a_failing_plan_shrinks_to_the_faults_that_it_needs() -> None:
    plan = FaultPlan.random(7, num_nodes=10, duration_s=16.0)
    crashes = tuple(Crash(node=node, at_s=1.0, down_s=1.0) for node in range(4))
    seams = SeamRates(full_disk=0.1, slow_thread=0.2)
    num_runs = 0

    def is_failing(plan: FaultPlan) -> bool:
        nonlocal num_runs
        num_runs += 1
        return plan.seams.slow_thread > 0 and any(crash.node == 2 for crash in plan.crashes)

    plan = FaultPlan(
        latency_s=plan.latency_s, drop_rate=0.1, crashes=crashes, seams=seams, settings=("replay.max_reuse=2",)
    )
    expected = FaultPlan(crashes=(crashes[2],), seams=SeamRates(slow_thread=0.2))
    assert shrink(plan, is_failing) == expected
    assert num_runs < 60


@pytest.mark.parametrize("seed", range(50))
def test_every_drawn_setting_is_a_valid_configuration(seed: int) -> None:
    plan = FaultPlan.random(seed, num_nodes=10, duration_s=24.0)
    assert virtual_config(0, seed, settings=plan.settings).name == "n0"
    assert repr(plan) == repr(FaultPlan.random(seed, num_nodes=10, duration_s=24.0))


@pytest.mark.parametrize("seed", range(50))
def test_every_drawn_plan_of_episodes_is_one_that_a_node_would_start_with(seed: int) -> None:
    plan = FaultPlan.random(seed, num_nodes=10, duration_s=24.0, has_episodes=True)
    assert plan.episodes is not None and plan.episodes.longest_s < 20.0
    config = virtual_config(0, seed, settings=plan.settings, episodes=plan.episodes)
    assert recipes_of(config).main.name == plan.episodes.recipe
    assert any(section.may_have_turns for section in config.environments)


def test_a_wrong_clock_is_skewed_and_jumps_while_its_monotonic_time_goes_on() -> None:
    true = ManualClock(start_s=1000.0)
    clock = NodeClock(true, WrongClock(node=0, skew_s=-30.0, jumps_at_s=5.0, jump_s=3600.0))
    assert clock.now_s() == 970.0
    true.advance(5.0)
    assert (clock.now_s(), clock.monotonic_s()) == (1000.0 + 5.0 - 30.0 + 3600.0, 5.0)
    assert NodeClock(true, None).now_s() == true.now_s()


@pytest.mark.parametrize(
    ("call", "error"),
    [(lambda faults: faults.before_write(1), OSError), (lambda faults: faults.before_save(), StorageFull)],
    ids=["store", "checkpoint"],
)
def test_a_seam_fails_as_the_disk_would_until_the_faults_end(
    call: Callable[[SeamFaults], None], error: type[OSError]
) -> None:
    clock = ManualClock()
    faults = make_faults(clock=clock)
    with pytest.raises(error) as raised:
        call(faults)
    assert raised.value.errno == errno.ENOSPC
    clock.advance(10.0)
    call(faults)
    call(make_faults(SeamRates()))


class KindVerifier:
    """Knows one task, and likes every answer."""

    async def verify(
        self, env: str, task_id: int, episodes: Sequence[Actions], producer: Producer | None = None
    ) -> Verdict:
        raise LookupError(task_id)

    async def step(self, env: str, task_id: int, actions: Actions) -> EpisodeOutcome:
        raise LookupError(task_id)


async def test_a_verifier_fails_at_its_rate_and_else_is_the_inner_one() -> None:
    with pytest.raises(RolloutFailed):
        await make_faults().verifier(KindVerifier()).verify("env", 1, [])
    with pytest.raises(LookupError):
        await make_faults(SeamRates()).verifier(KindVerifier()).verify("env", 1, [])


async def test_slow_threads_still_give_their_result() -> None:
    rates = SeamRates(slow_thread=1.0, slow_thread_s=0.0)
    assert await make_faults(rates).offload(asyncio.to_thread)(sum, (1, 2)) == 3
