"""arXiv:2510.00819 along Adam's step: rollout mean of PPO (.8, 1.2) over tokens with m_F < 1e-4, |m_H| < .01.

m_F = d.F d / 2 and m_H = g.d + d.H d / 2 in the last layer, g = A grad log pi, d = rate sign(g), and
H = A (grad log pi grad log pi^T - F); written out over the weights W[v][k] of the layer, logits = W hidden.
"""

import math
from functools import partial

from golden_case import Case, Tensor, Token, log_ratio, ppo_min, z_score, zero


def loss(case: Case, most_shift: float = 1e-4, most_gain: float = 0.01) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            shift, gain = predicted(token, advantage, case.rate)
            if shift < most_shift and abs(gain) < most_gain:
                term = ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
                total = total - term / len(response.tokens) / case.num_responses
    return total


def predicted(token: Token, advantage: float, rate: float) -> tuple[float, float]:
    largest = max(token.logits)
    weights = [math.exp(logit - largest) for logit in token.logits]
    p = [weight / sum(weights) for weight in weights]
    slopes = [[((word == token.target) - p[word]) * h for h in token.hidden] for word in range(len(p))]
    step = [[rate * math.copysign(1.0, advantage * s) if advantage * s else 0.0 for s in row] for row in slopes]
    moves = [math.fsum(d * h for d, h in zip(row, token.hidden, strict=True)) for row in step]  # of the logits
    along = math.fsum(s * d for row, steps in zip(slopes, step, strict=True) for s, d in zip(row, steps, strict=True))
    mean = math.fsum(share * move for share, move in zip(p, moves, strict=True))
    fisher = math.fsum(share * (move - mean) ** 2 for share, move in zip(p, moves, strict=True))
    return fisher / 2, advantage * along + advantage * (along**2 - fisher) / 2


VARIANTS = [
    (
        {"corrections.curvature_mask.gain": 9.0, "corrections.curvature_mask.shift": limit},
        partial(loss, most_shift=limit, most_gain=9.0),
    )
    for limit in (1e-6, 4e-6, 1e-5)
]
