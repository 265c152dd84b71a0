"""arXiv:2507.14295: R <- R .5^(T-1) - .5 (1 - E/T), T readable tries, E distinct ones; z-score, clip .2 / .28, token
mean.
"""

from golden_case import Case, Response, Tensor, log_ratio, mean, ppo_min, std, zero


def shaped(response: Response) -> float:
    pairs = zip(response.actions, response.statuses, strict=True)
    tries = [text.strip().lower() for text, status in pairs if status != "malformed"]
    if not tries:
        return response.reward
    return response.reward / 2 ** (len(tries) - 1) - 0.5 * (1 - len(set(tries)) / len(tries))


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        rewards = [shaped(each) for each in group.members]
        is_flat = max(rewards) == min(rewards)
        advantage = 0.0 if is_flat else (shaped(response) - mean(rewards)) / (std(rewards) + 1e-6)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.28) / case.num_tokens
    return total
