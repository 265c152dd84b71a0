"""Episodes of several turns in the virtual swarm: what must hold, holds under every plan; each invariant can fail."""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from swarm.episode import EpisodeOutcome
from swarm.exchange import own_groups
from swarm.exchange.checks import reward_recheck
from swarm.exchange.draw_journal import DrawJournal
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.exchange.replay_tables import ReplayEntry
from swarm.generation import episode_player
from swarm.objectives import draw_batch as batches
from swarm.report.invariants import HONEST, REPEAT, TRAINED, TURNS, WHOLE_EPISODES
from swarm.simulate.virtual.episode_plan import EpisodePlan
from swarm.simulate.virtual.faults import Crash, FaultPlan, SeamRates, Turncoat
from swarm.simulate.virtual.forged_episodes import CLAIMS, EPISODE_ATTACKS
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.node import Parts
from swarm.simulate.virtual.run import VirtualRun, run_seed
from swarm.types import Draw, NodeId, Rollout
from tests.worlds.fault_sweep import failures

NUM_PLANS = int(os.environ.get("SWARM_EPISODE_PLANS", "2"))  # of 24 virtual seconds; 40 in make nightly

EPISODES = EpisodePlan(environments=(("calculator", 4), ("grid_world", 6), ("look_up", 5)))
Break = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.timeout(900)
def test_invariants_hold_under_every_fault_plan_with_episodes() -> None:
    found = failures(range(NUM_PLANS), has_episodes=True)
    assert not found, "\n\n".join(found[:5])


def run_episodes(seed: int = 5, num_nodes: int = 3, num_rounds: int = 6, **plan: Any) -> VirtualRun:
    return run_seed(seed, num_nodes, num_rounds, replace(FaultPlan(episodes=EPISODES), **plan))


def test_same_seed_gives_the_same_event_log_bit_for_bit() -> None:
    first, second = (run_seed(3, 4, 3, has_episodes=True) for _ in range(2))
    assert first.plan.episodes is not None
    assert first.log_digest == second.log_digest


def test_all_else_of_a_plan_is_as_without_episodes() -> None:
    for seed in range(20):
        plan = FaultPlan.random(seed, 10, 24.0, has_episodes=True)
        alike = replace(FaultPlan.random(seed, 10, 24.0), outward_share=None, relay_reservations=0, relay_faults=())
        assert replace(plan, episodes=None) == alike


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
    transitions = batches._transitions

    def late(rollout: Rollout, outcome: EpisodeOutcome | None) -> Any:
        found = transitions(rollout, outcome)
        return [found[-1], *found[:-1]]

    patch.setattr(batches, "_transitions", late)


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


@pytest.mark.sweep
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
    """A store that keeps no replayed outcome on its disk."""

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


# --- adversaries that play episodes ---------------------------------------------------------------------

REASONS = {
    "forged_status": {"false_reward"},
    "forged_turn_reward": {"false_reward"},
    "forged_observation": {"wrong_episode"},
    "dropped_turn": {"wrong_episode"},
    "other_task": {"wrong_episode", "false_reward", "held_out"},
    "early_end": {"wrong_episode"},
    "late_end": {"wrong_episode", "malformed"},  # one more action than its own node's replay made claims of
}


def run_attack(attack: str, seed: int) -> VirtualRun:
    """A newcomer and a member that forge episodes, beside four honest nodes."""
    turncoats = (Turncoat(attack=attack), Turncoat(attack=attack, is_member=True, honest_s=4.0))
    return run_episodes(seed, 4, 5, latency_s=0.02, turncoats=turncoats)


@cache
def num_steps_alone() -> int:
    """Of four honest nodes that nobody attacks."""
    return sum(run_episodes(8, 4, 5, latency_s=0.02).steps.values())


@pytest.mark.parametrize("attack", EPISODE_ATTACKS)
def test_forged_episodes_are_refused_with_their_reason_and_hold_up_nobody(attack: str) -> None:
    run = run_attack(attack, 8)
    assert run.invariants.hold, run.invariants.violations
    assert run.refusals.keys() & REASONS[attack], run.refusals
    assert not run.refusals.keys() - REASONS[attack] - {"too_old", "duplicate", "copied", "low_reputation"}
    assert sum(run.steps.values()) >= 0.9 * num_steps_alone()


@pytest.mark.sweep
@pytest.mark.parametrize("attack", ["forged_status", "forged_observation", "dropped_turn"])
def test_without_the_replay_at_admission_forged_episodes_are_learned_from(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_recheck, "check_replay", lambda *_: None)  # pyright: ignore[reportUnknownLambdaType]
    run = run_attack(attack, 9)
    assert run.invariants.violations[TURNS if attack in CLAIMS else WHOLE_EPISODES], run.refusals


# --- age --------------------------------------------------------------------------------------------------

Fates = dict[int, Counter[str]]  # turns of the longest episode of a group -> what became of it


class NotingBuffer(ReplayBuffer):
    """Notes what becomes of the groups of its own node."""

    fates: Fates

    def _drop(self, entry: ReplayEntry, reason: str) -> None:
        self._note(entry, reason)
        super()._drop(entry, reason)

    def _use(self, step: int, entries: list[ReplayEntry], source_weights: Mapping[NodeId, float]) -> Draw:
        for entry in entries:
            self._note(entry, "used")
        return super()._use(step, entries, source_weights)

    def _note(self, entry: ReplayEntry, what: str) -> None:
        if entry.is_own_policy:
            turns = max(len(rollout.actions) for rollout in entry.scored.group.rollouts)
            self.fates.setdefault(turns, Counter())[what] += 1


def fates_of(step_s: float, seed: int) -> Fates:
    """Three nodes whose engines are faster than their learners, so that capacity alone bounds them, for 80 s."""
    fates: Fates = {}
    plan = EpisodePlan(environments=(("grid_world", 8), ("look_up", 5), ("retry", 3)), step_s=step_s)
    parts = Parts(replay=type("Noting", (NotingBuffer,), {"fates": fates}))
    run = run_seed(seed, 3, 20, FaultPlan(latency_s=0.05, episodes=plan), parts)
    assert run.invariants.hold, run.invariants.violations
    return fates


def share_too_old(fates: Fates) -> float:
    """Of all groups."""
    return sum(each["too_old"] for each in fates.values()) / sum(each.total() for each in fates.values())


@pytest.mark.parametrize("step_s", [0.02, 1.0])
def test_hardly_an_episode_is_too_old_when_it_is_its_turn_however_many_turns_it_has(step_s: float) -> None:
    fates = fates_of(step_s, 1)
    assert max(fates) == 8 and len(fates) >= 5
    assert sum(each.total() for each in fates.values()) > 100
    shares = {turns: each["too_old"] / each.total() for turns, each in sorted(fates.items())}
    assert max(shares.values()) <= 0.01, shares


def test_were_the_step_under_way_not_counted_one_in_ten_would_be_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrawJournal, "is_under_way", False)
    assert share_too_old(fates_of(0.02, 1)) > 0.1
