"""arXiv:2510.06062, with the bounds of the authors' code: d' = -d for A > 0; bounds .2, or .4 at high entropy;
weights <= 3.

A < 0: -A max(r, 1 - low); A > 0: value -A/m, m = min(r, 1 + high), gradient -A/m below the bound, 0 above;
a weight beyond 3 is 3, constant, times log pi. High: above the linear .8 quantile of the response's entropies.
"""

from golden_case import Case, Response, Tensor, log_ratio, z_score, zero

NUM_SEEDS = 5


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        edge = quantile(response)
        for token in response.tokens:
            width = 0.4 if token.entropy.item() > edge else 0.2
            ratio = log_ratio(token, token.mu).exp()
            if advantage < 0:
                weight = ratio if ratio.item() >= 1 - width else zero() + 1 - width
            elif ratio.item() > 1 + width:
                weight = zero() + 1 / (1 + width)
            else:
                weight = ratio / ratio.item() ** 2
            if weight.item() > 3:
                weight = 3 * token.logp
            total = total - advantage * weight / case.num_tokens
    return total


def quantile(response: Response) -> float:
    values = sorted(token.entropy.item() for token in response.tokens)
    place = 0.8 * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])
