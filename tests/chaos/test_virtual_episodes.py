"""Episodes of several turns in the virtual swarm: what must hold, holds under every plan; each invariant can fail."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest

from swarm.episode import EpisodeOutcome
from swarm.exchange import own_groups, reward_recheck
from swarm.generation import episode_player
from swarm.objectives import batch as batches
from swarm.objectives import turn_columns
from swarm.simulate.invariants import HONEST, REPEAT, TRAINED, TURNS, WHOLE_EPISODES
from swarm.simulate.virtual.episode_plan import EpisodePlan
from swarm.simulate.virtual.faults import Crash, FaultPlan, SeamRates
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.node import Parts
from swarm.simulate.virtual.run import VirtualRun, run_seed
from swarm.types import Draw, Rollout

NUM_PLANS = int(os.environ.get("SWARM_EPISODE_PLANS", "8"))  # 40 in .ci/run
NUM_NODES, NUM_ROUNDS = 10, 6
EPISODES = EpisodePlan(environments=(("calculator", 4), ("grid_world", 6), ("look_up", 5)))
Break = Callable[[pytest.MonkeyPatch], None]


def _broken(seed: int) -> str:
    """Empty when every invariant held under that seed's plan; else what broke and how to replay it."""
    logging.disable(logging.CRITICAL)
    run = run_seed(seed, NUM_NODES, NUM_ROUNDS, has_episodes=True)
    broken = [f"{verdict.name}: {verdict.detail}" for verdict in run.invariants.verdicts() if not verdict.holds]
    return "\n".join([run.command, *broken]) if broken else ""


@pytest.mark.timeout(300)
def test_invariants_hold_under_every_fault_plan_with_episodes() -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        failures = [found for found in pool.map(_broken, range(NUM_PLANS), chunksize=4) if found]
    assert not failures, "\n\n".join(failures[:5])


def run_episodes(seed: int = 5, num_nodes: int = 3, num_rounds: int = 6, **plan: Any) -> VirtualRun:
    return run_seed(seed, num_nodes, num_rounds, replace(FaultPlan(episodes=EPISODES), **plan))


def test_same_seed_gives_the_same_event_log_bit_for_bit() -> None:
    first, second = (run_seed(3, 4, 3, has_episodes=True) for _ in range(2))
    assert first.plan.episodes is not None
    assert first.log_digest == second.log_digest
    assert first.command == "swarm simulate --virtual --episodes --nodes 4 --rounds 3 --seed 3"


def test_all_else_of_a_plan_is_as_without_episodes() -> None:
    for seed in range(20):
        plan = FaultPlan.random(seed, 10, 24.0, has_episodes=True)
        assert replace(plan, episodes=None) == FaultPlan.random(seed, 10, 24.0)


def test_nodes_learn_from_episodes_of_each_other_on_a_perfect_network() -> None:
    run = run_episodes()
    verdicts = {verdict.name: verdict for verdict in run.invariants.verdicts()}
    assert run.invariants.hold, run.invariants.violations
    assert not set(run.refusals) - {"too_old", "duplicate"}
    assert min(run.steps.values()) > 0
    for name in (WHOLE_EPISODES, TRAINED, TURNS):
        assert verdicts[name].detail == f"{sum(run.steps.values())} draws looked through"


# --- the invariants can fail ---------------------------------------------------------------------------


def _believes_itself(patch: pytest.MonkeyPatch) -> None:
    """A node signs what its engine made."""
    patch.setattr(own_groups.OwnGroups, "check_own", lambda *_: None)  # pyright: ignore[reportUnknownLambdaType]


def _trains_observations(patch: pytest.MonkeyPatch) -> None:
    response = batches._response

    def everything(*arguments: Any) -> Any:
        made = response(*arguments)
        return replace(made, mask=made.mask | True, logprobs=np.nan_to_num(made.logprobs, nan=-1.0))

    patch.setattr(batches, "_response", everything)


def _shifts_turn_rewards(patch: pytest.MonkeyPatch) -> None:
    transitions = turn_columns._transitions

    def late(rollout: Rollout, outcome: EpisodeOutcome | None) -> Any:
        found = transitions(rollout, outcome)
        return [found[-1], *found[:-1]]

    patch.setattr(turn_columns, "_transitions", late)


def _forgets_outcomes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reward_recheck, "_kept_outcomes", lambda *_: ())  # pyright: ignore[reportUnknownLambdaType]


def _ends_every_turn(patch: pytest.MonkeyPatch) -> None:
    """The engine believes that every turn ended by itself: observations lack the end token of those cut off."""
    observation = episode_player.EpisodePlayer._observation

    def ended(self: Any, rollout: int, stepped: Any, is_ended: bool) -> Any:
        return observation(self, rollout, stepped, True)

    patch.setattr(episode_player.EpisodePlayer, "_observation", ended)
    _believes_itself(patch)


FAILING = SeamRates(failing_verifier=0.05)


@pytest.mark.parametrize(
    ("damage", "plan", "broken"),
    [
        (_believes_itself, {"seams": FAILING}, HONEST),
        (_believes_itself, {"seams": FAILING}, WHOLE_EPISODES),
        (_ends_every_turn, {}, HONEST),
        (_trains_observations, {}, TRAINED),
        (_shifts_turn_rewards, {}, TURNS),
        (_forgets_outcomes, {}, TURNS),
    ],
    ids=["own-check-honest", "own-check-whole", "end-tokens", "mask", "turn-rewards", "outcomes-kept"],
)
def test_a_broken_part_turns_its_invariant_red(
    damage: Break, plan: dict[str, Any], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = run_episodes(6, **plan)
    assert sound.invariants.hold, sound.invariants.violations
    damage(monkeypatch)
    run = run_episodes(7, **plan)  # findings about the groups of another seed are kept in this process
    assert run.invariants.violations.get(broken), run.invariants.verdicts()


class ForgetfulStore(MemoryGroupStore):
    """What was replayed is not on its disk."""

    async def draws(self, from_step: int) -> list[Draw]:
        return [
            replace(
                draw,
                groups=tuple(replace(drawn, scored=replace(drawn.scored, outcomes=())) for drawn in draw.groups),
            )
            for draw in await super().draws(from_step)
        ]


def test_a_step_of_episodes_made_again_after_a_kill_is_the_same_bit_for_bit() -> None:
    crashes = tuple(Crash(node=node, at_s=12.0 + 3.3 * node, down_s=1.0) for node in range(3))
    plan = FaultPlan(latency_s=0.05, crashes=crashes, episodes=EPISODES)
    run = run_seed(2, 4, 8, plan)
    assert run.invariants.hold, run.invariants.violations
    details = {verdict.name: verdict.detail for verdict in run.invariants.verdicts()}
    assert details[REPEAT] != "0 steps made again", "no crash came between a step and its checkpoint"
    broken = run_seed(2, 4, 8, plan, Parts(store=ForgetfulStore)).invariants.violations
    assert broken[REPEAT] and broken[TURNS]
