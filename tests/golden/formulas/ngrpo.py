"""arXiv:2509.18851: z-score with statistics of the group and one reward of 1; clip .16/.24, token mean."""

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, std, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        imagined = [*group.rewards, 1.0]
        advantage = 0.0
        if max(imagined) > min(imagined):
            advantage = (group.rewards[place] - mean(imagined)) / (std(imagined) + 1e-6)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.84, 1.24) / case.num_tokens
    return total
