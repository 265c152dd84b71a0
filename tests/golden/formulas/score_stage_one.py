"""arXiv:2409.12917 stage I: every answer counts r_2 minus the mean over the group's episodes that have that turn; clip
.2, token mean; + .1 k2 to the initial policy on the first answer.
"""

from golden_case import Case, Group, Tensor, clip, log_ratio, mean, ppo_min, zero


def advantage(group: Group, reward: float, turn: int) -> float:
    every = [member.reward for member in group.members if member.num_turns > turn]
    return 0.0 if max(every) == min(every) else reward - mean(every)


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        for token in response.tokens:
            value = advantage(group, response.reward, token.turn)
            total = total - ppo_min(log_ratio(token, token.mu).exp(), value, 0.8, 1.2) / case.num_tokens
            if token.turn == 0:
                total = total + 0.1 * clip(token.logp - token.ref, -20.0, 20.0) ** 2 / 2 / case.num_tokens
    return total
