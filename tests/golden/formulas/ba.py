"""BA: (1/M) sum over groups of n+/G times the token mean of PPO (.8, 1.2) where A > 0, and n-/G that where A < 0."""

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group in case.groups:
        advantages = [z_score(group, place, 1e-6) for place in range(len(group.members))]
        for sign in (1, -1):
            side = [place for place, advantage in enumerate(advantages) if sign * advantage > 0]
            count, summed = 0, zero()
            for place in side:
                for token in group.members[place].tokens:
                    count += 1
                    summed = summed - ppo_min(log_ratio(token, token.mu).exp(), advantages[place], 0.8, 1.2)
            if count:
                total = total + len(side) / len(group.members) * summed / count
    return total / len(case.groups)
