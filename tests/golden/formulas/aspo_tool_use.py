"""arXiv:2508.19201: z + clip(-2 (p - mean p) / mean |o|, +-.7 |z|) for successes with a call at p; clip .2, token
mean.
"""

from golden_case import Case, Response, Tensor, log_ratio, mean, ppo_min, z_score, zero


def call(response: Response) -> int | None:
    """Trained tokens up to the end of the first turn with a call, of a success that calls."""
    if response.reward <= 0.5 or not any(response.calls):
        return None
    first = [count > 0 for count in response.calls].index(True)
    return sum(token.turn <= first for token in response.tokens)


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        calls = [position for member in group.members if (position := call(member)) is not None]
        position = call(response)
        if position is not None:
            usual_length = mean([len(member.tokens) for member in group.members])
            bonus = -2.0 * (position - mean(calls)) / usual_length
            most = 0.7 * abs(advantage)
            advantage += min(max(bonus, -most), most)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
