"""arXiv:2510.14967: r_k = P_{k+1} - P_k, r_K = R; z over all turns of the group (biased deviation, 1e-8 in the
variance; 1 for a single turn), then returns without discount; clip .2, token mean.
"""

import math

from golden_case import Case, Group, Response, Tensor, log_ratio, mean, ppo_min, zero


def gains(member: Response) -> list[float]:
    rises = [after - before for before, after in zip(member.answers, member.answers[1:], strict=False)]
    return [*rises, member.reward]


def advantage(group: Group, response: Response, turn: int, gamma: float) -> float:
    every = [gain for member in group.members for gain in gains(member)]
    deviation = math.sqrt(mean([(gain - mean(every)) ** 2 for gain in every]) + 1e-8) if len(every) > 1 else 1.0
    scores = [(gain - mean(every)) / (deviation + 1e-6) for gain in gains(response)]
    return sum(gamma**later * score for later, score in enumerate(scores[turn:]))


def typed(case: Case, gamma: float) -> Tensor:
    total = zero()
    for group, _, response in case:
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.mu).exp(), advantage(group, response, token.turn, gamma), 0.8, 1.2)
            total = total - term / case.num_tokens
    return total


def loss(case: Case) -> Tensor:
    return typed(case, 1.0)


VARIANTS = [({"advantage.gamma": 0.5}, lambda case: typed(case, 0.5))]
