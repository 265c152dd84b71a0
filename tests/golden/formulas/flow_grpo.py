"""arXiv:2510.05592: (1/N) sum_i (1/K_i) sum_k (1/|a_k|) sum_t of -PPO's minimum (clip .2, z-score) + .001 k3, over the
turns that have a trained token.
"""

from golden_case import Case, Tensor, clip, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        turns = {token.turn for token in response.tokens}
        for token in response.tokens:
            gap = clip(token.logp - token.ref, -20.0, 20.0)
            penalty = clip((-gap).exp() + gap - 1, -10.0, 10.0)
            term = 0.001 * penalty - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            size = sum(other.turn == token.turn for other in response.tokens)
            total = total + term / size / len(turns) / case.num_responses
    return total
