"""arXiv:2506.20520: token mean of -(R - (mean_G - .1)) log pi."""

from golden_case import Case, Tensor, mean, zero

INERT = {"ratio swapped": "its weight takes the log-probs, no ratio"}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        for token in response.tokens:
            total = total - (response.reward - mean(group.rewards) + 0.1) * token.logp / case.num_tokens
    return total
