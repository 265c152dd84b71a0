"""Entry 3.18: papers of a bundle of five questions, mixed value at risk, sum-mean credit; clip .2, token mean."""

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, std, zero

MEMORY = {"BundleRisk": {"quantiles": [2.1, 3.2]}}
INERT = {
    "advantage.bundle": "the five groups of a case make one bundle in either size",
    "advantage.rate": "moves the memory of the next step, see the unit test",
}


def loss(case: Case) -> Tensor:
    low, high = case.memory["BundleRisk"]["quantiles"]
    papers = min(len(group.members) for group in case.groups)
    scores = [sum(group.rewards[k] for group in case.groups) for k in range(papers)]
    total = zero()
    for k, score in enumerate(scores):
        middle = (max(score - low, 0) - max(score - high, 0) + low - high) / (0.6 + 1e-6)
        tail = -max(low - score, 0) / (0.2 + 1e-6)
        value = (1.5 * tail + middle) / 2.5 / ((std(scores) if papers > 1 else 1.0) + 1e-6)
        leads = [group.rewards[k] - mean(group.rewards) for group in case.groups]
        for group, lead in zip(case.groups, leads, strict=True):
            advantage = value * (lead / sum(leads) if abs(sum(leads)) > 1e-6 else 1 / len(leads))
            for token in group.members[k].tokens:
                total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total
