"""arXiv:2602.10693: token mean of -sg[w^k exp(lambda (1 - w))] A log pi, w the product; k, lambda 2, 3 or (A < 0)
3, 2.
"""

import math

from golden_case import Case, Tensor, log_ratio, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        summed = sum(log_ratio(token, token.mu).item() for token in response.tokens)
        w = math.exp(min(20.0, max(math.log(1e-8), summed)))
        k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        for token in response.tokens:
            total = total - w**k * math.exp(rate * (1 - w)) * advantage * token.logp / case.num_tokens
    return total
