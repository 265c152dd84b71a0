"""arXiv:2402.14740: A = R - mean of the others (R when alone); (1/N) sum_i sum_t -A log pi."""

from golden_case import Case, Tensor, mean, zero

INERT = {"ratio swapped": "its weight takes the log-probs, no ratio"}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        others = [reward for index, reward in enumerate(group.rewards) if index != place]
        is_flat = max(group.rewards) == min(group.rewards) and others
        advantage = 0.0 if is_flat else response.reward - (mean(others) if others else 0.0)
        for token in response.tokens:
            total = total - advantage * token.logp / case.num_responses
    return total
