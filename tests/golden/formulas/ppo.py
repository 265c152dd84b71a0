"""arXiv:1707.06347: token mean of -min(r A, clip(r, .8, 1.2) A); A the reward of each token, whitened over tokens."""

import math

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, zero


def loss(case: Case) -> Tensor:
    rewards = [response.reward for _, _, response in case for _ in response.tokens]
    centre = mean(rewards)
    variance = sum((reward - centre) ** 2 for reward in rewards) / (len(rewards) - 1)
    total = zero()
    for _, _, response in case:
        is_zero_variance = max(rewards) == min(rewards)
        advantage = 0.0 if is_zero_variance else (response.reward - centre) / math.sqrt(variance + 1e-8)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
