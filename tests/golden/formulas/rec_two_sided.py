"""arXiv:2509.24203: token mean of -M A log pi, M = .8 <= r <= 1.2; A the reward minus the group's mean."""

import math

from golden_case import Case, Tensor, log_ratio, mean, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        advantage = 0.0 if max(group.rewards) == min(group.rewards) else response.reward - mean(group.rewards)
        for token in response.tokens:
            ratio = math.exp(log_ratio(token, token.mu).item())
            if 0.8 <= ratio <= 1.2:
                total = total - advantage * token.logp / case.num_tokens
    return total
