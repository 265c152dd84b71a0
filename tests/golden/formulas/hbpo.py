"""arXiv:2507.15844: budget-aware rewards (4 cos, 1/Lmax a token over), inside a budget plus across; clip .2, token
mean.
"""

import math

from golden_case import Case, Response, Tensor, log_ratio, mean, ppo_min, std, zero


def worth(tokens: int, limit: int) -> float:
    return 4.0 * math.cos(math.pi * tokens / (2 * limit))


def earned(response: Response) -> float:
    length, budget, limit = len(response.tokens), response.budget, response.limit
    if response.reward <= 0.5:
        return 0.0
    return worth(length, limit) - (length - budget) / limit if length > budget else worth(budget, limit)


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        rewards = [earned(member) for member in group.members]
        same = [
            reward for reward, member in zip(rewards, group.members, strict=True) if member.budget == response.budget
        ]
        advantage = mean(same) - worth(response.budget, response.limit)
        if max(rewards) > min(rewards):
            advantage += (rewards[place] - mean(rewards)) / (std(rewards) + 1e-6)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
