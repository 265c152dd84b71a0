"""Min prefix ratio (MinPRO): a token's ratio times the smallest ratio of its prefix, as a capped constant weight.

    token mean of -sg[clip(min_{j<t} r_j * r_t, 0, 2)] A log pi; 1 for the empty prefix

No token loses its gradient to the clip; only the weight is bounded. The paper's clip constants are not
known to us. Ours: no lower bound, cap 2.
"""

from dataclasses import replace

import torch
from torch import Tensor

from swarm.objectives.part import RatioPart, Scope, Scored, on_mask
from swarm.objectives.parts import LOG_RATIO_BOUND, AgainstPolicy, DetachedClip, GroupZScore, TokenMean, log_ratio
from swarm.objectives.recipe import Recipe


def prefix_minimum(ratios: Tensor, mask: Tensor) -> Tensor:
    """Smallest log-ratio [N, L] of the trained tokens strictly before each token, detached; 0 if there are none."""
    infinite = torch.full_like(ratios, torch.inf)
    known = torch.where(mask, ratios.detach(), infinite)
    shifted = torch.cat([infinite[:, :1], known[:, :-1]], dim=1)
    smallest = torch.cummin(shifted, dim=1).values
    return torch.where(torch.isinf(smallest), torch.zeros_like(smallest), smallest)


class PrefixMinimumRatio(AgainstPolicy, RatioPart):
    """A token's ratio times the smallest ratio of its strict prefix."""

    equation = "r_t <- r_t * sg[min_{j<t} r_j], 1 for an empty prefix"
    scope = Scope.ROLLOUT

    def __call__(self, scored: Scored) -> Tensor:
        ratios = log_ratio(scored.logprobs, self.denominator(scored), scored.mask)
        return ratios + on_mask(prefix_minimum(ratios, scored.mask), scored.mask)


class FullPrefixRatio(AgainstPolicy, RatioPart):
    """The ratio of a token times the ratios of all tokens before it: the exact weight of one decision in a sequence.

    Unbiased for a token's own reward; the variance grows with the token's position. Source: Precup et al. 2000.
    """

    equation = "r_t <- r_t * sg[prod_{j<t} r_j], the log of the product in [-20, 20]"
    scope = Scope.ROLLOUT

    def __call__(self, scored: Scored) -> Tensor:
        ratios = log_ratio(scored.logprobs, self.denominator(scored), scored.mask)
        before = ratios.detach().cumsum(dim=1) - ratios.detach()
        whole = (ratios + before).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return on_mask(whole, scored.mask)


RECIPE = Recipe(
    name="minpro",
    title="A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization",
    acronym="MinPRO",
    arxiv="2601.22718",
    verification="secondary",  # the value at the first token is the natural convention
    advantage=GroupZScore(),
    ratio=PrefixMinimumRatio(),
    weight=DetachedClip(low=1.0, high=1.0),
    aggregate=TokenMean(),
)

PREFIX_IS = replace(
    RECIPE,
    name="prefix_is",
    acronym="prefix IS",
    about="Full prefix ratio (Exact prefix weights): every token counts by the ratio of all tokens up to it, as a "
    "capped constant weight. What MinPRO approximates, and its negative result: the product drifts to 0 or to "
    "the cap along a long response. Ours: no lower bound, cap 2, as in `minpro`, to compare the two. Formula: "
    "token mean of -sg[clip(prod_{j<=t} r_j, 0, 2)] A log pi.",
    ratio=FullPrefixRatio(),
)
