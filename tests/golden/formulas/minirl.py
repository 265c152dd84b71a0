"""Added entry MiniRL: (1/N) sum of -M sg[pi/mu] A log pi, A = R - mean, M by pi/pi_old beyond .8 or 1.2."""

import math

from golden_case import Case, Tensor, log_ratio, mean, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        if max(group.rewards) == min(group.rewards):
            continue
        advantage = group.rewards[place] - mean(group.rewards)
        for token in response.tokens:
            staleness = math.exp(log_ratio(token, token.old).item())
            if (advantage > 0 and staleness > 1.2) or (advantage < 0 and staleness < 0.8):
                continue
            weight = math.exp(log_ratio(token, token.mu).item())
            total = total - weight * advantage * token.logp / case.num_responses
    return total
