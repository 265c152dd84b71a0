"""arXiv:2509.07969: z-score; M_i = 1 for episodes within both limits; mean over groups of
(1 / sum M) sum_i M_i (1/|o_i|) sum_t of PPO's minimum, clip .2.
"""

from golden_case import Case, Response, Tensor, log_ratio, ppo_min, z_score, zero


def is_finished(response: Response) -> bool:
    return "limit" not in response.statuses and not response.truncated


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        if not is_finished(response):
            continue
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.mu).exp(), z_score(group, place, 1e-6), 0.8, 1.2)
            total = total - term / len(response.tokens) / sum(map(is_finished, group.members)) / len(case.groups)
    return total
