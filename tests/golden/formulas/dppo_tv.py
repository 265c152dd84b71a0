"""arXiv:2602.04879, binary TV: -M sg[min(r, 20)] A log pi, M by p - p_mu beyond .15 where A pushes to, token mean."""

import math

from golden_case import Case, Tensor, log_ratio, z_score, zero

INERT = {"weight.low up": "a ratio is never below 0"}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            moved = math.exp(min(0.0, token.logp.item())) - math.exp(token.mu)
            if (moved > 0.15) if advantage > 0 else (moved < -0.15):
                continue
            weight = min(20.0, math.exp(log_ratio(token, token.mu).item()))
            total = total - weight * advantage * token.logp / case.num_tokens
    return total
