"""arXiv:2310.10505: A = R - R(greedy response); (1/N) sum_i sum_t -A log pi."""

from golden_case import Case, Tensor, zero

INERT = {"ratio swapped": "its weight takes the log-probs, no ratio"}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        advantage = response.reward - group.baseline
        for token in response.tokens:
            total = total - advantage * token.logp / case.num_responses
    return total
