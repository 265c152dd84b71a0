"""REINFORCE++: discounted returns with a KL penalty in the reward, whitened over all tokens of the step.

    returns of R minus .01 (log pi_old - log ref) at each token, masked-whitened over the step

No group is needed: the baseline is the mean of the step. The strength of the penalty is ours (0 turns it off).
"""

from dataclasses import replace

from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Requirement
from swarm.objectives.parts import Clip, TokenMean, TokenRatio, WhitenedReturn, group_centred, whitened
from swarm.objectives.recipe import Recipe


class WhitenedGroupCentred(AdvantagePart):
    """Reward minus the group's mean, whitened over the tokens of the step."""

    equation = "A = whiten_tokens(R_i - mean_G)"
    always_needs = frozenset({Requirement.ZERO_VARIANCE_GROUPS})  # their zeros are in the variance
    floor: float = 1e-8

    def __call__(self, batch: Batch) -> Tensor:
        centred = group_centred(batch.rewards.double(), batch.group_index)
        return whitened(centred[:, None].expand(batch.mask.shape), batch.mask, self.floor).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="reinforce_plus_plus",
    title="REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
    acronym="REINFORCE++",
    arxiv="2501.03262",
    verification="code",  # verl `compute_reinforce_plus_plus_outcome_advantage`, `.._baseline_outcome_advantage`
    advantage=WhitenedReturn(gamma=1.0, kl=0.01),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)

REINFORCE_PLUS_PLUS_BASELINE = replace(
    RECIPE,
    name="reinforce_plus_plus_baseline",
    acronym="REINFORCE++-baseline",
    about="Batch whitened baseline (REINFORCE++-baseline): rewards minus their group's mean, whitened over all "
    "tokens of the step. The paper adds a KL term to the loss; as in `grpo` it is left out. Formula: R - "
    "mean_G on every token, masked-whitened over the step, clip .2, token mean.",
    advantage=WhitenedGroupCentred(),
)
