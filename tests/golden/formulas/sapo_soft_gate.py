"""arXiv:2511.20347: rollout mean of -f(r) A, f(r) = sigmoid(tau (r - 1)) 4 / tau; tau 1 for A > 0, else 1.05."""

import torch
from golden_case import Case, Tensor, log_ratio, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        tau = 1.0 if advantage > 0 else 1.05
        for token in response.tokens:
            ratio = log_ratio(token, token.mu).exp()
            term = torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
            total = total - term / len(response.tokens) / case.num_responses
    return total
