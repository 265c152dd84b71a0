"""Ratios of the turns of a response, the unit in which an agent acts.

Invariant: tokens of one rollout with one turn id share a value; each carries its own gradient.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.objectives.part import RatioPart, Requirement, Scope, Scored
from swarm.objectives.parts.ratio.sequence import check_ceiling, on_tokens
from swarm.objectives.parts.ratio.token import LOG_RATIO_BOUND, AgainstPolicy


def turn_mean(values: Tensor, turn_ids: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` over the trained tokens of the same rollout and turn: [N, L]; 0 for a turn without any.

    Args:
        values: [N, L].
        turn_ids: int64 [N, L], any numbers.
        mask: bool [N, L].
    """
    numbers, number = torch.unique(turn_ids, return_inverse=True)
    row = torch.arange(values.shape[0], device=values.device)[:, None]
    turns, place = torch.unique((row * numbers.numel() + number).reshape(-1), return_inverse=True)
    zeros = torch.zeros(turns.numel(), dtype=values.dtype, device=values.device)
    kept = torch.where(mask, values, torch.zeros_like(values)).reshape(-1)
    totals = zeros.index_add(0, place, kept)
    counts = zeros.index_add(0, place, mask.reshape(-1).to(values.dtype))
    return (totals / counts.clamp(min=1))[place].reshape(values.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRatio(AgainstPolicy, RatioPart):
    """The length-normalised ratio of a token's turn, with the gradient of the token alone.

    With a single turn it is `SequenceTokenRatio`.

    Source: AT2PO, arXiv:2601.04767; zzfoutofspace/ATPO `compute_policy_loss_gspo_turn`. The chunks of ROLL
    (`ratio_type` "segment") have the same value and, where a turn has one advantage, the same gradient.
    """

    equation: ClassVar[str] = "r_t = sg[u_k] pi_t / sg[pi_t], u_k = exp(min(mean_{s in turn k of t} d_s, ceiling))"
    scope: ClassVar[Scope] = Scope.ROLLOUT
    ceiling: float = 10.0  # of log u

    def __post_init__(self) -> None:
        AgainstPolicy.__post_init__(self)
        check_ceiling(self.ceiling)

    @property
    def needs(self) -> frozenset[Requirement]:
        return super(TurnRatio, self).needs | {Requirement.TURNS}

    def __call__(self, scored: Scored) -> Tensor:
        drift = scored.logprobs.detach() - self.denominator(scored)
        mean = turn_mean(drift, scored.batch.turn_ids, scored.mask)
        return on_tokens(mean, scored.logprobs, scored.mask).clamp(-LOG_RATIO_BOUND, self.ceiling)
