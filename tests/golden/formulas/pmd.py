"""arXiv:2501.12599, squared form: (1/N) sum_i (tau sum_t d_t - A_i)^2, tau .1; A the reward minus the group's mean."""

from golden_case import Case, Tensor, log_ratio, mean, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        advantage = 0.0 if max(group.rewards) == min(group.rewards) else response.reward - mean(group.rewards)
        moved = zero()
        for token in response.tokens:
            moved = moved + log_ratio(token, token.mu)
        total = total + (0.1 * moved - advantage) ** 2 / case.num_responses
    return total
