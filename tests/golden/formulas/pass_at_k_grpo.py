"""arXiv:2503.19595: (R_max - R_second) / (std + 1e-6) for the best of a group, 0 for the others; clip .2, token
mean.
"""

from golden_case import Case, Tensor, log_ratio, ppo_min, std, zero

INERT = {"weight.low": "no advantage is negative", "weight.dual": "no advantage is negative"}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        first, second = [*sorted(group.rewards, reverse=True), group.rewards[0]][:2]
        is_leader = response.reward == first and first > second
        advantage = (first - second) / (std(group.rewards) + 1e-6) if is_leader else 0.0
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
