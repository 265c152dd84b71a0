"""Progress towards successes (SRPO, self-referential): a failure is rewarded by its closeness to the group's successes.

    R <- R for a success; else .5 sigmoid(-(d - mean d) / (std d + floor)), d to the nearest success; z-score, clip .2

Mean and deviation are those of the group's failures; a group without a success keeps its rewards. Known from notes on
the paper. Ours: counts of the states that an episode passed, scaled to length 1, in place of a world model's embedding;
every success is a centre (the paper clusters them); the sigmoid; .5, so that no failure is worth a success; successes
of the same group alone, so that no group changes another group's rewards; no KL penalty, as in `grpo`.
"""

import torch
from torch import Tensor

from swarm.objectives.part import Batch, Requirement, RewardPart, Share
from swarm.objectives.parts import Clip, GroupZScore, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe


def state_counts(batch: Batch) -> Tensor:
    """Counts of each state, scaled to Euclidean length 1: float64 [N, states]; 0 for an episode without state keys."""
    episodes = batch.state_keys or ((),) * batch.num_rollouts
    numbers = {key: place for place, key in enumerate(sorted({key for keys in episodes for key in keys if key}))}
    counts = torch.zeros((batch.num_rollouts, max(1, len(numbers))), dtype=torch.float64, device=batch.mask.device)
    for row, keys in enumerate(episodes):
        for key in filter(None, keys):
            counts[row, numbers[key]] += 1
    return counts / counts.norm(dim=1, keepdim=True).clamp(min=1)


class SelfReferentialProgress(RewardPart):
    """Replaces the reward of a failure by its closeness to the nearest success of its group, in visited states.

    Source: SRPO, arXiv:2511.15605, as quoted in notes on the paper.
    """

    equation = "R <- most sigmoid(-(d - mean d) / (std d + floor)) for failures, d = min_{success of G} |e - e_s|^2"
    always_needs = frozenset({Requirement.TURNS, Requirement.STATE_KEYS})
    most: Share = 0.5  # of a failure
    correct: float = 0.5  # a success has a higher reward
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        embeddings, rewards = state_counts(batch), batch.rewards.clone()
        is_success = batch.rewards > self.correct
        for group in batch.group_index.unique().tolist():
            own = batch.group_index == group
            won, lost = own & is_success, own & ~is_success
            if not bool(won.any()) or not bool(lost.any()):
                continue
            gaps = (embeddings[lost][:, None] - embeddings[won][None]) ** 2
            distances = gaps.sum(dim=2).min(dim=1).values
            spread = distances.std() if len(distances) > 1 else distances.new_zeros(())
            progress = torch.sigmoid(-(distances - distances.mean()) / (spread + self.floor))
            rewards[lost] = (self.most * progress).to(rewards.dtype)
        return rewards


RECIPE = Recipe(
    name="srpo",
    title="SRPO: Self-Referential Policy Optimization for Vision-Language-Action Models",
    acronym="SRPO (self-referential)",
    arxiv="2511.15605",
    verification="secondary",
    rewards=(SelfReferentialProgress(),),
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
