"""arXiv:2501.12599: token mean of -A log pi + (tau/2) (log pi - log pi_old)^2, tau .1; A group-centred."""

from golden_case import Case, Tensor, log_ratio, mean, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        advantage = 0.0 if max(group.rewards) == min(group.rewards) else response.reward - mean(group.rewards)
        for token in response.tokens:
            term = -advantage * token.logp + 0.05 * log_ratio(token, token.mu) ** 2
            total = total + term / case.num_tokens
    return total
