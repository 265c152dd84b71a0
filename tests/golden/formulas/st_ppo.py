"""arXiv:2511.20718: rollout mean of PPO (.997, 1.004) on the turn ratio u, / max(1, ||C|| / .05), r <= 1.008 in C."""

import math

from golden_case import Case, Tensor, clip, mean, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total, squares = zero(), 0.0
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            turn = mean([other.logp.item() - other.mu for other in response.tokens if other.turn == token.turn])
            ratio = clip(turn + (token.logp - token.logp.detach()), -20.0, 10.0).exp()
            if (advantage > 0 and ratio.item() > 1.004) or (advantage < 0 and ratio.item() < 0.997):
                squares += (min(ratio.item(), 1.008) * advantage / len(response.tokens)) ** 2
            total = total - ppo_min(ratio, advantage, 0.997, 1.004) / len(response.tokens) / case.num_responses
    return total / max(1.0, math.sqrt(squares / case.num_responses) / 0.05)
