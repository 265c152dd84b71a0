"""arXiv:2504.02546: token mean of -(B / #nonzero) (R - mean_G) log pi."""

from golden_case import Case, Tensor, mean, zero

INERT = {"ratio swapped": "its weight takes the log-probs, no ratio"}


def loss(case: Case) -> Tensor:
    total, count = zero(), 0
    for group, _, response in case:
        advantage = 0.0 if max(group.rewards) == min(group.rewards) else response.reward - mean(group.rewards)
        count += abs(advantage) > 0
        for token in response.tokens:
            total = total - advantage * token.logp / case.num_tokens
    return total * case.num_responses / max(1, count)
