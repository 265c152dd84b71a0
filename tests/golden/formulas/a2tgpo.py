"""arXiv:2605.06200: n_k = z of P_{k+1} - P_k among the group's turns k that are not last; A_k = z_G(R) + .3 sum n_j /
sqrt(terms); PPO's minimum of the turn ratio (log at most 10), half-widths 3e-3 / 4e-3 times
1 + .3 (2 sigmoid(n_k) - 1); rollout mean.
"""

import math

from golden_case import Case, Group, Response, Tensor, clip, mean, ppo_min, std, z_score, zero


def rise(member: Response, turn: int) -> float:
    return member.answers[turn + 1] - member.answers[turn]


def relative(group: Group, member: Response, turn: int) -> float:
    if turn >= member.num_turns - 1:
        return 0.0
    same = [rise(each, turn) for each in group.members if each.num_turns > turn + 1]
    return 0.0 if max(same) == min(same) else (rise(member, turn) - mean(same)) / (std(same) + 1e-6)


def advantage(group: Group, place: int, turn: int, gamma: float) -> float:
    member = group.members[place]
    terms = [gamma ** (later - turn) * relative(group, member, later) for later in range(turn, member.num_turns - 1)]
    return z_score(group, place, 1e-6) + 0.3 * sum(terms) / math.sqrt(max(1, len(terms)))


def typed(case: Case, gamma: float) -> Tensor:
    total = zero()
    for group, place, response in case:
        for token in response.tokens:
            turn = mean([other.logp.item() - other.mu for other in response.tokens if other.turn == token.turn])
            ratio = clip(turn + (token.logp - token.logp.detach()), -20.0, 10.0).exp()
            scale = 1 + 0.3 * (2 / (1 + math.exp(-relative(group, response, token.turn))) - 1)
            term = ppo_min(ratio, advantage(group, place, token.turn, gamma), 1 - 3e-3 * scale, 1 + 4e-3 * scale)
            total = total - term / len(response.tokens) / case.num_responses
    return total


def loss(case: Case) -> Tensor:
    return typed(case, 1.0)


VARIANTS = [({"advantage.gamma": 0.5}, lambda case: typed(case, 0.5))]
