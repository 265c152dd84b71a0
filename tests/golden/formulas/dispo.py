"""arXiv:2602.00983: token mean of -sg[clip(r, .8, 11)] A log pi for A > 0, clip(r, 0, 101) for A < 0."""

import math

from golden_case import Case, Tensor, log_ratio, z_score, zero

INERT = {"weight.negative_low up": "a ratio is never below 0"}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            ratio = math.exp(log_ratio(token, token.mu).item())
            weight = min(max(ratio, 0.8), 11.0) if advantage > 0 else min(ratio, 101.0)
            total = total - weight * advantage * token.logp / case.num_tokens
    return total
