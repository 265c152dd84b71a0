"""arXiv:2512.06547, log-linear: log pi_prox = log mu + age/(age+1) (log pi - log mu), constant; decoupled PPO,
token mean.
"""

import math

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        alpha = response.age / (response.age + 1)
        for token in response.tokens:
            drift = log_ratio(token, token.mu)
            proximal = alpha * drift.item()  # above log mu
            term = ppo_min((drift - proximal).exp(), z_score(group, place, 1e-6), 0.8, 1.2)
            total = total - math.exp(proximal) * term / case.num_tokens
    return total
