"""DHPO with averaged mixing: half GRPO's clipped token surrogate, half GSPO's, each in its own trust region.

    half GRPO's clipped term (.2), half GSPO's (3e-4 / 4e-4)

Written without the text of the paper. Ours: equal shares, the intervals of GRPO and GSPO, and mixing of surrogate terms
rather than of ratios; share 1 is exactly GRPO, share 0 exactly GSPO.

Mechanism: token sequence mix.
"""

from dataclasses import replace

from torch import Tensor

from swarm.objectives.part import Positive, Scope, Scored, Share, TokenLosses, WeightPart
from swarm.objectives.parts import GroupZScore, RolloutMean, TokenRatio, clip_surrogate, on_tokens, rollout_mean
from swarm.objectives.recipe import Recipe


class _Branches(WeightPart):
    scope = Scope.ROLLOUT
    token_low: float = 0.2  # half-widths
    token_high: float = 0.2
    sequence_low: float = 3e-4
    sequence_high: float = 4e-4

    def mixed(self, scored: Scored, share: Tensor | float) -> TokenLosses:
        """Returns the mix, with `share` (a number or [N, L]) of the token branch; bounded if both branches are."""
        mean = rollout_mean(scored.log_ratio.detach(), scored.mask)
        whole = on_tokens(mean, scored.logprobs, scored.mask)
        token = clip_surrogate(scored.log_ratio, scored.advantages, 1 - self.token_low, 1 + self.token_high)
        sequence = clip_surrogate(whole, scored.advantages, 1 - self.sequence_low, 1 + self.sequence_high)
        losses = share * token.losses + (1 - share) * sequence.losses
        return TokenLosses(losses=losses, bounded=token.bounded & sequence.bounded)


class BranchClip(_Branches):
    """Averaged mixing: a constant share of the token branch, the rest of the sequence branch."""

    equation = "L_t = share L(r_t, token clip) + (1 - share) L(s_i, sequence clip), L = PPO's minimum"
    share: Share = 0.5

    def __call__(self, scored: Scored) -> TokenLosses:
        return self.mixed(scored, self.share)


class EntropyBranchClip(_Branches):
    """Entropy-guided mixing: the more uncertain the policy is at a token, the more the token's own ratio counts."""

    equation = "L_t = a_t L(r_t, token clip) + (1 - a_t) L(s_i, sequence clip), a_t = sg[H_t/(H_t + half)]"
    half: Positive = 1.0  # nats at which both branches count the same

    def __call__(self, scored: Scored) -> TokenLosses:
        entropy = scored.entropy.detach().clamp(min=0)
        return self.mixed(scored, entropy / (entropy + self.half))


RECIPE = Recipe(
    name="dhpo",
    title="Orchestrating Tokens and Sequences: Dynamic Hybrid Policy Optimization for RLVR",
    acronym="DHPO",
    arxiv="2601.05607",
    verification="secondary",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=BranchClip(),
    aggregate=RolloutMean(),
)

DHPO_ENTROPY = replace(
    RECIPE,
    name="dhpo_entropy",
    acronym="DHPO-entropy",
    about="DHPO with entropy-guided mixing: uncertain tokens count by their own ratio, certain ones by the "
    "response's. The text is not at hand. Ours: the share H/(H + 1 nat) of the token branch, its direction "
    "included, the intervals of GRPO and GSPO, and that surrogate terms are mixed rather than ratios. "
    "Formula: share H/(H+1) of GRPO's clipped term (.2), the rest of GSPO's (3e-4 / 4e-4).",
    weight=EntropyBranchClip(),
)
