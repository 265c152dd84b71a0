"""arXiv:2507.18071: (1/N) sum_i (1/|o_i|) sum_t -min(s_t A, clip(s_t) A), s_t = sg[s_i] pi / sg[pi], its log at
most 10.
"""

from golden_case import Case, Tensor, clip, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        size = len(response.tokens)
        mean = sum(token.logp.item() - token.mu for token in response.tokens) / size
        for token in response.tokens:
            ratio = clip(mean + (token.logp - token.logp.detach()), -20.0, 10.0).exp()
            term = ppo_min(ratio, z_score(group, place, 1e-6), 1 - 3e-4, 1 + 4e-4)
            total = total - term / size / case.num_responses
    return total
