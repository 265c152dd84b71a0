"""arXiv:2602.02710: A = (R - mean) / (mean + 1e-6), which is meant for rewards of at least 0; clip .2, token mean."""

from golden_case import Case, Tensor, centred, log_ratio, mean, ppo_min, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = centred(group, place) / (max(mean(group.rewards), 0.0) + 1e-6)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
