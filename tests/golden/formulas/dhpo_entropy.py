"""arXiv:2601.05607, variant 2: share H/(H+1) of GRPO's clipped term (.2), the rest of GSPO's (3e-4 / 4e-4)."""

from golden_case import Case, Tensor, log_ratio, mean, ppo_min, z_score, zero


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        advantage = z_score(group, place, 1e-6)
        summed = mean([log_ratio(token, token.mu).item() for token in response.tokens])
        for token in response.tokens:
            sequence = (summed + (token.logp - token.logp.detach())).exp()
            by_token = ppo_min(log_ratio(token, token.mu).exp(), advantage, 0.8, 1.2)
            by_sequence = ppo_min(sequence, advantage, 1 - 3e-4, 1 + 4e-4)
            share = token.entropy.item() / (token.entropy.item() + 1.0)
            term = share * by_token + (1 - share) * by_sequence
            total = total - term / len(response.tokens) / case.num_responses
    return total
