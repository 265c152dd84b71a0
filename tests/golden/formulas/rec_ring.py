"""arXiv:2509.24203: token mean of -M A log pi, M = .8 <= r <= 1.2, or r <= .4 and A >= 0, or r >= 3 and A <= 0; A
centred.
"""

import math

from golden_case import Case, Tensor, log_ratio, mean, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        advantage = 0.0 if max(group.rewards) == min(group.rewards) else response.reward - mean(group.rewards)
        for token in response.tokens:
            ratio = math.exp(log_ratio(token, token.mu).item())
            near = 0.8 <= ratio <= 1.2
            if near or (advantage >= 0 and ratio <= 0.4) or (advantage <= 0 and ratio >= 3.0):
                total = total - advantage * token.logp / case.num_tokens
    return total
