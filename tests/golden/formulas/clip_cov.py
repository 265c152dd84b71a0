"""arXiv:2505.22617: token mean of PPO (.8, 1.2) without the top token of cov in (1, 5), cov = (A - mean)(log pi -
mean).
"""

from functools import partial

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, z_score, zero

NUM_SEEDS = 6


def loss(case: Case, share: float = 2e-4, most: float = 5.0) -> Tensor:
    tokens = [(token, z_score(group, place, 1e-6)) for group, place, response in case for token in response.tokens]
    mean_advantage = mean([advantage for _, advantage in tokens])
    mean_logp = mean([token.logp.item() for token, _ in tokens])
    found: list[tuple[float, int]] = []
    for index, (token, advantage) in enumerate(tokens):
        covariance = (advantage - mean_advantage) * (token.logp.item() - mean_logp)
        ratio = log_ratio(token, token.mu).exp().item()
        clipped = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
        if not clipped and 1.0 < covariance < most:
            found.append((-covariance, index))
    dropped = {index for _, index in sorted(found)[: max(1, int(share * len(tokens)))]}
    total = zero()
    for index, (token, advantage) in enumerate(tokens):
        if index not in dropped:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total


VARIANTS = [({"weight.share": 0.05, "weight.most": 1.6}, partial(loss, share=0.05, most=1.6))]  # several tokens
