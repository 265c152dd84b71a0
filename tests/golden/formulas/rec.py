"""arXiv:2509.24203: token mean of -M A log pi, M = r <= 1.2 for A >= 0, r >= .8 for A <= 0; A group-centred."""

import math

from golden_case import Case, Tensor, log_ratio, mean, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        advantage = 0.0 if max(group.rewards) == min(group.rewards) else response.reward - mean(group.rewards)
        for token in response.tokens:
            ratio = math.exp(log_ratio(token, token.mu).item())
            if (advantage >= 0 and ratio <= 1.2) or (advantage <= 0 and ratio >= 0.8):
                total = total - advantage * token.logp / case.num_tokens
    return total
