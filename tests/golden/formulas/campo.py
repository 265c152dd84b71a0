"""arXiv:2507.14683: R - .1 where cut off and the tail is a repeat; z-score, clip .2/.28, token mean."""

from golden_case import Case, Response, Tensor, log_ratio, mean, ppo_min, std, zero


def shaped(response: Response) -> float:
    ids = [token.id for token in response.tokens]
    loops = any(ids[-2 * size : -size] == ids[-size:] for size in range(1, len(ids) // 2 + 1))
    return response.reward - (0.1 if response.truncated and loops else 0.0)


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        rewards = [shaped(member) for member in group.members]
        advantage = 0.0
        if max(rewards) > min(rewards):
            advantage = (rewards[place] - mean(rewards)) / (std(rewards) + 1e-6)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.28) / case.num_tokens
    return total
