"""arXiv:2601.03320, unclipped primal: token mean of -(r A - lambda (r-1)^2), at the lambda before the first step."""

from golden_case import Case, Tensor, log_ratio, z_score, zero

INERT = {
    f"weight.{name}": "moves the price between steps only; the unit test of observe covers it"
    for name in ("bound", "rate", "least", "most")
}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            ratio = log_ratio(token, token.mu).exp()
            total = total - (ratio * advantage - 0.04 * (ratio - 1) ** 2) / case.num_tokens
    return total
