"""Entry 2.16: token mean of |(r - tgt) A|, tgt = .8 + .4 sigmoid((R - median) / (std + 1e-6) / 1e-4)."""

import math
import statistics

from golden_case import Case, Group, Tensor, log_ratio, std, z_score, zero

INERT = {
    "weight.temperature": "rewards here differ by far more than 1e-4; the unit test of the target covers it",
    "weight.floor": "any target is saturated at temperature 1e-4; the unit test of the target covers it",
}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            gap = log_ratio(token, token.mu).exp() - target(group, response.reward)
            total = total + (gap * advantage).abs() / case.num_tokens
    return total


def target(group: Group, reward: float) -> float:
    lead = (reward - statistics.median(group.rewards)) / (std(group.rewards) + 1e-6) / 1e-4
    return 0.8 + 0.4 * (1.0 if lead > 40 else 0.0 if lead < -40 else 1 / (1 + math.exp(-lead)))
