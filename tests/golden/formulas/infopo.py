"""arXiv:2603.00656: z-score of the outcome + .1 sigmoid(-std / .05) times the z-score, over the group's tokens whose
turn has a shift, of that shift over the turn's tokens (std 1 for a group of one outcome); clip .2, token mean.
"""

import math

from golden_case import Case, Group, Response, Tensor, log_ratio, mean, ppo_min, std, z_score, zero


def by_token(member: Response) -> list[float]:
    sizes = [sum(token.turn == turn for token in member.tokens) for turn in range(member.num_turns)]
    return [member.shifts[token.turn] / sizes[token.turn] for token in member.tokens]


def gate(group: Group) -> float:
    spread = std(group.rewards) if len(group.rewards) > 1 else 1.0
    return 0.1 / (1 + math.exp(spread / 0.05))


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        every = [shift for member in group.members for shift in by_token(member) if shift != 0]
        outcome = z_score(group, place, 1e-6)
        for token, shift in zip(response.tokens, by_token(response), strict=True):
            is_flat = not every or max(every) == min(every) or shift == 0
            score = 0.0 if is_flat else (shift - mean(every)) / (std(every) + 1e-6)
            term = ppo_min(log_ratio(token, token.mu).exp(), outcome + gate(group) * score, 0.8, 1.2)
            total = total - term / case.num_tokens
    return total
