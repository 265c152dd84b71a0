"""arXiv:2510.13786: (1/M) sum_g sum_t -sg[min(r, 5)] A log pi / tokens of g, A = (R - mean_G) / std of the step."""

from golden_case import Case, Tensor, centred, log_ratio, std, zero

INERT = {"weight.low up": "a ratio is never below 0"}


def loss(case: Case) -> Tensor:
    total = zero()
    everything = [response.reward for _, _, response in case]
    for group, place, response in case:
        advantage = centred(group, place) / (std(everything) + 1e-4)
        tokens = sum(len(member.tokens) for member in group.members)
        for token in response.tokens:
            weight = min(5.0, log_ratio(token, token.mu).exp().item())
            total = total - weight * advantage * token.logp / tokens / len(case.groups)
    return total
