"""Ours: A = R - remembered mean of the prompt, or the step's mean where there is none; clip .2, token mean."""

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, zero

MEMORY = {"PromptTracker": {"prompts": {"sums/1": 0.3, "sums/3": 0.8}}}
INERT = {"advantage.rate": "moves the memory of the next step, see the unit test"}


def loss(case: Case) -> Tensor:
    usual = mean([response.reward for _, _, response in case])
    total = zero()
    for group, _, response in case:
        advantage = response.reward - case.memory["PromptTracker"]["prompts"].get(group.key, usual)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
