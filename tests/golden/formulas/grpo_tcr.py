"""arXiv:2510.11701: R += min(0, -(|o| - .8 Lmax) / (.2 Lmax)), z-score, token mean of PPO clipped at .8 / 1.28, at
least 10 A where A < 0.
"""

from golden_case import Case, Group, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group in case.groups:
        for response in group.members:
            buffer = 0.2 * response.limit
            response.reward += min(0.0, -(len(response.tokens) - (response.limit - buffer)) / buffer)
        for place in range(len(group.members)):
            total = total + surrogate(group, place) / case.num_tokens
    return total


def surrogate(group: Group, place: int) -> Tensor:
    advantage = z_score(group, place, 1e-6)
    total = zero()
    for token in group.members[place].tokens:
        term = ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.28)
        total = total - (zero() + 10 * advantage if advantage < 0 and term.item() < 10 * advantage else term)
    return total
