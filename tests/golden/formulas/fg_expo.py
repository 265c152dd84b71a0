"""arXiv:2605.11403: GRPO + .02 (tanh(mean R) + 1)/2 k3 to the reference, one mean over rollouts."""

import math

from golden_case import Case, Tensor, clip, log_ratio, mean, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    accuracy = mean([response.reward for _, _, response in case])
    strength = 0.02 * (math.tanh(accuracy) + 1) / 2
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            gap = clip(token.logp - token.ref, -20.0, 20.0)
            penalty = clip((-gap).exp() + gap - 1, -10.0, 10.0)
            term = strength * penalty - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            total = total + term / len(response.tokens) / case.num_responses
    return total
