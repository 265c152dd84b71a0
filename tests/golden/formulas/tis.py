"""https://fengyao.notion.site/off-policy-rl: min(pi_old/mu, 2) on PPO's clip around pi_old, token mean."""

import math

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            rho = math.exp(min(20.0, max(-20.0, token.old - token.mu)))
            term = ppo_min(log_ratio(token, token.old).exp(), advantage, 0.8, 1.2)
            total = total - min(rho, 2.0) * term / case.num_tokens
    return total
