"""arXiv:2601.10712: A_k = (z_G(sum r) + z_{G, k}(G_k)) / 2, gamma .9; mean 0 and deviation 1 for what is alone; clip
.2, token mean.
"""

from golden_case import Case, Response, Tensor, log_ratio, mean, ppo_min, std, zero


def returns(member: Response, gamma: float) -> list[float]:
    """Reward-to-go of each turn, the outcome at the last."""
    rewards = [*member.turn_rewards[:-1], member.turn_rewards[-1] + member.reward]
    return [sum(gamma**later * each for later, each in enumerate(rewards[turn:])) for turn in range(len(rewards))]


def score(value: float, values: list[float]) -> float:
    if len(values) == 1:
        return value / (1 + 1e-6)
    return 0.0 if max(values) == min(values) else (value - mean(values)) / (std(values) + 1e-6)


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        sums = [sum(each.turn_rewards) + each.reward for each in group.members]
        for token in response.tokens:
            same = [returns(each, 0.9)[token.turn] for each in group.members if each.num_turns > token.turn]
            advantage = score(sum(response.turn_rewards) + response.reward, sums)
            advantage = (advantage + score(returns(response, 0.9)[token.turn], same)) / 2
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
