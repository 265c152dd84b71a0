"""arXiv:2505.14264: token mean of -A log pi, A = (R - mean) / (std + 1e-4) + clip(R - Rref, -.2, .28)."""

from golden_case import Case, Tensor, z_score, zero

INERT = {"ratio swapped": "its weight takes the log-probs, no ratio"}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        lead = max(-0.2, min(0.28, response.reward - response.reference_reward))
        advantage = z_score(group, place, 1e-4) + lead
        for token in response.tokens:
            total = total - advantage * token.logp / case.num_tokens
    return total
