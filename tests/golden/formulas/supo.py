"""arXiv:2510.06727: z-score; 0 for episodes that a limit ended; PPO's minimum, clip .2 / .28; mean over all tokens."""

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        if "limit" in response.statuses or response.truncated:
            continue
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.mu).exp(), z_score(group, place, 1e-6), 0.8, 1.28)
            total = total - term / case.num_tokens
    return total
