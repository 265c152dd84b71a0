"""arXiv:2511.15605, as notes quote it, states in place of a world model: failures get .5 sigmoid of minus the
standardised squared distance to the nearest success of the group; z-score, clip .2, token mean.
"""

import math

from golden_case import Case, Group, Response, Tensor, log_ratio, mean, ppo_min, std, zero


def embedding(member: Response) -> dict[str, float]:
    counts = {key: float(member.states.count(key)) for key in member.states if key}
    size = math.sqrt(sum(count**2 for count in counts.values()))
    return {key: count / size for key, count in counts.items()}


def distance(one: Response, other: Response) -> float:
    a, b = embedding(one), embedding(other)
    return sum((a.get(key, 0.0) - b.get(key, 0.0)) ** 2 for key in {*a, *b})


def shaped(group: Group) -> list[float]:
    won = [member for member in group.members if member.reward > 0.5]
    lost = [member for member in group.members if member.reward <= 0.5]
    if not won or not lost:
        return group.rewards
    gaps = [min(distance(member, each) for each in won) for member in lost]
    found = dict(zip(map(id, lost), gaps, strict=True))

    def reward(member: Response) -> float:
        if member.reward > 0.5:
            return member.reward
        z = (found[id(member)] - mean(gaps)) / (std(gaps) + 1e-6)
        return 0.5 / (1 + math.exp(z))

    return [reward(member) for member in group.members]


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        rewards = shaped(group)
        is_flat = max(rewards) == min(rewards)
        advantage = 0.0 if is_flat else (rewards[place] - mean(rewards)) / (std(rewards) + 1e-6)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
