"""https://doi.org/10.1007/BF00992696, without the momentum (REINFORCE): token mean of -A log pi, A the group
z-score.
"""

from golden_case import Case, Tensor, z_score, zero

INERT = {"ratio swapped": "its weight takes the log-probs, no ratio"}


def loss(case: Case) -> Tensor:
    total = zero()
    for group, place, response in case:
        for token in response.tokens:
            total = total - z_score(group, place, 1e-6) * token.logp / case.num_tokens
    return total
