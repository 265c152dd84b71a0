"""arXiv:2601.22718: token mean of -sg[clip(min_{j<t} r_j * r_t, 0, 2)] A log pi; 1 for the empty prefix."""

import math

from golden_case import Case, Tensor, log_ratio, z_score, zero

INERT = {"weight.low up": "a ratio is never below 0"}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        ratios: list[float] = []
        for token in response.tokens:
            ratios.append(math.exp(log_ratio(token, token.mu).item()))
            weight = min(2.0, max(0.0, min(ratios[:-1], default=1.0) * ratios[-1]))
            total = total - weight * advantage * token.logp / case.num_tokens
    return total
