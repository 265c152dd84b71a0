"""arXiv:2509.22576, single turn: PG (token mean, dual clip 3) - .001 (mean H - weight .1 share outside (.8, 1.2)
past H).
"""

import math

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero

MEMORY = [{"EntropyBand": {"steps": steps, "entropy_sum": 0.9 * steps}} for steps in (100, 40)]  # both halves of 150


def loss(case: Case) -> Tensor:
    past, steps = 0.9, case.memory["EntropyBand"]["steps"]
    weight = 0.8 * math.exp(-3.0 * (steps - 75) / 75) if steps > 75 else 1 - 0.2 * (1 - math.exp(-2.0 * steps / 75))
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            term = -ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            if advantage < 0 and term.item() > -3.0 * advantage:
                term = zero() + -3.0 * advantage
            is_inside = 0.8 * past < token.entropy.item() < 1.2 * past
            bonus = token.entropy - (0.0 if is_inside else weight * 0.1)
            total = total + (term - 0.001 * bonus) / case.num_tokens
    return total
