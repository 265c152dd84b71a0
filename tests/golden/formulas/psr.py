"""Entry 3.16: token mean of -min(r A, clip(r, .8, 1.2) A); A = 1.0 if R > .5 else 0.0."""

from golden_case import Case, Tensor, log_ratio, ppo_min, zero

INERT = {
    "weight.low": "the lower bound only acts on negative advantages",
    "weight.dual": "the dual clip only acts on negative advantages",
}


def loss(case: Case) -> Tensor:
    total = zero()
    for _, _, response in case:
        advantage = 1.0 if response.reward > 0.5 else 0.0
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
