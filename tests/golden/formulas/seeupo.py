"""arXiv:2602.06554, as its code has it, all updates in one sum: (1/N) sum_i sum_k mean_t of PPO's minimum (.8, 1.2) of
the turn's ratio and M_k A_k; A_k = outcome minus the mean of the group's responses with a turn k, over the deviation of
that, within 3; M_k by going backward over the turns, every factor and every product within .8 and 1.2.
"""

import math
from functools import partial

from golden_case import Case, Group, Response, Tensor, clip, mean, ppo_min, std, zero


def gap(group: Group, response: Response, turn: int) -> float:
    rewards = [member.reward for member in group.members if member.num_turns > turn]
    return 0.0 if max(rewards) == min(rewards) else response.reward - mean(rewards)


def advantage(case: Case, group: Group, response: Response, turn: int, most: float) -> float:
    gaps = [gap(other, member, turn) for other, _, member in case if member.num_turns > turn]
    if max(gaps) == min(gaps):
        return 0.0
    return min(max(gap(group, response, turn) / std(gaps), -most), most)


def bounded(value: float) -> float:
    return min(max(value, 0.8), 1.2)


def drift(response: Response, turn: int) -> float:
    gaps = [token.logp.item() - token.mu for token in response.tokens if token.turn == turn]
    return mean(gaps) if gaps else 0.0


def loss(case: Case, most: float = 3.0) -> Tensor:
    total = zero()
    for group, _, response in case:
        carried = 1.0
        for turn in reversed(range(response.num_turns)):
            own = [token for token in response.tokens if token.turn == turn]
            weight = carried * advantage(case, group, response, turn, most)
            for token in own:
                ratio = clip(drift(response, turn) + (token.logp - token.logp.detach()), -20.0, 10.0).exp()
                total = total - ppo_min(ratio, weight, 0.8, 1.2) / len(own) / case.num_responses
            carried = bounded(carried * bounded(math.exp(min(drift(response, turn), 50.0))))
    return total


VARIANTS = [({"advantage.most": 1.0}, partial(loss, most=1.0))]
