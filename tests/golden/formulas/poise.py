"""arXiv:2605.07579: A = R - mean of g(phi) of the other rollouts, g a ridge regression; clip .2, rollout mean.

Features: along 8 random directions the first state and the mean of the last 4; entropy statistics; 1.
"""

import math

import torch
from golden_case import Case, Response, Tensor, log_ratio, mean, ppo_min, zero

NUM_FEATURES = 20
PATTERN = [[math.sin(1.7 * k * k + j) for j in range(NUM_FEATURES)] for k in range(30)]
TARGETS = [0.5 + 0.5 * math.cos(k) for k in range(30)]
GRAM = [[math.fsum(row[i] * row[j] for row in PATTERN) for j in range(NUM_FEATURES)] for i in range(NUM_FEATURES)]
MOMENT = [math.fsum(row[i] * target for row, target in zip(PATTERN, TARGETS, strict=True)) for i in range(NUM_FEATURES)]

MEMORY = {"CrossBaseline": {"gram": GRAM, "moment": MOMENT, "rewards": [-0.4, 0.9]}}
INERT = {
    "shapers.cross_baseline.decay": "moves the memory of the next step, see the unit test",
    "advantage swapped": "the shaper replaces the advantage",
}


def directions(size: int) -> list[list[float]]:
    seeds = (torch.Generator().manual_seed(number) for number in range(8))
    return [(torch.randn(size, generator=seed, dtype=torch.float64) / math.sqrt(size)).tolist() for seed in seeds]


def features(response: Response) -> list[float]:
    found: list[float] = []
    for direction in directions(len(response.tokens[0].hidden)):
        along = [sum(h * d for h, d in zip(token.hidden, direction, strict=True)) for token in response.tokens]
        found += [along[0], mean(along[-4:])]
    entropies = [token.entropy.item() for token in response.tokens]
    spread = math.sqrt(mean([(entropy - mean(entropies)) ** 2 for entropy in entropies]))
    return [*found, mean(entropies), spread, max(entropies), 1.0]


def loss(case: Case) -> Tensor:
    known = case.memory["CrossBaseline"]
    gram = torch.tensor(known["gram"], dtype=torch.float64)
    damping = 1e-2 * sum(gram[i, i].item() for i in range(NUM_FEATURES)) / NUM_FEATURES
    damped = gram + damping * torch.eye(NUM_FEATURES, dtype=torch.float64)
    weights = torch.linalg.solve(damped, torch.tensor(known["moment"], dtype=torch.float64)).tolist()
    total = zero()
    for group in case.groups:
        values = [
            min(max(sum(w * f for w, f in zip(weights, features(member), strict=True)), -0.4), 0.9)
            for member in group.members
        ]
        for place, response in enumerate(group.members):
            others = values[:place] + values[place + 1 :]
            advantage = response.reward - mean(others) if others else 0.0
            for token in response.tokens:
                term = ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
                total = total - term / len(response.tokens) / case.num_responses
    return total
