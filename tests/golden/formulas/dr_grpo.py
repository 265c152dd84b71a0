"""arXiv:2503.20783: sum over tokens of -min(r A, clip(r, .8, 1.2) A) / (N * limit), A = R - mean."""

from golden_case import Case, Tensor, centred, log_ratio, ppo_min, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = centred(group, place)
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            total = total - term / (case.num_responses * response.limit)
    return total
