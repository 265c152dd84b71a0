"""arXiv:2511.07327, as notes quote it: r_k = .9^(rounds left) R, z-score over all rounds of the group; sequence ratio
of the round with the token's gradient, clip 3e-4 / 4e-4, log at most 10; token mean.
"""

from golden_case import Case, Group, Response, Tensor, clip, mean, ppo_min, std, zero


def worths(member: Response) -> list[float]:
    return [0.9**left * member.reward for left in reversed(range(member.num_turns))]


def advantage(group: Group, response: Response, turn: int) -> float:
    every = [worth for member in group.members for worth in worths(member)]
    return 0.0 if max(every) == min(every) else (worths(response)[turn] - mean(every)) / (std(every) + 1e-6)


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        for token in response.tokens:
            drift = mean([other.logp.item() - other.mu for other in response.tokens if other.turn == token.turn])
            ratio = clip(drift + (token.logp - token.logp.detach()), -20.0, 10.0).exp()
            term = ppo_min(ratio, advantage(group, response, token.turn), 1 - 3e-4, 1 + 4e-4)
            total = total - term / case.num_tokens
    return total
