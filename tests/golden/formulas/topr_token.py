"""arXiv:2503.14286, code: token mean of -alpha_t A log pi; alpha 1 for R > .5 (ours; 0), else min(r_t, 1)."""

import math

from golden_case import Case, Tensor, log_ratio, mean, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        advantage = 0.0 if max(group.rewards) == min(group.rewards) else response.reward - mean(group.rewards)
        for token in response.tokens:
            alpha = 1.0 if response.reward > 0.5 else min(math.exp(log_ratio(token, token.mu).item()), 1.0)
            total = total - alpha * advantage * token.logp / case.num_tokens
    return total
