"""arXiv:2508.21104: A = R - mean reward of the reference policy on the prompt; clip .2, token mean."""

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        advantage = response.reward - mean([member.reference_reward for member in group.members])
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
