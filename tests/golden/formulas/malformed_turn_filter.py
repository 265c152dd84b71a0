"""Ours: z-score; tokens of malformed turns are left out of the loss; clip .2, token mean."""

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        for token in response.tokens:
            if response.statuses[token.turn] != "malformed":
                term = ppo_min(log_ratio(token, token.mu).exp(), z_score(group, place, 1e-6), 0.8, 1.2)
                total = total - term / case.num_tokens
    return total
