"""arXiv:2602.05885: A_k = n/(n-1) (G_k - mean over the n episodes with a turn k), G_k where n = 1; gamma 1;
clip .2 / .28, token mean.
"""

from golden_case import Case, Response, Tensor, log_ratio, mean, ppo_min, zero


def returns(member: Response, gamma: float) -> list[float]:
    """Reward-to-go of each turn, the outcome at the last."""
    rewards = [*member.turn_rewards[:-1], member.turn_rewards[-1] + member.reward]
    return [sum(gamma**later * each for later, each in enumerate(rewards[turn:])) for turn in range(len(rewards))]


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        for token in response.tokens:
            turn = token.turn
            others = [
                returns(each, 1.0)[turn]
                for other, each in enumerate(group.members)
                if each.num_turns > turn and other != place
            ]
            advantage = returns(response, 1.0)[turn] - (mean(others) if others else 0.0)
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.28) / case.num_tokens
    return total
