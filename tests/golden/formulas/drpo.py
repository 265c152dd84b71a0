"""arXiv:2510.04474: -(1/M) sum_g [sum_+ w s / sum w - 10 log mean exp(s-/10)] + sg[max(1e3 (KL - 1e-4), 0)] KL."""

import math

from golden_case import Case, Response, Tensor, log_ratio, zero

INERT = {
    "ratio swapped": "likelihoods are compared, no ratio",
    "advantage swapped": "rewards are taken as they are",
}


def score(response: Response) -> Tensor:
    return sum((token.logp for token in response.tokens), start=zero()) / len(response.tokens)


def loss(case: Case) -> Tensor:
    total = zero()
    for group in case.groups:
        right = [member for member in group.members if member.reward > 0.5]
        wrong = [member for member in group.members if member.reward <= 0.5]
        if not right or not wrong:
            continue
        weights = [math.exp((1 - len(member.tokens) / member.limit) / 0.1) for member in right]
        worth = zero()
        for weight, member in zip(weights, right, strict=True):
            worth = worth + weight * score(member) / sum(weights)
        failed = zero()
        for member in wrong:
            failed = failed + (score(member) / 10.0).exp() / len(wrong)
        total = total - (worth - 10.0 * failed.log()) / len(case.groups)
    divergence = zero()
    for _, _, response in case:
        for token in response.tokens:
            divergence = divergence - log_ratio(token, token.old) / case.num_tokens
    return total + max(1e3 * (divergence.item() - 1e-4), 0.0) * divergence
