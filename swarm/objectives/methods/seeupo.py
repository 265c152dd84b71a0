"""Turn by turn, the last turn first (SeeUPO): one update for each turn, weighted by the ratios of the later turns.

    update of turn k: (1/N) sum_i mean_t -min(u_k M_k A_k, clip(u_k, .8, 1.2) M_k A_k), u_k the length-normalised ratio
    A_k = (R - mean_G over episodes with a turn k) / std of that over the draw, within 3
    M_K = 1, M_k = clip(M_(k+1) clip(u_(k+1), .8, 1.2), .8, 1.2)

The KL penalty is left out, as in `grpo`. Ours: ratios are those of the policy at the update to the generator, so that
stale episodes are corrected; the released ratios are those of the turn's own update, with a first u of 1. A turn that
only one episode of its group has gets 0 (released: the outcome).
"""

import torch
from torch import Tensor

from swarm.objectives.part import (
    AdvantagePart,
    AggregatePart,
    Batch,
    Positive,
    Requirement,
    Scope,
    Scored,
    ShapePart,
    Share,
)
from swarm.objectives.parts import (
    AgainstPolicy,
    Clip,
    TurnRatio,
    by_cell,
    group_centred,
    group_statistics,
    on_turn_tokens,
    turn_cells,
    turns_of,
    where_signal,
)
from swarm.objectives.parts.ratio import turn_sums
from swarm.objectives.recipe import Recipe


class TurnOutcome(AdvantagePart):
    """Outcome minus the mean of the group's episodes with the turn, in standard deviations of such leads in the draw.

    Source: SeeUPO, arXiv:2602.06554; dy-liang/seeupo_v2 `compute_grpo_outcome_advantage_local` (`special_norm`).
    """

    equation = "A_k = clip((R - mean_{G, k} R) / std_k, -most, most), unbiased std_k over all episodes with a turn k"
    always_needs = frozenset({Requirement.TURNS, Requirement.ZERO_VARIANCE_GROUPS})
    most: Positive = 3.0

    def __call__(self, batch: Batch) -> Tensor:
        turns = turns_of(batch)
        outcomes = batch.rewards.to(torch.float64)[:, None].expand(turns.exists.shape)
        centred = by_cell(outcomes, turn_cells(batch, turns), turns, group_centred)
        numbers = torch.arange(centred.shape[1], device=centred.device).expand(centred.shape)
        scores = by_cell(centred, numbers, turns, in_deviations)
        return on_turn_tokens(scores.clamp(-self.most, self.most), batch).to(batch.rewards.dtype)


def in_deviations(values: Tensor, cells: Tensor) -> Tensor:
    """Values [n] over the unbiased deviation of their cell: [n], 0 in cells of equal values."""
    spread = group_statistics(values, cells)
    return where_signal(values / spread.std, spread, values)


class LaterTurns(AgainstPolicy, ShapePart):
    """Multiplies advantages by the clipped ratios of the later turns: an episode counts less if these became unlikely.

    Source: SeeUPO; dy-liang/seeupo_v2 `update_ratios`, with its clip of every factor and of every product.
    """

    equation = "A_k <- A_k M_k, M_K = 1, M_k = clip(M_(k+1) clip(u_(k+1), 1-low, 1+high), 1-low, 1+high)"
    scope = Scope.ROLLOUT
    always_needs = frozenset({Requirement.TURNS, Requirement.TURN_UPDATES})
    low: Share = 0.2
    high: Positive = 0.2

    def __call__(self, scored: Scored) -> Tensor:
        turn_ids = scored.batch.turn_ids
        drift = turn_sums(scored.logprobs - self.denominator(scored), turn_ids, scored.mask)
        counts = turn_sums(torch.ones_like(scored.logprobs), turn_ids, scored.mask)
        ratios = torch.exp(drift / counts.clamp(min=1)).clamp(1 - self.low, 1 + self.high)
        factors = torch.ones_like(ratios)
        for turn in reversed(range(ratios.shape[1] - 1)):
            behind = factors[:, turn + 1] * ratios[:, turn + 1]
            factors[:, turn] = behind.clamp(1 - self.low, 1 + self.high)
        return scored.advantages * on_turn_tokens(factors, scored.batch)


class SumOfTurns(AggregatePart):
    """Mean over rollouts of the sum over turns of the token means; turns that an update only scores have loss 0."""

    equation = "L = (1/N) sum_i sum_k (1/|a_k|) sum_{t in k} L_t"
    scope = Scope.ROLLOUT

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        turn_ids = scored.batch.turn_ids
        counts = turn_sums(torch.ones_like(losses), turn_ids, scored.mask).clamp(min=1)
        return (turn_sums(losses, turn_ids, scored.mask) / counts).sum() / max(1, scored.batch.step_rollouts)


RECIPE = Recipe(
    name="seeupo",
    title="SeeUPO: Sequence-Level Agentic-RL with Convergence Guarantees",
    acronym="SeeUPO",
    arxiv="2602.06554",
    verification="code",
    advantage=TurnOutcome(),
    shapers=(LaterTurns(),),
    ratio=TurnRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=SumOfTurns(),
)
