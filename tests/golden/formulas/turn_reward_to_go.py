"""Ours: A_k = G_k - mean over the group's episodes that have a turn k; gamma .95; clip .2, token mean."""

from collections.abc import Callable

from golden_case import Case, Response, Tensor, log_ratio, mean, ppo_min, zero


def returns(member: Response, gamma: float) -> list[float]:
    """Reward-to-go of each turn, the outcome at the last."""
    rewards = [*member.turn_rewards[:-1], member.turn_rewards[-1] + member.reward]
    return [sum(gamma**later * each for later, each in enumerate(rewards[turn:])) for turn in range(len(rewards))]


def with_gamma(gamma: float) -> Callable[[Case], Tensor]:
    def loss(case: Case) -> Tensor:
        total = zero()
        for group, _, response in case:
            for token in response.tokens:
                same = [returns(each, gamma)[token.turn] for each in group.members if each.num_turns > token.turn]
                advantage = returns(response, gamma)[token.turn] - mean(same)
                advantage = 0.0 if max(same) == min(same) else advantage
                total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
        return total

    return loss


loss = with_gamma(0.95)
VARIANTS = [({"advantage.gamma": 0.5}, with_gamma(0.5))]
