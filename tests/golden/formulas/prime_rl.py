"""https://github.com/PrimeIntellect-ai/prime-rl, prime-rl default: token mean of -M r A + 1e-3 (log r)^2, M by p -
p_mu beyond .2 where A pushes to.
"""

import math

from golden_case import Case, Tensor, log_ratio, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            d = log_ratio(token, token.mu)
            moved = math.exp(min(0.0, token.logp.item())) - math.exp(token.mu)
            total = total + 1e-3 * d**2 / case.num_tokens
            if not ((moved > 0.2) if advantage > 0 else (moved < -0.2)):
                total = total - d.exp() * advantage / case.num_tokens
    return total
