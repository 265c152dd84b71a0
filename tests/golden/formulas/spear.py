"""arXiv:2509.22601: sum of two losses, fresh and replayed: (1/N) sum_i (1/limit) sum_t of PPO (.8, 1.28) each.

Left out: of fresh tokens the top .02 % of cov in (1, 5), of replayed ones the top 2 % of cov in (1, 40), each among
themselves. Fresh: A = R - mean_G. Ages 1 to 5: A = max(R - median of remembered group means, 0), times half a cosine.
"""

import math
from functools import partial

from golden_case import Case, Group, Tensor, log_ratio, mean, ppo_min, zero

MEMORY = {"RecalibratedReplay": {"means": [0.2, 0.6, 0.3, 0.5]}, "ReplayWarmup": {"step": 120}}
Rule = tuple[float, float, float]

INERT = {
    "advantage.history": "bounds what is remembered between steps; the unit test of observe covers it",
}


def loss(case: Case, max_age: int = 5, fresh: Rule = (2e-4, 1.0, 5.0), replay: Rule = (0.02, 1.0, 40.0)) -> Tensor:
    return of_kind(case, max_age, True, fresh) + 0.5 * (1 - math.cos(math.pi * 120 / 300)) * of_kind(
        case, max_age, False, replay
    )


def of_kind(case: Case, max_age: int, is_fresh: bool, rule: Rule) -> Tensor:
    share, least, most = rule
    members = [each for each in case if (each[2].age == 0) == is_fresh]
    tokens = [
        (token, advantage(group, place, max_age), response.limit)
        for group, place, response in members
        for token in response.tokens
    ]
    if not tokens:
        return zero()
    mean_advantage, mean_logp = mean([a for _, a, _ in tokens]), mean([t.logp.item() for t, _, _ in tokens])
    found: list[tuple[float, int]] = []
    for index, (token, a, _) in enumerate(tokens):
        covariance = (a - mean_advantage) * (token.logp.item() - mean_logp)
        ratio = log_ratio(token, token.mu).exp().item()
        clipped = (a > 0 and ratio > 1.28) or (a < 0 and ratio < 0.8)
        if least < covariance < most and not clipped:
            found.append((-covariance, index))
    dropped = {index for _, index in sorted(found)[: max(1, int(share * len(tokens)))]}
    total = zero()
    for index, (token, a, limit) in enumerate(tokens):
        if index not in dropped:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), a, 0.8, 1.28) / limit / len(members)
    return total


def advantage(group: Group, place: int, max_age: int) -> float:
    response = group.members[place]
    if response.age == 0:
        zero_variance = max(group.rewards) == min(group.rewards)
        return 0.0 if zero_variance else response.reward - mean(group.rewards)
    return max(response.reward - 0.4, 0.0) if response.age <= max_age else 0.0


VARIANTS = [
    (  # ages here are 0, 1, 4 and 64
        {
            "advantage.max_age": 3,
            "weight": {"share": 0.9, "least": 0.3, "most": 0.9},
            "weight.replay_share": 0.9,
            "weight.replay_least": 0.05,
            "weight.replay_most": 0.4,
        },
        partial(loss, max_age=3, fresh=(0.9, 0.3, 0.9), replay=(0.9, 0.05, 0.4)),
    ),
    (
        {
            "advantage.max_age": 4,
            "weight": {"share": 0.2, "least": 0.1, "most": 0.4},
            "weight.replay_share": 0.08,
            "weight.replay_least": 0.02,
            "weight.replay_most": 0.2,
        },
        partial(loss, max_age=4, fresh=(0.2, 0.1, 0.4), replay=(0.08, 0.02, 0.2)),
    ),
]
