"""arXiv:2510.00911: papers of a bundle of five questions, mixed value at risk, sum-mean credit; clip .2, token
mean.
"""

from functools import partial

from golden_case import Case, Group, Tensor, log_ratio, mean, ppo_min, std, zero

MEMORY = {"BundleRisk": {"quantiles": [2.1, 3.2]}}
INERT = {"advantage.rate": "moves the memory of the next step, see the unit test"}


def loss(case: Case, size: int = 5) -> Tensor:
    total = zero()
    for start in range(0, len(case.groups), size):
        total = total + of_bundle(case, case.groups[start : start + size])
    return total


def of_bundle(case: Case, bundle: list[Group]) -> Tensor:
    low, high = case.memory["BundleRisk"]["quantiles"]
    papers = min(len(group.members) for group in bundle)
    scores = [sum(group.rewards[k] for group in bundle) for k in range(papers)]
    total = zero()
    for k, score in enumerate(scores):
        middle = (max(score - low, 0) - max(score - high, 0)) / (0.6 + 1e-6)
        tail = -max(low - score, 0) / (0.2 + 1e-6)
        deviation = std(scores) if papers > 1 and std(scores) > 1e-3 else 1.0
        value = (1.5 * tail + middle) / 2.5 / (deviation + 1e-6)
        leads = [group.rewards[k] - mean(group.rewards) for group in bundle]
        for group, lead in zip(bundle, leads, strict=True):
            advantage = value * (lead / sum(leads) if abs(sum(leads)) > 1e-6 else 1 / len(leads))
            for token in group.members[k].tokens:
                total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
    return total


VARIANTS = [({"advantage.bundle": 2}, partial(loss, size=2))]  # two bundles, and one group is left over
