"""https://richardli.xyz/rl-collapse: (1/N) sum of -sg[min(prod_t pi/mu, 2)] A log pi."""

import math

from golden_case import Case, Tensor, log_ratio, z_score, zero

INERT = {"weight.low up": "a ratio is never below 0"}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        whole = sum(log_ratio(token, token.mu).item() for token in response.tokens)
        weight = min(2.0, math.exp(min(20.0, max(-20.0, whole))))
        for token in response.tokens:
            total = total - weight * z_score(group, place, 1e-6) * token.logp / case.num_responses
    return total
