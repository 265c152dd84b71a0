"""arXiv:2509.08721: token mean of -min(r A, clip(r, .8, 1.28) A), r against the consumer's own old log-probs."""

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-8)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.old).exp(), advantage, 0.8, 1.28) / case.num_tokens
    return total
