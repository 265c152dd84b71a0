"""arXiv:2601.22718, exact weight: token mean of -sg[clip(prod_{j<=t} r_j, 0, 2)] A log pi."""

import math

from golden_case import Case, Tensor, log_ratio, z_score, zero

INERT = {"weight.low up": "a ratio is never below 0"}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        whole = 0.0
        for token in response.tokens:
            whole += log_ratio(token, token.mu).item()
            weight = min(2.0, math.exp(min(20.0, max(-20.0, whole))))
            total = total - weight * z_score(group, place, 1e-6) * token.logp / case.num_tokens
    return total
