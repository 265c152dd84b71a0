"""https://richardli.xyz/rl-collapse, Geo-RS: PPO's clip around pi_old on responses with exp(mean log rho) in [.999,
1.001], token mean.
"""

import math

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        mismatch = [min(20.0, max(-20.0, token.old - token.mu)) for token in response.tokens]
        if not 0.999 <= math.exp(sum(mismatch) / len(mismatch)) <= 1.001:
            continue
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.old).exp(), advantage, 0.8, 1.2)
            total = total - term / case.num_tokens
    return total
