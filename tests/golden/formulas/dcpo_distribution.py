"""https://github.com/597358816/DCPO: A <- (1-a) A + a 1[R > .05] pi^T/pi, a/(1+a) of min(|.5 - H|, .1)/share
correct; dual clip 3.
"""

import math
from functools import partial

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero

MEMORY = [{"TemperedPull": {"entropy": entropy}} for entropy in (0.37, 0.64, 0.46)]  # below, above, and near 0.5


def tempered(logits: list[float], target: int, temperature: float) -> float:
    weights = [math.exp(logit / temperature) for logit in logits]
    return weights[target] / math.fsum(weights)


def loss(case: Case, least: float = 0.05) -> Tensor:
    correct = sum(response.reward > least for _, _, response in case) / case.num_responses
    entropy = case.memory["TemperedPull"]["entropy"]
    distance = min(abs(0.5 - entropy), 0.1)
    factor = 1.2 if entropy <= 0.5 else 0.8
    total = zero()
    for group, place, response in case:
        for token in response.tokens:
            advantage = z_score(group, place, 1e-6)
            if correct == 0:
                advantage = 0.0
            else:
                share = distance / correct
                share = share / (share + 1)
                pull = tempered(token.logits, token.target, factor) / tempered(token.logits, token.target, 1.0)
                advantage = (1 - share) * advantage + share * (pull if response.reward > least else 0.0)
            term = -ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            if advantage < 0 and term.item() > -3.0 * advantage:
                term = zero() + -3.0 * advantage
            total = total + term / case.num_tokens
    return total


VARIANTS = [({"shapers.tempered_pull.correct": 0.4}, partial(loss, least=0.4))]  # few rewards are near 0.05
