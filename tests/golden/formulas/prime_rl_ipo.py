"""https://github.com/PrimeIntellect-ai/prime-rl, prime-rl IPO: token mean of -r A where |p - p_mu| <= .1, + 1e-3
(log r)^2 on every token.
"""

import math

from golden_case import Case, Tensor, log_ratio, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        for token in response.tokens:
            d = log_ratio(token, token.mu)
            total = total + 1e-3 * d**2 / case.num_tokens
            if abs(math.exp(min(0.0, token.logp.item())) - math.exp(token.mu)) <= 0.1:
                total = total - d.exp() * z_score(group, place, 1e-6) / case.num_tokens
    return total
