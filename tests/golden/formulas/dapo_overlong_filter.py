"""arXiv:2503.14476: token mean of -min(r A, clip(r, .8, 1.28) A) over responses that ended before their limit."""

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        if response.truncated:
            continue
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.28) / case.num_tokens
    return total
