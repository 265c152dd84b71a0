"""arXiv:2601.03320, unclipped primal: (1/N) sum_i of -(s A - lambda (s-1)^2), s the length-normalised ratio, at a
remembered lambda.
"""

import torch
from golden_case import Case, Tensor, clip, z_score, zero

MEMORY = [{"RatioVariance": {"price": 0.3}}, {}]  # later, and in the first step
INERT = {
    f"weight.{name}": "moves the price between steps only; the unit test of observe covers it"
    for name in ("bound", "rate", "least", "most")
}


def loss(case: Case) -> Tensor:
    price = case.memory["RatioVariance"]["price"] if case.memory else 0.04
    total = zero()
    for group, place, response in case:
        logs = [token.logp - token.mu for token in response.tokens]
        ratio = clip(torch.stack(logs).mean(), -20.0, 10.0).exp()
        total = total - (ratio * z_score(group, place, 1e-6) - price * (ratio - 1) ** 2) / case.num_responses
    return total
