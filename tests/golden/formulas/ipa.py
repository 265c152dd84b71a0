"""arXiv:2512.24873 eq. 7 to 9: G_k = gamma^(K-k) R; -G_k log pi for a success, else -min(u_k, 1) G_k log pi; turns with
u_k > 5 left out; token mean.
"""

from collections.abc import Callable

from golden_case import Case, Tensor, mean, zero


def with_failure(failure: float) -> Callable[[Case], Tensor]:
    def loss(case: Case) -> Tensor:
        total = zero()
        for _, _, response in case:
            outcome = response.reward if response.reward > 0.5 else failure
            for token in response.tokens:
                chunk = [other for other in response.tokens if other.turn == token.turn]
                ratio = zero() + mean([other.logp.item() - other.mu for other in chunk])
                ratio = ratio.clamp(-20, 10).exp().item()
                value = outcome * 0.95 ** (response.num_turns - 1 - token.turn)
                weight = 1.0 if value > 0 else min(ratio, 1.0)
                if ratio <= 5:
                    total = total - weight * value * token.logp / case.num_tokens
        return total

    return loss


loss = with_failure(0.0)
VARIANTS = [({"advantage.failure": -1.0}, with_failure(-1.0))]
INERT = {"ratio.ceiling": "a turn beyond 5 is left out"}
