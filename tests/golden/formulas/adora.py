"""arXiv:2602.10019: z-score, times .1 unless longest success > mean failure below .95 limit; clip .2, token mean."""

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        successes = [len(member.tokens) for member in group.members if member.reward > 0.5]
        failures = [len(member.tokens) for member in group.members if member.reward <= 0.5]
        failures = [length for length in failures if length < 0.95 * response.limit]
        longest, usual = max(successes, default=-1), mean(failures) if failures else -1
        advantage = z_score(group, place, 1e-6) * (1.0 if longest > usual else 0.1)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
