"""arXiv:2505.20686: (1/N) sum_i (b2 log(pi(y)/pi_ref(y)) - (R - V))^2, V = .5 log mean exp(R_ref / .5), b2 .001."""

import math

from golden_case import Case, Tensor, log_ratio, mean, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        value = 0.5 * math.log(mean([math.exp(member.reference_reward / 0.5) for member in group.members]))
        moved = zero()
        for token in response.tokens:
            moved = moved + log_ratio(token, token.ref)
        total = total + (1e-3 * moved - (response.reward - value)) ** 2 / case.num_responses
    return total
