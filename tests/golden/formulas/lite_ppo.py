"""arXiv:2508.08221: A = (R - mean_G) / (std of all rewards of the step + 1e-4); clip .2, token mean."""

from golden_case import Case, Tensor, centred, log_ratio, ppo_min, std, zero


def loss(case: Case) -> Tensor:
    total = zero()
    everything = [response.reward for _, _, response in case]
    for group, place, response in case:
        advantage = centred(group, place) / (std(everything) + 1e-4)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
