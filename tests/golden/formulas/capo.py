"""Entry 2.31, SGD form of the authors' code: rollout mean of PPO (.8, 1.2) over tokens with m_F < 1e-4, |m_H| < .01.

m_H = g.d + d.H d / 2, m_F = (g.d / A)^2 / 2 in the last layer, g = A grad log pi, d = eta g, and
H = A (grad log pi grad log pi^T - F); written out over the weights W[v][k] of the layer, logits = W hidden;
eta such that the mean of m_F is 1e-5.
"""

import itertools
import math

from golden_case import Case, Tensor, Token, log_ratio, mean, ppo_min, z_score, zero

NUM_SEEDS = 8  # so that some token shifts the policy but not the objective too far


def loss(case: Case) -> Tensor:
    tokens = [
        (token, z_score(group, place, 1e-6), len(response.tokens))
        for group, place, response in case
        for token in response.tokens
    ]
    forms = [last_layer(token) for token, _, _ in tokens]
    shifts = [(advantage * size) ** 2 / 2 for (_, advantage, _), (size, _) in zip(tokens, forms, strict=True)]
    if mean(shifts) == 0:
        return zero()
    eta = math.sqrt(1e-5 / mean(shifts))
    total = zero()
    for (token, advantage, length), (size, curved) in zip(tokens, forms, strict=True):
        shift = (eta * advantage * size) ** 2 / 2
        gain = eta * advantage**2 * size + advantage * (eta * advantage) ** 2 * (size**2 - curved) / 2
        if shift < 1e-4 and abs(gain) < 0.01:
            term = ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            total = total - term / length / case.num_responses
    return total


def last_layer(token: Token) -> tuple[float, float]:
    """(|g|^2, g.F g) of g = d log p(target) / dW and the Fisher matrix F of p."""
    largest = max(token.logits)
    weights = [math.exp(logit - largest) for logit in token.logits]
    p = [weight / sum(weights) for weight in weights]
    slopes = [[((word == token.target) - p[word]) * h for h in token.hidden] for word in range(len(p))]
    size = math.fsum(slope**2 for row in slopes for slope in row)
    along = [math.fsum(s * h for s, h in zip(row, token.hidden, strict=True)) for row in slopes]
    places = range(len(p))
    curved = math.fsum(
        along[i] * (p[i] * (i == j) - p[i] * p[j]) * along[j] for i, j in itertools.product(places, places)
    )
    return size, curved
