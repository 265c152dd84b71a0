"""Ours: ratios of segments, of tokens where there is none."""

import math

from golden_case import Case, Response, clip, z_score, zero
from torch import Tensor


def weight(response: Response, segment: int) -> float:
    """min(prod pi / prod mu, 2) of one segment."""
    members = [token for token in response.tokens if token.segment == segment]
    ours = math.fsum(token.logp.item() for token in members)
    theirs = math.fsum(token.sent for token in members)
    return math.exp(min(max(ours - theirs, -20.0), math.log(2.0)))


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        for token in response.tokens:
            if token.segment >= 0:
                ratio = weight(response, token.segment)
            else:
                ratio = math.exp(clip(token.logp.detach() - token.mu, -20.0, math.log(2.0)).item())
            own = (token.logp - token.logp.detach()).exp()
            total = total - ratio * own * z_score(group, place, 1e-6)
    return total / case.num_tokens
