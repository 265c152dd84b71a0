"""arXiv:2505.24034: token mean of -min(pi/mu, 4) A."""

from golden_case import Case, Tensor, clip, log_ratio, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        for token in response.tokens:
            ratio = clip(log_ratio(token, token.mu).exp(), 0.0, 4.0)
            total = total - ratio * z_score(group, place, 1e-6) / case.num_tokens
    return total
