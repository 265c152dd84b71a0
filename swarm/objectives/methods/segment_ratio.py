"""Correction across tokenizers (ours): the ratio of text segments whose borders are token borders of both tokenizers.

    ratios of segments; of tokens for rollouts of our own tokenizer

A rollout of another tokenizer is re-encoded; the log-probs of its generator and our own are summed between bytes at
which tokens of both end. The ratio is capped as in truncated importance sampling, because a segment's ratio is a
product over tokens. Rollouts of our own tokenizer have token ratios. No benchmark supports the method yet, so it is no
default: see docs/recipes.md for the bias and `learner.recipe_text_only` for the use.
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from swarm.objectives.part import Bound, RatioPart, Requirement, Scope, Scored, on_mask
from swarm.objectives.parts import GroupZScore, Surrogate, TokenMean
from swarm.objectives.parts.ratio import LOG_RATIO_BOUND, log_ratio, on_tokens, rollout_sum
from swarm.objectives.recipe import Recipe


def segment_sum(values: Tensor, segment_ids: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` over the tokens of the same rollout and segment: [N, L]; 0 for tokens without a segment.

    Args:
        values: [N, L].
        segment_ids: int64 [N, L], below L; negative for tokens without a segment.
        mask: bool [N, L], True on tokens that count.
    """
    place = segment_ids.clamp(min=0)
    counts = mask & (segment_ids >= 0)
    kept = torch.where(counts, values, torch.zeros_like(values))
    totals = torch.zeros_like(kept).scatter_add(1, place, kept).gather(1, place)
    return torch.where(segment_ids >= 0, totals, torch.zeros_like(totals))


class SegmentRatio(RatioPart):
    """The ratio of the shortest segment of text whose borders are token borders of both tokenizers.

    Every token of a segment has the segment's ratio, with the gradient of the token alone. With equal tokenizers,
    segments are tokens. If the byte lengths of the generator's tokens are unknown, or its tokens differ from the
    canonical encoding of its text, the ratio is 1, as in swarm sampling.

    Source: ours. Only the canonical tokenisations are compared, where the true ratio of a text sums over all of
    them; docs/recipes.md has the bias, measured by enumeration.
    """

    equation = (
        "r_t = sg[w_k] pi_t / sg[pi_t], w_k = exp(min(sum_{s in k} log pi_s - sum_{u in k} log mu_u, log cap)), "
        "segment k of t (by_response: all of them)"
    )
    scope = Scope.ROLLOUT
    always_needs = frozenset({Requirement.SEGMENT_LOGPROBS})
    cap: Annotated[float, Bound(at_least=1, at_most=math.exp(LOG_RATIO_BOUND))] = 2.0  # of w
    by_response: bool = False  # one segment, the whole response: the coarsest

    def __call__(self, scored: Scored) -> Tensor:
        drift = self._drift(scored)
        if self.by_response:
            drift = on_mask(rollout_sum(drift, scored.mask), scored.mask)
        bounded = drift.clamp(-LOG_RATIO_BOUND, math.log(self.cap))
        return on_tokens(bounded, scored.logprobs, scored.mask)

    def _drift(self, scored: Scored) -> Tensor:
        """Log-ratio [N, L] of each token's segment; if `by_response`, each token's own share of the log-ratio."""
        batch, mask = scored.batch, scored.mask
        logprobs = scored.logprobs.detach()
        exact = log_ratio(logprobs, scored.behavior, mask & batch.has_logprobs[:, None])
        if batch.segment_ids is None or batch.segment_logprobs is None:
            return exact
        ids, ones = batch.segment_ids, torch.ones_like(logprobs)
        is_whole = segment_sum(ones, ids, mask) == segment_sum(ones, ids, torch.ones_like(mask))  # no token was dropped
        difference = logprobs - batch.segment_logprobs.to(logprobs.dtype)
        known = (ids >= 0) & is_whole & mask
        summed = torch.where(known, difference, torch.zeros_like(difference))
        if not self.by_response:
            summed = segment_sum(summed, ids, mask)
        return torch.where(ids >= 0, torch.where(known, summed, torch.zeros_like(summed)), exact)


RECIPE = Recipe(
    name="segment_ratio",
    title="Correction across tokenizers",
    verification="ours",
    advantage=GroupZScore(),
    ratio=SegmentRatio(cap=2.0),
    weight=Surrogate(),
    aggregate=TokenMean(),
)
