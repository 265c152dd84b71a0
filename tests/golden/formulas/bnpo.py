"""arXiv:2506.02864: A = (R - p) / Beta(p; 1 + a/3, 1 + b/3), rewards in [0, 1]; clip .2, token mean."""

import math
from collections.abc import Callable

from golden_case import Case, Group, Tensor, log_ratio, mean, ppo_min, std, zero


def unit(reward: float) -> float:
    return min(1.0, max(0.0, reward))


def fitted(groups: list[Group]) -> Callable[[float], float]:
    rates = [mean([unit(reward) for reward in group.rewards]) for group in groups]
    if max(rates) - min(rates) < 1e-9:
        return lambda p: 1.0
    m, v = mean(rates), std(rates) ** 2
    a, b = (m * (1 - m) / v - 1) * m, (m * (1 - m) / v - 1) * (1 - m)
    alpha, beta = max(1 + a / 3, 1.0), max(1 + b / 3, 1.0)
    constant = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    return lambda p: math.exp(constant) * p ** (alpha - 1) * (1 - p) ** (beta - 1)


def loss(case: Case) -> Tensor:
    total = zero()
    density = fitted(case.groups)
    for group, _, response in case:
        p = mean([unit(reward) for reward in group.rewards])
        advantage = 0.0
        if max(group.rewards) > min(group.rewards):
            advantage = (unit(response.reward) - p) * min(1e6, 1 / density(p))
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
