"""Broadcast outcome (Flow-GRPO, AgentFlow): every turn is a separate sample with the outcome of its episode.

    (1/N) sum_i (1/K_i) sum_k (1/|a_k|) sum_t -min(r A, clip(r, .8, 1.2) A) + .001 k3 in the same mean, A = z_G(R)

Each turn is one step over the context of that turn, which is a memory if the environment begins a conversation for
every turn. The modules that the planner calls are the environment's work. Known from notes on the paper. Ours: k3 as
the KL penalty. Turns without a trained token do not count.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AggregatePart, NotNegative, Requirement, Scope, Scored, TermPart
from swarm.objectives.parts import Clip, GroupZScore, TokenRatio
from swarm.objectives.parts.kl import difference, estimate
from swarm.objectives.parts.ratio import turn_sums
from swarm.objectives.recipe import Recipe


def turn_weights(scored: Scored) -> Tensor:
    """1 / (turns of the rollout that have a trained token * trained tokens of the turn): [N, L], 0 off the mask."""
    turns = torch.where(scored.mask, scored.batch.turn_ids, 0)
    counts = turn_sums(torch.ones_like(scored.logprobs), turns, scored.mask)
    num_turns = (counts > 0).sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(scored.mask, 1 / (counts.gather(1, turns).clamp(min=1) * num_turns), 0.0)


class TurnMean(AggregatePart):
    """Mean over rollouts of the mean over their turns of the mean over the tokens of a turn.

    Source: AgentFlow, arXiv:2510.05592, as quoted in notes on the paper.
    """

    equation = "L = (1/N) sum_i (1/K_i) sum_k (1/|a_k|) sum_{t in k} L_t"
    scope = Scope.ROLLOUT

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        return (losses * turn_weights(scored)).sum() / max(1, scored.batch.step_rollouts)


class TurnMeanKl(TermPart):
    """KL penalty to the reference, averaged as in `TurnMean`."""

    equation = "L += strength (1/N) sum_i (1/K_i) sum_k (1/|a_k|) sum_{t in k} k3(log pi_t - log pi_ref_t)"
    scope = Scope.ROLLOUT
    always_needs = frozenset({Requirement.TURNS, Requirement.REFERENCE_LOGPROBS})
    strength: NotNegative = 0.001

    def __call__(self, scored: Scored) -> Tensor:
        penalty = estimate(difference(scored, "reference"), "k3")
        return self.strength * (penalty * turn_weights(scored)).sum() / max(1, scored.batch.step_rollouts)


RECIPE = Recipe(
    name="flow_grpo",
    title="In-the-Flow Agentic System Optimization for Effective Planning and Tool Use",
    acronym="Flow-GRPO",
    arxiv="2510.05592",
    verification="secondary",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TurnMean(),
    terms=(TurnMeanKl(),),
)
