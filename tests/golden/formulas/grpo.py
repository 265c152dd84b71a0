"""arXiv:2402.03300: (1/N) sum_i (1/|o_i|) sum_t -min(r A, clip(r, .8, 1.2) A), r = pi/mu."""

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            total = total - term / len(response.tokens) / case.num_responses
    return total
