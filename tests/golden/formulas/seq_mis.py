"""https://richardli.xyz/rl-collapse, sequence level: the product where it is in [.5, 3], else 0, on PPO's clip,
token mean.
"""

import math

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        whole = sum(min(20.0, max(-20.0, token.old - token.mu)) for token in response.tokens)
        product = math.exp(min(20.0, max(-20.0, whole)))
        kept = product if 0.5 <= product <= 3.0 else 0.0
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.old).exp(), advantage, 0.8, 1.2)
            total = total - kept * term / case.num_tokens
    return total
