"""PIPO: a draw is used a second time, weighted by the later rise of the mean reward, negative if it fell.

    z for new groups; G z / sum |z| times phi(xi) for the previous draw's; clip .2, token mean

The ratio is to the generator, which for the second use is the policy of the previous draw. The released configuration
has no negative weights and bounds the gain at 0.5; this is the paper's form. Ours: a bound on the gain, and the
token mean.
"""

from typing import Annotated

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Bound, Memory, NotNegative, Positive, Requirement, Scored
from swarm.objectives.parts import Clip, TokenMean, TokenRatio, group_scores, group_sum
from swarm.objectives.recipe import Recipe


class ImprovementFeedback(AdvantagePart):
    """Z-scores of new rollouts; for rollouts of the previous draw, normalised z-scores times the later rise of rewards.

    The learner must update on the previous draw before the new one.
    """

    equation = (
        "A_i = z_i (new); a_i phi(xi) (replayed), a_i = G z_i / sum_j |z_j|, xi = (mean R_new - mean_K) / std_K, "
        "phi(x) = x if x >= 0 else negative x"
    )
    always_needs = frozenset({Requirement.PREVIOUS_DRAW, Requirement.ZERO_VARIANCE_GROUPS})
    history: Annotated[int, Bound(at_least=2)] = 8  # draws
    negative: NotNegative = 0.1
    most: Positive = 3.0  # standard deviations; ours: xi is held at +- this
    floor: float = 1e-6

    def initial(self) -> Memory:
        return {"means": []}

    def __call__(self, batch: Batch) -> Tensor:
        assert batch.replayed is not None, "the run does not supply the previous draw"
        rewards = batch.rewards.to(torch.float64)
        scores = group_scores(rewards, batch.group_index, self.floor)
        size = group_sum(torch.ones_like(rewards), batch.group_index)
        share = size * scores / (group_sum(scores.abs(), batch.group_index) + self.floor)
        return torch.where(batch.replayed, share * self._gain(batch), scores).to(batch.rewards.dtype)

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        new = self._new_mean(scored.batch)
        return memory if new is None else {"means": [*memory["means"], new][-self.history :]}

    def _gain(self, batch: Batch) -> float:
        """Returns phi(xi) of this step; 0 without new rollouts or with fewer than two earlier means."""
        new, means = self._new_mean(batch), torch.tensor(self.remembered(batch)["means"], dtype=torch.float64)
        means = means[-self.history :]
        if new is None or means.numel() < 2:  # ours: nothing to compare with yet
            return 0.0
        gain = (new - float(means.mean())) / (float(means.std()) + self.floor)
        gain = min(max(gain, -self.most), self.most)
        return gain if gain >= 0 else self.negative * gain

    @staticmethod
    def _new_mean(batch: Batch) -> float | None:
        """Mean reward of the rollouts that are used for the first time; None if all are replayed."""
        rewards = batch.rewards if batch.replayed is None else batch.rewards[~batch.replayed]
        return float(rewards.to(torch.float64).mean()) if rewards.numel() else None


RECIPE = Recipe(
    name="pipo",
    title="Policy Improvement Reinforcement Learning",
    acronym="PIPO (policy improvement)",
    arxiv="2604.00860",
    verification="secondary",
    advantage=ImprovementFeedback(history=8, negative=0.1, most=3.0),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
