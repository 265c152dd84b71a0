"""arXiv:2505.10978 eq. 3, 7, 8, without deviations: A_k = (sum r - mean_G) + (G_k - mean over the group's turns from
the same state), gamma .95, weight 1; clip .2, token mean.
"""

from golden_case import Case, Group, Response, Tensor, log_ratio, mean, ppo_min, zero


def returns(member: Response, gamma: float) -> list[float]:
    """Reward-to-go of each turn, the outcome at the last."""
    rewards = [*member.turn_rewards[:-1], member.turn_rewards[-1] + member.reward]
    return [sum(gamma**later * each for later, each in enumerate(rewards[turn:])) for turn in range(len(rewards))]


def before(response: Response, turn: int) -> str:
    """State in which a turn begins; "" where it is unknown."""
    return "the beginning" if turn == 0 else response.states[turn - 1]


def of_state(group: Group, response: Response, turn: int) -> float:
    state = before(response, turn)
    same = [
        returns(each, 0.95)[other]
        for each in group.members
        for other in range(each.num_turns)
        if before(each, other) == state != ""
    ]
    return returns(response, 0.95)[turn] - mean(same) if same and max(same) > min(same) else 0.0


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        sums = [sum(each.turn_rewards) + each.reward for each in group.members]
        whole = sum(response.turn_rewards) + response.reward - mean(sums) if max(sums) > min(sums) else 0.0
        for token in response.tokens:
            advantage = whole + of_state(group, response, token.turn)
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
