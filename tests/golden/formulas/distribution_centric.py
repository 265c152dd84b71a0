"""Entry 5.5: A <- (1-a) A + a 1[R > .05] pi^T/pi, a/(1+a) of min(|.5 - H|, .1)/share correct; dual clip 3."""

import math

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero

MEMORY = {"TemperedPull": {"entropy": 0.37}}
INERT = {
    "shapers.tempered_pull.sharp": "the remembered entropy is below the target: test_parts_tempered",
    "shapers.tempered_pull.correct": "no reward of these steps lies between 0.03 and 0.08",
}


def tempered(logits: list[float], target: int, temperature: float) -> float:
    weights = [math.exp(logit / temperature) for logit in logits]
    return weights[target] / math.fsum(weights)


def loss(case: Case) -> Tensor:
    correct = sum(response.reward > 0.05 for _, _, response in case) / case.num_responses
    distance = min(abs(0.5 - 0.37), 0.1)
    total = zero()
    for group, place, response in case:
        for token in response.tokens:
            advantage = z_score(group, place, 1e-6)
            if correct == 0:
                advantage = 0.0
            else:
                share = distance / correct
                share = share / (share + 1)
                pull = tempered(token.logits, token.target, 1.2) / tempered(token.logits, token.target, 1.0)
                advantage = (1 - share) * advantage + share * (pull if response.reward > 0.05 else 0.0)
            term = -ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            if advantage < 0 and term.item() > -3.0 * advantage:
                term = zero() + -3.0 * advantage
            total = total + term / case.num_tokens
    return total
