"""arXiv:2505.07291: token mean of -min(min(r, 4) A, clip(r, .8, 1.2) A) + .001 k3 to the reference."""

from golden_case import Case, Tensor, clip, log_ratio, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            ratio = log_ratio(token, token.mu).exp()
            capped, clipped = clip(ratio, 0.0, 4.0) * advantage, clip(ratio, 0.8, 1.2) * advantage
            surrogate = capped if capped.item() <= clipped.item() else clipped
            gap = log_ratio(token, token.ref)
            k3 = clip((-gap).exp() + gap - 1, -10.0, 10.0)
            total = total + (0.001 * k3 - surrogate) / case.num_tokens
    return total
