"""M2PO as in AReaL: drops tokens of largest mismatch until the mean squared log-mismatch of the others is below .04.

    -M r A, r = pi / pi_old; M drops the largest (log pi_old - log mu)^2, token mean

The surrogate is unclipped; pi_old is the policy at the start of the update, mu the generator. AReaL's count of tokens
leaves dropped ones out. Ours: the denominator counts them, so that the step size does not depend on their number.
"""

import torch
from torch import Tensor

from swarm.objectives.part import Positive, Scope, Scored
from swarm.objectives.parts import GroupZScore, MismatchPart, Surrogate, TokenMean, TokenRatio, log_mismatch
from swarm.objectives.recipe import Recipe


class SecondMomentMask(MismatchPart):
    """Drops the step's tokens of largest mismatch until the mean squared log-mismatch of the rest is below `budget`."""

    equation = "L_t <- M L_t, M drops the largest (log rho_t)^2 until mean_kept (log rho)^2 < budget"
    scope = Scope.STEP
    budget: Positive = 0.04

    def __call__(self, scored: Scored) -> Tensor:
        squares = log_mismatch(scored).to(torch.float64) ** 2
        ascending = squares[scored.mask].sort().values
        count = torch.arange(1, ascending.numel() + 1, dtype=torch.float64, device=ascending.device)
        num_kept = max(1, int((ascending.cumsum(dim=0) / count < self.budget).sum()))
        if num_kept >= ascending.numel():
            return torch.ones_like(scored.advantages)
        is_kept = (squares < ascending[num_kept]) | (squares == ascending[0])  # ties together; the least is always kept
        return is_kept.to(scored.advantages.dtype)


RECIPE = Recipe(
    name="m2po_mask",
    title="Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?",
    acronym="M2PO-mask",
    arxiv="2510.01161",
    verification="code",  # M2PO as in AReaL `_apply_m2po_masking`
    advantage=GroupZScore(),
    ratio=TokenRatio(against="proximal"),
    weight=Surrogate(),
    corrections=(SecondMomentMask(budget=0.04),),
    aggregate=TokenMean(),
)
