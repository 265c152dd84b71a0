"""arXiv:2604.18578: token mean of |(r - tgt) A|, tgt = .8 + .4 sigmoid((R - median) / (std + 1e-6) / 1e-4)."""

import math
import statistics
from functools import partial

from golden_case import Case, Group, Tensor, log_ratio, std, z_score, zero


def loss(case: Case, temperature: float = 1e-4, floor: float = 1e-6) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            gap = log_ratio(token, token.mu).exp() - target(group, response.reward, temperature, floor)
            total = total + (gap * advantage).abs() / case.num_tokens
    return total


def target(group: Group, reward: float, temperature: float, floor: float) -> float:
    lead = (reward - statistics.median(group.rewards)) / (std(group.rewards) + floor) / temperature
    return 0.8 + 0.4 * (1.0 if lead > 40 else 0.0 if lead < -40 else 1 / (1 + math.exp(-lead)))


VARIANTS = [
    ({"weight.temperature": 0.5, "weight.floor": 0.1}, partial(loss, temperature=0.5, floor=0.1))
]  # at 1e-4 every target is saturated
