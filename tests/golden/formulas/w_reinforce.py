"""arXiv:2506.01347: token mean of -min(r A, clip(r, .8, 1.2) A); A = 0.1 if R > .5 else -1.0."""

from golden_case import Case, Tensor, log_ratio, ppo_min, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for _, _, response in case:
        advantage = 0.1 if response.reward > 0.5 else -1.0
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
