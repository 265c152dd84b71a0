"""Sequence ratio (GSPO): one length-normalised ratio for each response, clipped as a whole.

    -(1/N) sum_i min(s A, clip(s, 1-3e-4, 1+4e-4) A), s = exp(mean log-ratio), its log at most 10

The clip acts on responses, so its half-widths are about a thousandth of those of token methods.
"""

from dataclasses import replace

from torch import Tensor

from swarm.objectives.part import RatioPart, Scope, Scored
from swarm.objectives.parts import AgainstPolicy, Clip, GroupZScore, RolloutMean, SequenceRatio
from swarm.objectives.parts.ratio import LOG_RATIO_BOUND, Ceiling, on_tokens, rollout_mean
from swarm.objectives.recipe import Recipe


class SequenceTokenRatio(AgainstPolicy, RatioPart):
    """The length-normalised ratio of a response in value, with the gradient of the token alone."""

    equation = "r_t = exp(min(log sg[s_i] + log pi_t - sg[log pi_t], ceiling))"
    scope = Scope.ROLLOUT
    ceiling: Ceiling = 10.0  # of log s; above it a rollout has no gradient

    def __call__(self, scored: Scored) -> Tensor:
        mean = rollout_mean(scored.logprobs.detach() - self.denominator(scored), scored.mask)
        return on_tokens(mean, scored.logprobs, scored.mask).clamp(-LOG_RATIO_BOUND, self.ceiling)


RECIPE = Recipe(
    name="gspo",
    title="Group Sequence Policy Optimization",
    acronym="GSPO",
    arxiv="2507.18071",
    verification="code",  # verl `compute_policy_loss_gspo`
    advantage=GroupZScore(),
    ratio=SequenceRatio(),
    weight=Clip(low=3e-4, high=4e-4),
    aggregate=RolloutMean(),
)

GSPO_TOKEN = replace(
    RECIPE,
    name="gspo_token",
    acronym="GSPO-token",
    about="Sequence ratio token (GSPO-token): the response's ratio as the value, the token's own log-probability as "
    "the gradient. Equals GSPO in value and gradient while all tokens of a response share one advantage; with "
    "token advantages (shapers) it is the form to use. verl's `gspo` is this one. Formula: (1/N) sum_i "
    "(1/|o_i|) sum_t -min(s_t A, clip(s_t) A), s_t = sg[s_i] pi / sg[pi], its log at most 10.",
    ratio=SequenceTokenRatio(),
)
