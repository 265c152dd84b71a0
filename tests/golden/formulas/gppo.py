"""arXiv:2508.07629: token mean of -min(r A, clip(r, .8 r/sg[r], 1.2 r/sg[r]) A)."""

from golden_case import Case, Tensor, log_ratio, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            ratio = log_ratio(token, token.mu).exp()
            one = ratio / ratio.item()
            if advantage > 0 and ratio.item() > 1.2:
                total = total - 1.2 * one * advantage / case.num_tokens
            elif advantage < 0 and ratio.item() < 0.8:
                total = total - 0.8 * one * advantage / case.num_tokens
            else:
                total = total - ratio * advantage / case.num_tokens
    return total
