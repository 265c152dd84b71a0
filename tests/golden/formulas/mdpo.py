"""arXiv:2005.09814: token mean of -r A + KL / t, t = 1 - k/1000; KL by k3 with the gradient of k2."""

from golden_case import Case, Tensor, clip, log_ratio, z_score, zero

MEMORY = {"MirrorKl": {"steps": 250}}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            gap = clip(token.logp - token.old, -20.0, 20.0)
            k3 = clip((-gap).exp() + gap - 1, -10.0, 10.0)
            half_square = gap * gap / 2
            penalty = k3.item() + half_square - half_square.item()
            term = penalty / (1 - 250 / 1000) - log_ratio(token, token.mu).exp() * advantage
            total = total + term / case.num_tokens
    return total
