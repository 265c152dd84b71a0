"""arXiv:2512.02556: GRPO without responses that have A < 0 and mean(log mu - log pi) over .5."""

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        if advantage < 0 and mean([-log_ratio(token, token.mu).item() for token in response.tokens]) > 0.5:
            continue
        for token in response.tokens:
            term = ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            total = total - term / len(response.tokens) / case.num_responses
    return total
