"""https://richardli.xyz/rl-collapse, K3-RS: PPO's clip around pi_old on responses with mean(rho - log rho - 1) at
most .01, token mean.
"""

import math

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        mismatch = [min(20.0, max(-20.0, token.old - token.mu)) for token in response.tokens]
        if sum(math.exp(each) - each - 1 for each in mismatch) / len(mismatch) > 0.01:
            continue
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.old).exp(), advantage, 0.8, 1.2)
            total = total - term / case.num_tokens
    return total
