"""Token mean of PPO (.8, 1.28) on the z-score, minus .1 times the mean of log pi over tokens of rewards of 1."""

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total, likelihood, num_right = zero(), zero(), 0
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.28) / case.num_tokens
            if response.reward >= 1.0:
                likelihood, num_right = likelihood + token.logp, num_right + 1
    return total - 0.1 * likelihood / max(1, num_right)
