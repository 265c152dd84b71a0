"""arXiv:2510.01161, released code: harmful mean of min(d^2, tau^2) at most .04, tau one of the data, token mean."""

import math
from functools import partial

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case, budget: float = 0.04) -> Tensor:
    tokens = [
        (log_ratio(token, token.mu), z_score(group, place, 1e-6))
        for group, place, response in case
        for token in response.tokens
    ]
    harmful = sorted(d.item() ** 2 for d, a in tokens if (a > 0 and d.item() > 0) or (a < 0 and d.item() < 0))
    low, high = 0.0, math.inf
    if harmful and sum(harmful) / len(harmful) > budget:
        largest = 0.0
        for candidate in harmful:
            if sum(min(square, candidate) for square in harmful) / len(harmful) > budget:
                break
            largest = candidate
        low, high = min(math.exp(-math.sqrt(largest)), 0.7), max(math.exp(math.sqrt(largest)), 1.5)
    total = zero()
    for d, advantage in tokens:
        total = total - ppo_min(d.exp(), advantage, low, high) / case.num_tokens
    return total


VARIANTS = [({"weight.budget": 0.4}, partial(loss, budget=0.4))]  # where the interval is wider than its least
