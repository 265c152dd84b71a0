"""arXiv:2507.18071: -(1/N) sum_i min(s A, clip(s, 1-3e-4, 1+4e-4) A), s = exp(mean log-ratio), its log at most 10."""

from golden_case import Case, Tensor, clip, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        summed = zero()
        for token in response.tokens:
            summed = summed + token.logp - token.mu
        ratio = clip(summed / len(response.tokens), -20.0, 10.0).exp()
        total = total - ppo_min(ratio, z_score(group, place, 1e-6), 1 - 3e-4, 1 + 4e-4) / case.num_responses
    return total
