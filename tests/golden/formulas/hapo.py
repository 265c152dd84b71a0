"""arXiv:2509.16591: dual-clipped PPO with bounds and advantages by the place of the log-entropy, token mean."""

import math
from functools import partial

from golden_case import Case, Group, Tensor, log_ratio, ppo_min, z_score, zero

NUM_SEEDS = 4


def loss(case: Case, limit: float = 5.0) -> Tensor:
    tokens = [(token, token_score(group, place, limit)) for group, place, response in case for token in response.tokens]
    logs = [math.log(max(token.entropy.item(), 1e-8)) for token, _ in tokens]
    pivot = sorted(logs)[round(0.8 * (len(logs) - 1))]
    most, least = max(logs) - pivot, pivot - min(logs)
    total = zero()
    for (token, advantage), log in zip(tokens, logs, strict=True):
        place = (log - pivot) / most if log > pivot else (log - pivot) / least if log < pivot else 0.0
        low = 0.2 * (1 - place) if place <= 0 else 0.2
        high = 0.2 * (1 + place) if place > 0 else 0.2
        ratio = log_ratio(token, token.mu).exp()
        inside = 1 - low / 2 < ratio.item() < 1 + high / 2
        if inside != (place > 0):
            advantage = advantage * (1 + place)
        term = -ppo_min(ratio, advantage, 1 - low, 1 + high)
        if advantage < 0 and term.item() > -10.0 * advantage:
            term = zero() - 10.0 * advantage
        total = total + term / case.num_tokens
    return total


def token_score(group: Group, place: int, limit: float) -> float:
    if max(group.rewards) == min(group.rewards):
        return 0.0
    values = [member.reward for member in group.members for _ in member.tokens]
    centre = sum(values) / len(values)
    spread = math.sqrt(sum((value - centre) ** 2 for value in values) / len(values))
    scores = [(reward - centre) / (spread + 1e-6) for reward in group.rewards]
    return z_score(group, place, 1e-6) if max(abs(score) for score in scores) >= limit else scores[place]


VARIANTS = [({"advantage.limit": 2.0}, partial(loss, limit=2.0))]  # no score reaches 5 in groups of so few tokens
