"""Promises of advantage estimators, checked exactly: every group that a small policy can draw, with its chance.

Derivation: a softmax policy over three answers. The gradient of the expected reward with respect to its
logits is p_a (r_a - sum_b p_b r_b); a group's estimate is the mean over its members of A_i (e_i - p).
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swarm.objectives.batch import Batch
from swarm.objectives.methods.asymre import ShiftedMean
from swarm.objectives.methods.mc_grpo import MedianDeviation
from swarm.objectives.methods.ngrpo import VirtualMaximum
from swarm.objectives.methods.poise import CrossBaseline
from swarm.objectives.methods.pvpo import ReferenceAnchor
from swarm.objectives.methods.reinforcement_comparison import PromptTracker
from swarm.objectives.methods.remax import GreedyBaseline
from swarm.objectives.part import AdvantagePart
from swarm.objectives.parts.advantage import GroupCentred, GroupZScore, LeaveOneOut
from swarm.testing.batches import toy_batch, toy_scored

CHANCES = torch.tensor([0.55, 0.3, 0.15], dtype=torch.float64)
REWARDS = torch.tensor([0.1, 0.4, 1.0], dtype=torch.float64)


def every_group(size: int, rewards: Tensor = REWARDS) -> tuple[Batch, Tensor, Tensor]:
    """(a step of all groups that can be drawn, answers [M, size], chances [M])."""
    answers = torch.tensor(list(itertools.product(range(len(CHANCES)), repeat=size)))
    count, groups = answers.numel(), len(answers)
    batch = toy_batch(
        rewards[answers].flatten(),
        groups=torch.arange(groups).repeat_interleave(size),
        token_ids=answers.reshape(-1, 1),
        behavior_logprobs=CHANCES.log()[answers].reshape(-1, 1),
        task_keys=("task/1",) * groups,
        baseline_rewards=torch.full((groups,), float(rewards[0]), dtype=torch.float64),
        reference_rewards=torch.full((count,), 0.25, dtype=torch.float64),
        memory={"PromptTracker": {"prompts": {"task/1": 0.3}}},
    )
    return batch, answers, CHANCES[answers].prod(dim=1)


def estimates(advantages: Tensor, answers: Tensor) -> Tensor:
    """Gradient estimate [M, 3] of each group."""
    scores = torch.nn.functional.one_hot(answers, len(CHANCES)).double() - CHANCES
    return (advantages.reshape(answers.shape)[..., None] * scores).mean(dim=1)


def true_gradient(rewards: Tensor = REWARDS) -> Tensor:
    return CHANCES * (rewards - (CHANCES * rewards).sum())


def moments(part: AdvantagePart, size: int) -> tuple[Tensor, float]:
    """(expected estimate, its total variance)."""
    batch, answers, chances = every_group(size)
    found = estimates(part(batch), answers)
    mean = (chances[:, None] * found).sum(dim=0)
    return mean, float((chances[:, None] * (found - mean) ** 2).sum())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "part", [LeaveOneOut(), GreedyBaseline(), ReferenceAnchor(), PromptTracker()], ids=lambda part: type(part).__name__
)
def test_a_baseline_from_outside_the_rollout_leaves_the_gradient_unbiased(part: AdvantagePart, size: int) -> None:
    assert torch.allclose(moments(part, size)[0], true_gradient(), atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_groups_own_mean_shrinks_the_gradient_and_does_not_turn_it(size: int) -> None:
    assert torch.allclose(moments(GroupCentred(), size)[0], true_gradient() * (size - 1) / size, atol=1e-12)


def test_a_shifted_mean_does_not_move_the_expected_gradient() -> None:
    assert torch.allclose(moments(ShiftedMean(shift=-0.1), 3)[0], moments(GroupCentred(), 3)[0], atol=1e-12)


def test_dividing_by_the_deviation_does_turn_it() -> None:
    mean = moments(GroupZScore(), 4)[0]
    assert float(torch.nn.functional.cosine_similarity(mean, true_gradient(), dim=0)) < 0.999


@pytest.mark.parametrize(
    "part", [LeaveOneOut(), GreedyBaseline(), ReferenceAnchor(), PromptTracker()], ids=lambda part: type(part).__name__
)
def test_a_baseline_lowers_the_variance(part: AdvantagePart) -> None:
    batch, answers, chances = every_group(4)
    plain = estimates(batch.rewards, answers)
    variance = float((chances[:, None] * (plain - true_gradient()) ** 2).sum())
    assert moments(part, 4)[1] < variance


def test_the_probes_baseline_is_unbiased_whatever_it_predicts() -> None:
    part = CrossBaseline(directions=1, ending=1)
    batch, answers, chances = every_group(2)
    state = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64)[answers].reshape(-1, 1)  # tells the own answer
    memory = {"gram": torch.eye(6).tolist(), "moment": [0.4, -0.3, 0.2, 0.0, 0.1, 0.5], "rewards": [-9.0, 9.0]}
    batch = replace(batch, memory={"CrossBaseline": memory})
    entropy = state.abs() + 0.1
    scored = toy_scored(batch, entropy=entropy, probes={"direction_0": state})
    found = (chances[:, None] * estimates(part(scored), answers)).sum(dim=0)
    assert torch.allclose(found, true_gradient(), atol=1e-12)


def wrong_signs(part: AdvantagePart, size: int, rewards: Tensor) -> float:
    """Chance that a rollout whose reward is not the expected one is pushed against its lead over it."""
    batch, answers, chances = every_group(size, rewards)
    lead = rewards[answers] - (CHANCES * rewards).sum()
    turned = (part(batch).reshape(answers.shape) * lead < 0).double().mean(dim=1)
    return float((chances * turned).sum())


@pytest.mark.parametrize("size", [3, 5])  # G + 1 of the paper's G = 2 and 4
@pytest.mark.parametrize(
    "rewards", [[-0.1, 0.05, -3.0], [0.0, 0.15, -2.0], [0.4, 0.5, 0.0]], ids=["disaster", "bad", "partial credit"]
)
def test_the_median_turns_fewer_signs_than_the_mean_with_graded_rewards(rewards: list[float], size: int) -> None:
    graded = CHANCES.new_tensor(rewards)
    assert wrong_signs(MedianDeviation(), size, graded) < wrong_signs(GroupCentred(), size, graded)


def test_with_binary_rewards_the_mean_turns_no_sign_and_the_median_spares_most() -> None:
    binary = CHANCES.new_tensor([0.0, 1.0, 1.0])
    assert wrong_signs(GroupCentred(), 3, binary) == 0
    batch, answers, chances = every_group(3, binary)
    spared = (MedianDeviation()(batch).reshape(answers.shape) == 0).double().mean(dim=1)
    assert float((chances * spared).sum()) > 0.6


def test_failing_groups_learn_from_the_virtual_maximum_and_only_they_differ_in_sign() -> None:
    batch, answers, _ = every_group(3, CHANCES.new_tensor([0.0, 0.0, 1.0]))
    advantages = VirtualMaximum()(batch).reshape(answers.shape)
    fails, wins = (answers < 2).all(dim=1), (answers == 2).all(dim=1)
    assert bool((advantages[fails] < 0).all()) and not advantages[wins].any()
    mixed = ~fails & ~wins
    assert bool(((advantages[mixed] > 0) == (answers[mixed] == 2)).all())
