"""arXiv:2505.11225: R + l with the cosine of |o|/h, h the shortest success of the prompt; z-score, clip .2, rollout
mean.
"""

import math

from golden_case import Case, Response, Tensor, log_ratio, mean, ppo_min, std, zero

MEMORY = {"HistoryLength": {"prompts": {"sums/1": 3, "sums/3": 2, "sums/9": 1}}}


def shaped(response: Response, shortest: int | None) -> float:
    if shortest is None:
        return response.reward
    share = len(response.tokens) / shortest
    cosine = -1.0 if share >= 2 else math.cos(math.pi * share / 2)
    return response.reward + (max(-0.7, cosine) if response.reward > 0.5 else min(0.0, cosine))


def loss(case: Case) -> Tensor:
    records = case.memory["HistoryLength"]["prompts"]
    total = zero()
    for group, place, response in case:
        rewards = [shaped(member, records.get(group.key)) for member in group.members]
        advantage = 0.0
        if max(rewards) > min(rewards):
            advantage = (rewards[place] - mean(rewards)) / (std(rewards) + 1e-6)
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            total = total - term / len(response.tokens) / case.num_responses
    return total
