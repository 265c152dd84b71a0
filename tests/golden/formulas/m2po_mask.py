"""arXiv:2510.01161, AReaL variant: -M r A, r around pi_old; M drops the largest (log pi_old - log mu)^2, token
mean.
"""

from golden_case import Case, Tensor, log_ratio, z_score, zero


def loss(case: Case) -> Tensor:
    squares = sorted(min(20.0, abs(token.old - token.mu)) ** 2 for _, _, response in case for token in response.tokens)
    while len(squares) > 1 and sum(squares) / len(squares) >= 0.04:
        squares.pop()
    total = zero()
    for group, place, response in case:
        for token in response.tokens:
            if min(20.0, abs(token.old - token.mu)) ** 2 <= squares[-1]:
                term = log_ratio(token, token.old).exp() * z_score(group, place, 1e-6)
                total = total - term / case.num_tokens
    return total
