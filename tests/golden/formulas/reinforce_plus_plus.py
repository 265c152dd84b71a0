"""arXiv:2501.03262: returns of R minus .01 (log pi_old - log ref) at each token, masked-whitened over the step."""

import math

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, zero


def loss(case: Case) -> Tensor:
    returns: list[list[float]] = []
    for _, _, response in case:
        to_go, following = [], response.reward
        for token in reversed(response.tokens):
            following = following - 0.01 * max(-20.0, min(token.old - token.ref, 20.0))
            to_go.insert(0, following)
        returns.append(to_go)
    everything = [value for to_go in returns for value in to_go]
    centre = mean(everything)
    variance = sum((value - centre) ** 2 for value in everything) / (len(everything) - 1)
    total = zero()
    for (_, _, response), to_go in zip(case, returns, strict=True):
        for token, value in zip(response.tokens, to_go, strict=True):
            advantage = (value - centre) / math.sqrt(variance + 1e-8)
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
