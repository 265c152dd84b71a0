"""arXiv:2505.22312, Skywork-OR1: token mean of the clipped surrogate, minus c mean H while mean H <= target."""

from golden_case import Case, Tensor, log_ratio, ppo_min, z_score, zero

MEMORY = [{"AdaptiveEntropy": {"strength": 0.03}}, {}]  # later, and in the first step
INERT = {"terms.adaptive_entropy.pace": "acts between steps: test_parts_term"}


def loss(case: Case) -> Tensor:
    total, entropy = zero(), zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        for token in response.tokens:
            total = total - ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2) / case.num_tokens
            entropy = entropy + token.entropy / case.num_tokens
    strength = case.memory["AdaptiveEntropy"]["strength"] if case.memory else 0.01
    return total - (strength * entropy if entropy.item() <= 0.2 else zero())
