"""arXiv:2510.18927, released code: lower bound first, unweighted pos/neg against 1, dual clip 3, token mean."""

import math

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero

NUM_SEEDS = 16  # so that the search stops midway in some
INERT = {"weight.low_step": "a higher lower bound only adds to the negatives, so it never stops before 0.8"}


def loss(case: Case) -> Tensor:
    tokens = [
        (log_ratio(token, token.mu).exp(), z_score(group, place, 1e-6))
        for group, place, response in case
        for token in response.tokens
    ]

    def quotient(low: float, high: float) -> float:
        effective = [(min(r.item(), high) if a >= 0 else max(r.item(), low)) * a for r, a in tokens]
        positive, negative = sum(max(e, 0.0) for e in effective), sum(max(-e, 0.0) for e in effective)
        return math.inf if negative == 0 else positive / (negative + 1e-8)

    low, high = 0.6, 1.2
    while quotient(low, high) < 1.0 and low < 0.8:
        low = min(low + 0.05, 0.8)
    while quotient(low, high) < 1.0 and high < 2.0:
        high = min(high + 0.05, 2.0)
    total = zero()
    for ratio, advantage in tokens:
        term = -ppo_min(ratio, advantage, low, high)
        if advantage < 0 and term.item() > -3.0 * advantage:
            term = zero() + -3.0 * advantage
        total = total + term / case.num_tokens
    return total
