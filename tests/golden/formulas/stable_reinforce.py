"""Authors' code: rollout mean of PPO (.8, 1.2) on clip(r, 1e-3, 1e3); rewards whitened over tokens, 0 beyond 3 std."""

import math
from functools import partial

from golden_case import Case, Tensor, clip, log_ratio, mean, ppo_min, zero


def loss(case: Case, limit: float = 3.0) -> Tensor:
    rewards = [response.reward for _, _, response in case for _ in response.tokens]
    centre = mean(rewards)
    spread = math.sqrt(max(1e-8, mean([(reward - centre) ** 2 for reward in rewards])))
    total = zero()
    for _, _, response in case:
        score = 0.0 if max(rewards) == min(rewards) else (response.reward - centre) / spread
        advantage = score if abs(score) <= limit else 0.0
        for token in response.tokens:
            held = clip(log_ratio(token, token.mu), math.log(1e-3), math.log(1e3)).exp()
            total = total - ppo_min(held, advantage, 0.8, 1.2) / len(response.tokens) / case.num_responses
    return total


VARIANTS = [({"advantage.limit": 1.2}, partial(loss, limit=1.2))]  # outliers beyond 3 are rare in steps so small
