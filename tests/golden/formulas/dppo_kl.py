"""arXiv:2602.04879, binary KL: -M sg[min(r, 20)] A log pi, M by KL(mu || pi) of the token against the rest, bound
.05.
"""

import math

from golden_case import Case, Tensor, log_ratio, z_score, zero

INERT = {"weight.low up": "a ratio is never below 0"}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            log_p = min(0.0, token.logp.item())
            p, p_mu = math.exp(log_p), math.exp(token.mu)
            rest, rest_mu = 1e-8 - math.expm1(log_p), 1e-8 - math.expm1(token.mu)
            divergence = p_mu * (token.mu - log_p) + (1 - p_mu) * math.log(rest_mu / rest)
            if divergence > 0.05 and (p > p_mu if advantage > 0 else p < p_mu):
                continue
            weight = min(20.0, math.exp(log_ratio(token, token.mu).item()))
            total = total - weight * advantage * token.logp / case.num_tokens
    return total
