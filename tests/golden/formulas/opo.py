"""arXiv:2505.23585: A = R - sum_j |o_j| R_j / sum_j |o_j|; clip .2, token mean."""

from golden_case import Case, Tensor, log_ratio, ppo_min, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        length = sum(len(member.tokens) for member in group.members)
        baseline = sum(len(member.tokens) * member.reward for member in group.members) / length
        is_flat = max(group.rewards) == min(group.rewards)
        advantage = 0.0 if is_flat else response.reward - baseline
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
