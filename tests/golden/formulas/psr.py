"""arXiv:2506.01347: mean of -min(r A, clip(r, .8, 1.2) A), A = 1, over the tokens of responses with R > .5."""

from golden_case import Case, Tensor, log_ratio, ppo_min, zero

INERT = {
    "weight.low": "the lower bound only acts on negative advantages",
    "weight.dual": "the dual clip only acts on negative advantages",
}


def loss(case: Case) -> Tensor:
    tokens = [token for _, _, response in case if response.reward > 0.5 for token in response.tokens]
    total = zero()
    for token in tokens:
        total = total - ppo_min(log_ratio(token, token.mu).exp(), 1.0, 0.8, 1.2) / len(tokens)
    return total
