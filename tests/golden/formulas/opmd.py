"""arXiv:2509.24203: token mean of -A log pi / (1 + tau), tau 1; A the reward minus the group's mean."""

from golden_case import Case, Tensor, mean, zero

INERT = {"ratio swapped": "its weight takes the log-probs, no ratio"}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        advantage = 0.0 if max(group.rewards) == min(group.rewards) else response.reward - mean(group.rewards)
        for token in response.tokens:
            total = total - advantage * token.logp / 2 / case.num_tokens
    return total
