"""arXiv:2509.02479: z-score; an episode with a void turn is left out of the loss; clip .2 / .28, token mean."""

from golden_case import Case, Response, Tensor, log_ratio, ppo_min, z_score, zero


def is_void(response: Response, turn: int) -> bool:
    answers = turn == response.num_turns - 1 and response.statuses[turn] not in ("malformed", "limit")
    return response.calls[turn] == 0 and not answers


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        if any(is_void(response, turn) for turn in range(response.num_turns)):
            continue
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.mu).exp(), z_score(group, place, 1e-6), 0.8, 1.28)
            total = total - term / case.num_tokens
    return total
