"""arXiv:2402.03300: rollout mean of -min(r A, clip(r, .8, 1.2) A) + .04 k3, k3 = exp(-D) + D - 1."""

from golden_case import Case, Tensor, clip, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            gap = clip(token.logp - token.ref, -20.0, 20.0)
            penalty = clip((-gap).exp() + gap - 1, -10.0, 10.0)
            term = 0.04 * penalty - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            total = total + term / len(response.tokens) / case.num_responses
    return total
