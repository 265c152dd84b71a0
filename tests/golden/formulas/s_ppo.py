"""arXiv:2511.20718, token level: rollout mean of PPO (.8, 1.2) / max(1, ||C|| / .05), C_t = 1[clipped] min(r, 1.4)
A/|o|.
"""

import math

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total, squares = zero(), 0.0
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            ratio = log_ratio(token, token.mu).exp()
            if (advantage > 0 and ratio.item() > 1.2) or (advantage < 0 and ratio.item() < 0.8):
                squares += (min(ratio.item(), 1.4) * advantage / len(response.tokens)) ** 2
            total = total - ppo_min(ratio, advantage, 0.8, 1.2) / len(response.tokens) / case.num_responses
    return total / max(1.0, math.sqrt(squares / case.num_responses) / 0.05)
