"""arXiv:2501.03262, -baseline: R - mean_G on every token, masked-whitened over the step, clip .2, token mean."""

import math

from golden_case import Case, Tensor, centred, log_ratio, mean, ppo_min, zero


def loss(case: Case) -> Tensor:
    scores = []
    for group, place, response in case:
        scores += [centred(group, place)] * len(response.tokens)
    centre = mean(scores)
    variance = sum((score - centre) ** 2 for score in scores) / (len(scores) - 1)
    tokens = [token for _, _, response in case for token in response.tokens]
    total = zero()
    for token, score in zip(tokens, scores, strict=True):
        advantage = (score - centre) / math.sqrt(variance + 1e-8)
        total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
