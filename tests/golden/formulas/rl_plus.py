"""arXiv:2508.00222: external 2 pi/(pi_old + .5 (pi_old + 1)) A (1 - sg[pi])^.5, own r A; constant norm, entropy
.001.
"""

import math

from golden_case import Case, Tensor, clip, log_ratio, mean, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = 0.0
        if max(group.rewards) != min(group.rewards):
            advantage = group.rewards[place] - mean(group.rewards)
        length = max(response.limit, len(response.tokens))
        for token in response.tokens:
            total = total - 0.001 * token.entropy / case.num_tokens
            weight, ratio = advantage, log_ratio(token, token.old).exp()
            if response.external:
                old = math.exp(min(0.0, token.old))
                ratio = clip(math.log(2 / (old + 0.5 * (old + 1))) + token.logp, -20.0, 20.0).exp()
                weight = advantage * (1 - math.exp(min(0.0, token.logp.item()))) ** 0.5
            total = total - ratio * weight / length / case.num_responses
    return total
