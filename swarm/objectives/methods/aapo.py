"""AAPO: the group z-score plus a bounded lead over the reference policy's answer, in plain likelihood.

    token mean of -A log pi, A = (R - mean) / (std + 1e-4) + clip(R - Rref, -.2, .28)

The lead keeps a gradient alive where all rollouts of a group are equal. No ratio and no clip.
"""

from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Requirement
from swarm.objectives.parts import Likelihood, NoRatio, TokenMean, group_scores, reference_rewards
from swarm.objectives.recipe import Recipe


class ReferenceMomentum(AdvantagePart):
    """Group z-score plus the bounded lead over the reward of the reference policy's response with the same index."""

    equation = "A_i = (R_i - mean_G) / (std_G + floor) + clip(R_i - Rref_i, -low, high)"
    always_needs = frozenset({Requirement.REFERENCE_REWARDS, Requirement.ZERO_VARIANCE_GROUPS})
    low: float = 0.2
    high: float = 0.28
    floor: float = 1e-4

    def __call__(self, batch: Batch) -> Tensor:
        rewards = batch.rewards.double()
        scores = group_scores(rewards, batch.group_index, self.floor)
        lead = rewards - reference_rewards(batch).to(rewards.dtype)
        return (scores + lead.clamp(-self.low, self.high)).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="aapo",
    title="AAPO: Enhance the Reasoning Capabilities of LLMs with Advantage Momentum",
    acronym="AAPO",
    arxiv="2505.14264",
    verification="code",  # JianxXiong/AAPO
    advantage=ReferenceMomentum(),
    ratio=NoRatio(),
    weight=Likelihood(),
    aggregate=TokenMean(),
)
