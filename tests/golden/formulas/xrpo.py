"""arXiv:2510.06672: A + min(max(1 - exp(s - mean_G s), 0), A/2) where A > 0, s mean log pi; clip .2, token mean."""

import math

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        if advantage > 0:
            likelihoods = [mean([token.logp.item() for token in member.tokens]) for member in group.members]
            novelty = 1 - math.exp(likelihoods[place] - mean(likelihoods))
            advantage += min(max(novelty, 0.0), 0.5 * advantage)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
