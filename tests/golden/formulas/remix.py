"""arXiv:2507.06892: clip of pi/mu at pi_old/mu +- .2; .001 (w k3 to ref + (1-w) k3 to pi_old); .001 entropy."""

import math

from golden_case import Case, Tensor, clip, log_ratio, ppo_min, z_score, zero

MEMORY = [{"ConvexKl": {"steps": steps}} for steps in (71, 60, 300)]  # between, at the end of ten updates, at the least


def k3(gap: Tensor) -> Tensor:
    gap = clip(gap, -20.0, 20.0)
    return clip((-gap).exp() + gap - 1, -10.0, 10.0)


def loss(case: Case) -> Tensor:
    share = max(1 - 0.1 * math.ceil(max(case.memory["ConvexKl"]["steps"] - 50, 0) / 10), 0.5)
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            centre = math.exp(min(max(token.old - token.mu, -20.0), 20.0))
            term = -ppo_min(log_ratio(token, token.mu).exp(), advantage, centre - 0.2, centre + 0.2)
            term = term + 0.001 * (share * k3(token.logp - token.ref) + (1 - share) * k3(token.logp - token.old))
            total = total + term / len(response.tokens) / case.num_responses - 0.001 * token.entropy / case.num_tokens
    return total
