"""arXiv:2502.01600: (1/N) sum_i (1/|o_i|) sum_t -min(r A, clip(r, 1/1.1, 1.1) A), A leave-one-out."""

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        others = group.rewards[:place] + group.rewards[place + 1 :]
        if others and max(group.rewards) == min(group.rewards):
            continue
        advantage = response.reward - (mean(others) if others else 0.0)
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.mu).exp(), advantage, 1 / 1.1, 1.1)
            total = total - term / len(response.tokens) / case.num_responses
    return total
