"""arXiv:2409.12917 stage II: G_1 = r_1 + r_2, G_2 = r_2 + 10 (r_2 - r_1), minus the mean over the group's episodes that
have that turn; clip .2, token mean; + .01 k2 to the initial policy.
"""

from golden_case import Case, Group, Response, Tensor, clip, log_ratio, mean, ppo_min, zero


def worth(member: Response, turn: int) -> float:
    begun = member.parts["first_try"]
    return member.reward + (begun if turn == 0 else 10 * (member.reward - begun))


def advantage(group: Group, response: Response, turn: int) -> float:
    every = [worth(member, turn) for member in group.members if member.num_turns > turn]
    return 0.0 if max(every) == min(every) else worth(response, turn) - mean(every)


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        for token in response.tokens:
            term = -ppo_min(log_ratio(token, token.mu).exp(), advantage(group, response, token.turn), 0.8, 1.2)
            term = term + 0.01 * clip(token.logp - token.ref, -20.0, 20.0) ** 2 / 2
            total = total + term / case.num_tokens
    return total
