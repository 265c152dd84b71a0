"""arXiv:2305.14718: (1/N) sum_i of -max(R - V, 0) sg[clip(pi(y)/pi_ref(y), .1, 1.9)] sum_t log pi; V the mean of
R_ref.
"""

import math

from golden_case import Case, Tensor, log_ratio, mean, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        lead = max(response.reward - mean([member.reference_reward for member in group.members]), 0.0)
        whole = sum(log_ratio(token, token.ref).item() for token in response.tokens)
        weight = max(0.1, min(1.9, math.exp(min(whole, 50.0))))
        for token in response.tokens:
            total = total - lead * weight * token.logp / case.num_responses
    return total
