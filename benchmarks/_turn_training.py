"""Quantities after training: a recipe over turns and another from the same weights, over as many episodes.

Invariant: a quantity is a function of its seed, on held-out tasks.
"""

from collections.abc import Callable

import torch

from benchmarks._turn_episodes import ALWAYS, GRID, LOOK_UP, Policy, World, batch_of
from benchmarks._turn_played import (
    GROUP_SIZE,
    NUM_STEP_GROUPS,
    NUM_STEPS,
    NUM_TEST,
    TRAJECTORY_LEVEL,
    tested,
    trained,
)
from swarm.objectives.parts import turns_of


def calls_per_success(num_steps: int, world: World = LOOK_UP) -> Callable[[int], tuple[float, float]]:
    """Held out, after training."""

    def measure(seed: int) -> tuple[float, float]:
        def mean(recipe: str) -> float:
            batch = tested(trained(recipe, world, seed, num_steps=num_steps))
            success = batch.rewards > 0.5
            return float(turns_of(batch).calls.sum(dim=1)[success].to(torch.float64).mean())

        return mean("otc_po"), mean(TRAJECTORY_LEVEL)

    return measure


def success(recipe: str, world: World, baseline_updates: int = 1) -> Callable[[int], tuple[float, float]]:
    """Held out, after training; the trajectory level makes so many updates of each draw."""

    def measure(seed: int) -> tuple[float, float]:
        found = [
            float((tested(trained(name, world, seed, updates)).rewards > 0.5).float().mean())
            for name, updates in ((recipe, 1), (TRAJECTORY_LEVEL, baseline_updates))
        ]
        return found[0], found[1]

    return measure


def distinct_tries(world: World, num_steps: int = NUM_STEPS) -> Callable[[int], tuple[float, float]]:
    """Retry, held out, after training: distinct ones among the tries of episodes that did not succeed at first."""

    def measure(seed: int) -> tuple[float, float]:
        def share(recipe: str) -> float:
            actions = tested(trained(recipe, world, seed, num_steps=num_steps)).actions
            shares = [len(set(each)) / len(each) for each in actions or () if len(each) > 1]
            return sum(shares) / max(1, len(shares))

        return share("ufo"), share(TRAJECTORY_LEVEL)

    return measure


def new_states_visited(seed: int) -> tuple[float, float]:
    """Grid, held out, after training: states of an episode that differ, of those that its turns led to."""

    def share(recipe: str) -> float:
        keys = tested(trained(recipe, GRID, seed)).state_keys
        shares = [len(set(each)) / len(each) for each in keys or () if each]
        return sum(shares) / max(1, len(shares))

    return share("global_episodic"), share(TRAJECTORY_LEVEL)


def rise(policy: Policy) -> float:
    """Retry that always asks twice, held out: wrong first answers made right minus right ones spoilt."""
    batch = tested(policy)
    return float((batch.rewards - batch.reward_parts["first_try"]).mean())


def corrections(seed: int) -> tuple[float, float]:
    """`rise` of score and of the trajectory level, each after training on as many episodes of the same tasks."""
    return rise(trained("score", ALWAYS, seed)), rise(trained(TRAJECTORY_LEVEL, ALWAYS, seed))


def corrections_after_stage_one(seed: int) -> tuple[float, float]:
    """As `corrections`, the second stage from the weights of the first; as many episodes as both have together."""
    second = Policy(world=ALWAYS, recipe="score", seed=seed, weights=trained("score_stage_one", ALWAYS, seed).newest)
    second.train(ALWAYS.build(), NUM_STEPS, NUM_STEP_GROUPS, GROUP_SIZE)
    return rise(second), rise(trained(TRAJECTORY_LEVEL, ALWAYS, seed, num_steps=2 * NUM_STEPS))


def success_beyond_training(recipe: str) -> Callable[[int], tuple[float, float]]:
    """Grid, held out, trained with 4 turns and tested with 8: success."""

    def measure(seed: int) -> tuple[float, float]:
        found = [
            float(
                (tested(trained(name, GRID.but(max_turns=4), seed), GRID.but(max_turns=8)).rewards > 0.5).float().mean()
            )
            for name in (recipe, TRAJECTORY_LEVEL)
        ]
        return found[0], found[1]

    return measure


def turns_beyond_training(
    world: World, trained_turns: int, tested_turns: int, num_steps: int = NUM_STEPS
) -> Callable[[int], tuple[float, float]]:
    """Held out, tested with more turns than in training: turns of an episode."""

    def measure(seed: int) -> tuple[float, float]:
        def mean(recipe: str) -> float:
            policy = trained(recipe, world.but(max_turns=trained_turns), seed, num_steps=num_steps)
            counts = tested(policy, world.but(max_turns=tested_turns)).num_turns
            assert counts is not None
            return float(counts.to(torch.float64).mean())

        return mean("mini_o3"), mean(TRAJECTORY_LEVEL)

    return measure


def entropy_kept(num_steps: int, updates: int = 2) -> Callable[[int], tuple[float, float]]:
    """Look-up, several updates of each draw so that clips act: mean entropy of a held-out token after training."""

    def measure(seed: int) -> tuple[float, float]:
        def mean(recipe: str) -> float:
            policy = trained(recipe, LOOK_UP, seed, updates_per_step=updates, num_steps=num_steps)
            groups = policy.play(LOOK_UP.build(), 0, NUM_TEST, GROUP_SIZE, is_held_out=True)
            _, entropy = policy.scores(groups)
            return float(entropy[batch_of(groups).mask].mean())

        return mean("grpo_tcr"), mean(TRAJECTORY_LEVEL)

    return measure
