"""arXiv:2506.13585: token mean of -sg[clip(r, 0, 1.28)] A log pi, group z-score."""

import math

from golden_case import Case, Tensor, log_ratio, z_score, zero

INERT = {"weight.low up": "a ratio is never below 0"}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            weight = min(1.28, math.exp(log_ratio(token, token.mu).item()))
            total = total - weight * advantage * token.logp / case.num_tokens
    return total
