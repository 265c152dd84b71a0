"""arXiv:2405.11143, seq-mask-tis: rho on PPO's clip around pi_old, exp(mean log rho) in [.5, 5], token mean."""

import math

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        mismatch = [min(20.0, max(-20.0, token.old - token.mu)) for token in response.tokens]
        if not 0.5 <= math.exp(sum(mismatch) / len(mismatch)) <= 5.0:
            continue
        for place_of, token in enumerate(response.tokens):
            term = ppo_min(log_ratio(token, token.old).exp(), advantage, 0.8, 1.2)
            total = total - math.exp(mismatch[place_of]) * term / case.num_tokens
    return total
