"""arXiv:2602.05261: GSPO with half-widths 2e-3 / 2.5e-3, each response's loss times its length, mean over
responses.
"""

from golden_case import Case, Tensor, clip, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        summed = zero()
        for token in response.tokens:
            summed = summed + token.logp - token.mu
        ratio = clip(summed / len(response.tokens), -20.0, 10.0).exp()
        term = ppo_min(ratio, z_score(group, place, 1e-6), 1 - 2e-3, 1 + 2.5e-3)
        total = total - len(response.tokens) * term / case.num_responses
    return total
