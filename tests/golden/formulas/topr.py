"""arXiv:2503.14286, eq. 8: (1/N) sum_i of -w_i A_i sum_t log pi; w 1 for A > 0, else the product of ratios, in [0,
1].
"""

import math

from golden_case import Case, Tensor, log_ratio, mean, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        advantage = 0.0 if max(group.rewards) == min(group.rewards) else response.reward - mean(group.rewards)
        log_weight = sum(log_ratio(token, token.mu).item() for token in response.tokens)
        weight = 1.0 if advantage > 0 else math.exp(min(log_weight, 0.0))
        for token in response.tokens:
            total = total - weight * advantage * token.logp / case.num_responses
    return total
