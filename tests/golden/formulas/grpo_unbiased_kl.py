"""arXiv:2512.02556: GRPO + .001 (pi/mu) k3, the ratio with its gradient, all in one mean over rollouts."""

from golden_case import Case, Tensor, clip, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            ratio = log_ratio(token, token.mu).exp()
            gap = clip(token.logp - token.ref, -20.0, 20.0)
            penalty = ratio * clip((-gap).exp() + gap - 1, -10.0, 10.0)
            term = 0.001 * penalty - ppo_min(ratio, advantage, 0.8, 1.2)
            total = total + term / len(response.tokens) / case.num_responses
    return total
