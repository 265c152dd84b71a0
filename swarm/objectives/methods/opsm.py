"""OPSM: negative responses that have become much less likely are dropped; positive responses always count.

    GRPO without responses that have A < 0 and mean(log mu - log pi) over .5

DeepSeek-V3.2 combines the mask with other measures. Ours: plain GRPO around the mask. The limit 0.5 is TRL's
suggestion.
"""

from torch import Tensor

from swarm.objectives.part import CorrectionPart, Scope, Scored
from swarm.objectives.parts import AgainstPolicy, Clip, GroupZScore, RolloutMean, TokenRatio, log_ratio, rollout_mean
from swarm.objectives.recipe import Recipe


class OffPolicySequenceMask(AgainstPolicy, CorrectionPart):
    """Drops tokens with a negative advantage in responses that have become much less likely than at sampling."""

    equation = "L_t <- M L_t, M = 0 if A < 0 and mean_t(log mu_t - log pi_t) > limit"
    scope = Scope.ROLLOUT
    limit: float = 0.5  # nats per token

    def __call__(self, scored: Scored) -> Tensor:
        ratios = log_ratio(scored.logprobs.detach(), self.denominator(scored), scored.mask)
        is_left = rollout_mean(-ratios, scored.mask) > self.limit
        return (~((scored.advantages < 0) & is_left)).to(scored.advantages.dtype)


RECIPE = Recipe(
    name="opsm",
    title="DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models",
    acronym="OPSM",
    arxiv="2512.02556",
    verification="code",  # TRL `off_policy_mask_threshold`
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    corrections=(OffPolicySequenceMask(limit=0.5),),
    aggregate=RolloutMean(),
)
