"""arXiv:2505.22617: token mean of -r A, plus |d| on the top token(s) of cov = (A - mean A)(log pi - mean log pi)."""

from functools import partial

from golden_case import Case, Tensor, log_ratio, mean, z_score, zero


def loss(case: Case, share: float = 2e-4) -> Tensor:
    tokens = [(token, z_score(group, place, 1e-6)) for group, place, response in case for token in response.tokens]
    mean_advantage = mean([advantage for _, advantage in tokens])
    mean_logp = mean([token.logp.item() for token, _ in tokens])
    values = [(advantage - mean_advantage) * (token.logp.item() - mean_logp) for token, advantage in tokens]
    ranked = sorted(range(len(values)), key=lambda index: -values[index])
    chosen = ranked[: max(1, int(share * len(values)))]
    total = zero()
    for index, (token, advantage) in enumerate(tokens):
        gap = log_ratio(token, token.mu)
        term = -gap.exp() * advantage
        if index in chosen:
            term = term + gap.abs()
        total = total + term / case.num_tokens
    return total


VARIANTS = [({"weight.share": 0.1}, partial(loss, share=0.1))]  # several tokens
