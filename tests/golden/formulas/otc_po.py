"""arXiv:2504.14870: R <- R sin(f pi / 2n), f = 2nm / (m + n); n = 0: R at m = 0, else R cos(m pi / (2m + 1)); z-score,
clip .2, rollout mean.
"""

import math

from golden_case import Case, Group, Response, Tensor, log_ratio, mean, ppo_min, std, zero


def shaped(group: Group, response: Response) -> float:
    cheapest = min((sum(each.calls) for each in group.members if each.reward > 0.5), default=None)
    calls = sum(response.calls)
    if cheapest is None or calls == cheapest == 0:
        return response.reward
    if cheapest == 0:
        return response.reward * math.cos(calls * math.pi / (2 * calls + 1))
    near = 2 * cheapest * calls / (calls + cheapest)
    return response.reward * math.sin(near * math.pi / (2 * cheapest))


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        rewards = [shaped(group, each) for each in group.members]
        is_flat = max(rewards) == min(rewards)
        advantage = 0.0 if is_flat else (shaped(group, response) - mean(rewards)) / (std(rewards) + 1e-6)
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            total = total - term / len(response.tokens) / case.num_responses
    return total
