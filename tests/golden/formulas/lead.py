"""arXiv:2605.09806, (sym): z-scores of R and of closeness to L*, proportion by EMA, whitened; clip .2/.28, token
mean.
"""

import math
from functools import partial

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, std, zero

MEMORY = {"LengthBalance": {"weight": 0.32}}


def population_variance(values: list[float]) -> float:
    return mean([(value - mean(values)) ** 2 for value in values])


def z_scores(values: list[float]) -> list[float]:
    if max(values) == min(values):
        return [0.0] * len(values)
    return [(value - mean(values)) / (std(values) + 1e-6) for value in values]


def spread_over_mean(groups: list[list[float]]) -> tuple[float, float]:
    """(coefficient of variation, mean): variance within plus between groups."""
    means = [mean(group) for group in groups]
    sigma = math.sqrt(mean([population_variance(group) for group in groups]) + population_variance(means) + 1e-8)
    return sigma / (abs(mean(means)) + 1e-8), mean(means)


def loss(case: Case, least: float = 0.125, least_weight: float = 0.3) -> Tensor:
    rewards, closeness, of_successes = [], [], []
    for group in case.groups:
        lengths = [len(member.tokens) for member in group.members]
        right = [length for length, reward in zip(lengths, group.rewards, strict=True) if reward > 0.5]
        limit = group.members[0].limit
        target = min(max(mean(right), least * limit), limit) if right else limit
        near = [max(-1.0, 1 - abs(length - target) / target) for length in lengths]
        rewards.append(group.rewards)
        closeness.append(near)
        of_successes.append([e for e, reward in zip(near, group.rewards, strict=True) if reward > 0.5])
    of_successes = [group for group in of_successes if group]
    variation, level = spread_over_mean(rewards)
    wanted = variation * (1 - min(max(level, 0.0), 1.0))
    other = 0.0
    if of_successes:
        other_variation, other_level = spread_over_mean(of_successes)
        other = other_variation * (1 - (other_level + 1) / 2)
    share = wanted / (wanted + other) if wanted + other > 0 else 0.0
    weight = max(least_weight, 0.95 * case.memory["LengthBalance"]["weight"] + 0.05 * share)
    scores = [
        weight * r + (1 - weight) * e
        for group, near in zip(rewards, closeness, strict=True)
        for r, e in zip(z_scores(group), z_scores(near), strict=True)
    ]
    responses = [response for _, _, response in case]
    spread = [score for score, response in zip(scores, responses, strict=True) for _ in response.tokens]
    total = zero()
    for score, response in zip(scores, responses, strict=True):
        advantage = (score - mean(spread)) / math.sqrt(std(spread) ** 2 + 1e-8)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.28) / case.num_tokens
    return total


VARIANTS = [
    (
        {"advantage.least": 0.6, "advantage.least_weight": 0.5},
        partial(loss, least=0.6, least_weight=0.5),
    )
]  # where both bounds hold
