"""arXiv:2510.04996: A = R - mean of the pool, on at most 4 of it (2 right, 2 wrong, filled up); clip .2/.28, dual
10.
"""

from functools import partial

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, zero


def loss(case: Case, limit: float = 0.7) -> Tensor:
    total, num_tokens = zero(), 0
    for group in case.groups:
        right = [place for place, reward in enumerate(group.rewards) if reward > limit]
        wrong = [place for place, reward in enumerate(group.rewards) if reward <= limit]
        kept = right[:2] + wrong[:2]
        spare = right[2:] + wrong[2:]
        kept += spare[: 4 - len(kept)]
        for place in kept:
            equal = min(group.rewards) == max(group.rewards)
            advantage = 0.0 if equal else group.rewards[place] - mean(group.rewards)
            for token in group.members[place].tokens:
                num_tokens += 1
                term = -ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.28)
                if advantage < 0 and term.item() > -10.0 * advantage:
                    term = zero() + -10.0 * advantage
                total = total + term
    return total / num_tokens


VARIANTS = [({"advantage.right": 0.3}, partial(loss, limit=0.3))]
