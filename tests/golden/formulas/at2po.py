"""arXiv:2601.04767: (1/N) sum_i (1/|o_i|) sum_t PPO's minimum of u_k pi / sg[pi], half-widths 3e-3 / 4e-3, log at
most 10.
"""

from golden_case import Case, Tensor, clip, mean, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        for token in response.tokens:
            turn = mean([other.logp.item() - other.mu for other in response.tokens if other.turn == token.turn])
            ratio = clip(turn + (token.logp - token.logp.detach()), -20.0, 10.0).exp()
            term = ppo_min(ratio, z_score(group, place, 1e-6), 1 - 3e-3, 1 + 4e-3)
            total = total - term / len(response.tokens) / case.num_responses
    return total
