"""arXiv:2601.22582: A = (R - median) / (MAD or std + 1e-3) * members / nonzero members; clip .2, rollout mean."""

import statistics

from golden_case import Case, Tensor, log_ratio, ppo_min, std, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, _, response in case:
        lows = [statistics.median_low(group.rewards)]
        deviations = [abs(reward - lows[0]) for reward in group.rewards]
        nonzero = sum(deviation > 0 for deviation in deviations)
        if max(group.rewards) == min(group.rewards):
            continue
        scale = statistics.median_low(deviations) or std(group.rewards)
        advantage = (response.reward - lows[0]) / (scale + 1e-3)
        advantage *= len(group.members) / max(1, nonzero)
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            total = total - term / len(response.tokens) / case.num_responses
    return total
