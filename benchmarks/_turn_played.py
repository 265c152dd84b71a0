"""Episodes and runs that figures of recipes over turns are measured on, made once a process.

Invariant: both sides of a figure see the same weights, tasks and seeds.
Shape letters: N rollouts, K most turns.
"""

import functools
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from benchmarks._turn_episodes import Policy, World, advantages, batch_of
from swarm.objectives.batch import Batch
from swarm.objectives.parts import turns_of
from swarm.types import ScoredGroup

NUM_GROUPS: Final = 32
GROUP_SIZE: Final = 8
NUM_STEPS: Final = 20
NUM_LONG_STEPS: Final = 50
NUM_STEP_GROUPS: Final = 4
NUM_TEST: Final = 32  # tasks
TRAJECTORY_LEVEL: Final = "grpo"


@functools.cache
def played(world: World, seed: int, num_groups: int = NUM_GROUPS, group_size: int = GROUP_SIZE) -> list[ScoredGroup]:
    """Episodes of the starting weights."""
    policy = Policy(world=world, recipe=TRAJECTORY_LEVEL, seed=seed)
    return policy.play(world.build(), 1000 * (seed + 1), num_groups, group_size)


def outcome_only(batch: Batch) -> Batch:
    """The batch with turns of reward 0: what is left is what a method makes of outcomes."""
    assert batch.turn_rewards is not None
    return replace(batch, turn_rewards=torch.zeros_like(batch.turn_rewards))


@functools.cache
def trained(recipe: str, world: World, seed: int, updates_per_step: int = 1, num_steps: int = NUM_STEPS) -> Policy:
    """The policy after so many steps."""
    policy = Policy(world=world, recipe=recipe, seed=seed, updates_per_step=updates_per_step)
    policy.train(world.build(), num_steps, NUM_STEP_GROUPS, GROUP_SIZE)
    return policy


def tested(policy: Policy, world: World | None = None) -> Batch:
    """Sampled episodes of held-out tasks, of its own world or another."""
    environment = (world or policy.world).build()
    return batch_of(policy.play(environment, 0, NUM_TEST, GROUP_SIZE, is_held_out=True))


def correlation(values: Tensor, truth: Tensor) -> float:
    """Over the turns [N, K] where neither is NaN; 0 where one of them is constant."""
    there = ~(torch.isnan(values) | torch.isnan(truth))
    one, other = values[there], truth[there]
    if float(one.std()) == 0.0 or float(other.std()) == 0.0:
        return 0.0
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])


def agreement(recipe: str, batch: Batch, truth: Tensor) -> tuple[float, float]:
    """Correlation of a turn's advantage with what the turn was really worth."""
    return correlation(advantages(recipe, batch), truth), correlation(advantages(TRAJECTORY_LEVEL, batch), truth)


def worth_of_turns(batch: Batch) -> Tensor:
    """What the environment says of each turn, NaN where there is none: a step nearer to the goal, a hop found."""
    turns = turns_of(batch)
    return torch.where(turns.exists, turns.rewards, torch.nan)
