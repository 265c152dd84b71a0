"""Entry 2.33: token mean of PPO (.8, 1.2) without the top token of cov in (1, 5), cov = (A - mean)(log pi - mean)."""

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, z_score, zero

NUM_SEEDS = 6
INERT = {
    "weight.share": "0.0002 of fewer than 5000 tokens is one token, and so are its mutants",
    "weight.most": "no token of these steps is near that bound and unclipped; the unit test of the part covers it",
}


def loss(case: Case) -> Tensor:
    tokens = [(token, z_score(group, place, 1e-6)) for group, place, response in case for token in response.tokens]
    mean_advantage = mean([advantage for _, advantage in tokens])
    mean_logp = mean([token.logp.item() for token, _ in tokens])
    best, dropped = 1.0, None
    for index, (token, advantage) in enumerate(tokens):
        covariance = (advantage - mean_advantage) * (token.logp.item() - mean_logp)
        ratio = log_ratio(token, token.mu).exp().item()
        clipped = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
        if not clipped and best < covariance < 5.0:
            best, dropped = covariance, index
    total = zero()
    for index, (token, advantage) in enumerate(tokens):
        if index != dropped:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
