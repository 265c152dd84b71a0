"""Entry 2.33: token mean of -r A, plus |d| on the top token(s) of cov = (A - mean A)(log pi - mean log pi)."""

from golden_case import Case, Tensor, log_ratio, mean, z_score, zero

INERT = {"weight.share": "0.0002 of fewer than 5000 tokens is one token, and so are its mutants"}


def loss(case: Case) -> Tensor:
    tokens = [(token, z_score(group, place, 1e-6)) for group, place, response in case for token in response.tokens]
    mean_advantage = mean([advantage for _, advantage in tokens])
    mean_logp = mean([token.logp.item() for token, _ in tokens])
    values = [(advantage - mean_advantage) * (token.logp.item() - mean_logp) for token, advantage in tokens]
    top = values.index(max(values))
    total = zero()
    for index, (token, advantage) in enumerate(tokens):
        gap = log_ratio(token, token.mu)
        term = -gap.exp() * advantage
        if index == top:
            term = term + gap.abs()
        total = total + term / case.num_tokens
    return total
