"""DRPO (decoupled reward): length weights successes only; their likelihood competes with the failures' soft maximum.

    -(1/M) sum_g [sum_+ w s / sum w - 10 log mean exp(s-/10)] + sg[max(1e3 (KL - 1e-4), 0)] KL

No ratio: a constraint on the divergence from the start of the update takes the place of a clip, and is 0 within
its bound. The advantage only marks the groups with a signal. Ours: the definition of a success.
"""

import math

import torch
from torch import Tensor

from swarm.objectives.part import (
    AggregatePart,
    NotNegative,
    Positive,
    Requirement,
    Scope,
    Scored,
    TermPart,
    TokenLosses,
    WeightPart,
    unbounded,
)
from swarm.objectives.parts import GroupCentred, NoRatio, difference, step_mean
from swarm.objectives.parts.aggregate import allowed_length
from swarm.objectives.recipe import Recipe


class PromptSum(AggregatePart):
    """Sum of token losses over the number of groups: for weights that already divide inside a group.

    Source: DRPO, arXiv:2510.04474; Optimization-AI/DRPO `compute_policy_loss_drpo`.
    """

    equation = "L = (1/M) sum_i sum_t L_t"

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        return losses.sum() / max(1, scored.batch.step_groups)


class KlConstraint(TermPart):
    """Steep penalty on a divergence from the start of the update beyond a bound; none within the bound.

    Source: DRPO, Optimization-AI/DRPO.
    """

    equation = "L += sg[max(steepness (KL - bound), 0)] KL, KL = mean_t (log pi_old - log pi)"
    scope = Scope.STEP
    always_needs = frozenset({Requirement.PROXIMAL_LOGPROBS})
    steepness: NotNegative = 1000.0
    bound: float = 1e-4  # nats per token

    def __call__(self, scored: Scored) -> Tensor:
        divergence = step_mean(-difference(scored, "proximal"), scored, "token")
        return (self.steepness * (divergence.detach() - self.bound)).clamp(min=0) * divergence


class DecoupledReward(WeightPart):
    """Length-weighted mean likelihood of a group's successes, minus the soft maximum likelihood of its failures.

    Groups without a success or without a failure have loss 0. Likelihoods s are mean log-probs. Weights of successes
    fall with length and are normalised among successes alone, so that length never sets a success against failures.
    Advantages and ratio are not used. The soft maximum is spread evenly over the tokens of the failures. Failures that
    are not trained on still count as failures of the group, but not in the soft maximum. Use with `PromptSum`.

    Source: DRPO, arXiv:2510.04474; Optimization-AI/DRPO `compute_policy_loss_drpo`.
    """

    equation = (
        "L_G = -sum_+ w s / sum_+ w + tau log mean_- exp(s / tau), w = exp((1 - |o|/Lmax) / scale), s mean log pi"
    )
    scope = Scope.GROUP
    tau: Positive = 10.0
    scale: Positive = 0.1
    correct: float = 0.5  # a success has a higher reward

    def __call__(self, scored: Scored) -> TokenLosses:
        batch, count = scored.batch, scored.mask.sum(dim=1)
        likelihood = scored.logprobs.sum(dim=1) / count.clamp(min=1)
        outcomes = batch.rewards if batch.outcomes is None else batch.outcomes
        is_success = (outcomes > self.correct) & (count > 0)
        is_failure = (outcomes <= self.correct) & (batch.length > 0)
        log_weight = (1 - batch.length.to(likelihood.dtype) / allowed_length(batch)) / self.scale
        losses = torch.zeros_like(scored.logprobs)
        for group in batch.group_index.unique().tolist():
            members = batch.group_index == group
            wins, fails = (members & is_success).nonzero()[:, 0], (members & is_failure).nonzero()[:, 0]
            if wins.numel() == 0 or fails.numel() == 0:
                continue
            share = torch.softmax(log_weight[wins], dim=0)
            losses = losses.index_add(0, wins, -scored.logprobs[wins] * (share / count[wins])[:, None])
            fails = fails[count[fails] > 0]
            if fails.numel() == 0:
                continue
            soft_maximum = self.tau * (torch.logsumexp(likelihood[fails] / self.tau, 0) - math.log(fails.numel()))
            spread = (soft_maximum / count[fails].sum()).expand(fails.numel(), losses.shape[1])
            losses = losses.index_add(0, fails, spread)
        return unbounded(losses)


RECIPE = Recipe(
    name="drpo",
    title="DRPO: Efficient Reasoning via Decoupled Reward Policy Optimization",
    acronym="DRPO (decoupled reward)",
    arxiv="2510.04474",
    verification="code",
    advantage=GroupCentred(),
    ratio=NoRatio(),
    weight=DecoupledReward(tau=10.0, scale=0.1),
    aggregate=PromptSum(),
    terms=(KlConstraint(),),
)
