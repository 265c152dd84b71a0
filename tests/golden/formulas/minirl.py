"""arXiv:2512.01374, MiniRL: (1/N) sum of -M min(pi_old/mu, 5) sg[pi/pi_old] A log pi, M by pi/pi_old beyond .8 or
1.27.
"""

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
            if (advantage > 0 and staleness > 1.27) or (advantage < 0 and staleness < 0.8):
                continue
            mismatch = math.exp(max(-20.0, min(20.0, token.old - token.mu)))
            weight = min(mismatch, 5.0) * staleness
            total = total - weight * advantage * token.logp / case.num_responses
    return total
