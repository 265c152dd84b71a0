"""arXiv:2601.05242: each reward z-scored in its group, summed, masked-whitened over the step; clip .2, token mean."""

import math
from functools import partial

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, std, zero


def loss(case: Case, floor: float = 1e-8) -> Tensor:
    scores = []
    for group, place, response in case:
        score = 0.0
        for name in response.parts:
            values = [member.parts[name] for member in group.members]
            if max(values) > min(values):
                score += (values[place] - mean(values)) / (std(values) + 1e-6)
        scores.append(score)
    spread = [score for score, (_, _, response) in zip(scores, case, strict=True) for _ in response.tokens]
    total = zero()
    for score, (_, _, response) in zip(scores, case, strict=True):
        advantage = (score - mean(spread)) / math.sqrt(std(spread) ** 2 + floor)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total


VARIANTS = [({"advantage.whitening_floor": 0.01}, partial(loss, floor=0.01))]  # 1e-8 hardly shows
