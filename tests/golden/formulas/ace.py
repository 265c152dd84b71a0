"""ACE: GRPO's rollout mean of PPO (.8, 1.2); where A < 0, A times 1 + log(1 + exp(c)), c the sum of log pi/pi_ref."""

import math

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        confidence = math.fsum(token.logp.item() - token.ref for token in response.tokens)
        if advantage < 0:
            advantage *= 1 + math.log1p(math.exp(max(-20.0, min(20.0, confidence))))
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            total = total - term / len(response.tokens) / case.num_responses
    return total
