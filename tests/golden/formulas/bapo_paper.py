"""arXiv:2510.18927, Algorithm 1: upper bound first, share weighted by the sampling probability, target .4, token
mean.
"""

import math

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero

NUM_SEEDS = 16  # so that the search stops midway in some


def loss(case: Case) -> Tensor:
    tokens = [
        (log_ratio(token, token.mu).exp(), z_score(group, place, 1e-6), math.exp(token.mu))
        for group, place, response in case
        for token in response.tokens
    ]

    def share(low: float, high: float) -> float:
        def term(ratio: float, advantage: float, lower: float) -> float:
            return abs(min(ratio * advantage, max(lower, min(ratio, high)) * advantage))

        positive = sum(p * term(r.item(), a, 0.0) for r, a, p in tokens if a > 0)
        everything = sum(p * term(r.item(), a, low if a < 0 else 0.0) for r, a, p in tokens)
        return positive / everything if everything > 0 else 1.0

    low, high = 0.6, 1.2
    while share(low, high) < 0.4 and low + 0.02 <= 0.9 + 1e-9:
        if high + 0.05 <= 3.0 + 1e-9:
            high += 0.05
        else:
            low += 0.02
    total = zero()
    for ratio, advantage, _ in tokens:
        total = total - ppo_min(ratio, advantage, low, high) / case.num_tokens
    return total
