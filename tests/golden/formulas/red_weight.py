"""arXiv:2509.24203, w = exp(A / temp): token mean of -exp(A) A log pi; A the reward minus the group's mean."""

import math

from golden_case import Case, Tensor, mean, zero

INERT = {"ratio swapped": "its weight takes the log-probs, no ratio"}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        advantage = 0.0 if max(group.rewards) == min(group.rewards) else response.reward - mean(group.rewards)
        for token in response.tokens:
            total = total - math.exp(advantage) * advantage * token.logp / case.num_tokens
    return total
