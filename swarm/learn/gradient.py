"""Gradient of a recipe's loss: scores a batch, computes its coefficients, and goes backward by micro-batches.

Invariant: micro-batches accumulate exactly the gradient of the one big batch. Where a coefficient depends on more than
one micro-batch, everything is scored without gradient before the first backward pass.
Shape letters: N rollouts, L longest response in tokens, M groups.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from swarm.clock import Clock
from swarm.learn.fused_head import Head, Scores, Upstream, fused_backward
from swarm.learn.layer_noise import LayerNoise
from swarm.learn.logprobs import hidden_states, score_tokens
from swarm.learn.optimizer import MasterAdamW
from swarm.learn.packing import PackedRows
from swarm.learn.ranks import OneProcess, Ranks, each_assigned
from swarm.model.device import wait_for
from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import Coefficients, coefficients
from swarm.objectives.mass_clip import group_masses, scope_of
from swarm.objectives.part import Probe, Scope
from swarm.objectives.recipe import Recipe

_BY_TOKEN: Final = ("logprobs", "entropy", "bounded", "factor", "weights")  # columns of `Measured`, [N, L] each


@dataclass(slots=True)
class Measured:
    """Scores and costs of the updates of a batch, filled micro-batch by micro-batch; rows are the batch's rollouts."""

    logprobs: Tensor  # [N, L] nats under the policy at its update, 0 off the mask
    entropy: Tensor  # [N, L] nats
    bounded: Tensor  # bool [N, L], clipped or capped by the recipe
    factor: Tensor  # [N, L], product of the corrections, 1 where there is none
    weights: Tensor  # [N, L], the coefficients c_t; 0 where there was no update
    masses: Tensor  # [N, 2], of the coefficients before the clip; 0 where there was no update
    probes: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # name -> [N, L]
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # by phase
    num_micro_batches: int = 0
    num_inputs: int = 0  # tokens of those micro-batches, padding included
    num_padding: int = 0
    num_passes: int = 0  # forward passes, those without gradient included

    @classmethod
    def empty(cls, batch: Batch, network: nn.Module, probes: Iterable[str] = ()) -> "Measured":
        """Values before any score (factors 1, all else 0); float32, or float64 for a float64 network."""
        dtype = torch.promote_types(next(network.parameters()).dtype, torch.float32)
        zeros = torch.zeros(batch.mask.shape, dtype=dtype, device=batch.mask.device)
        return cls(
            logprobs=zeros,
            entropy=zeros.clone(),
            bounded=torch.zeros_like(batch.mask),
            factor=torch.ones_like(zeros),
            weights=zeros.clone(),
            masses=zeros.new_zeros((zeros.shape[0], 2)),
            probes={name: zeros.clone() for name in probes},
        )

    def write(self, rollouts: Tensor, positions: Tensor, scores: Scores) -> None:
        """Writes scores [n] at their tokens (rollouts and positions: int64 [n] each)."""
        self.logprobs[rollouts, positions] = scores.logprobs
        self.entropy[rollouts, positions] = scores.entropy
        for name, values in scores.probes.items():
            self.probes[name][rollouts, positions] = values

    def write_coefficients(self, rollouts: Tensor | slice, part: Coefficients) -> None:
        """Writes the recipe's coefficients of `rollouts` (int64 or a slice)."""
        self.bounded[rollouts], self.factor[rollouts], self.masses[rollouts] = part.bounded, part.factor, part.masses
        self.weights[rollouts] = part.logprobs

    def exchange(self, ranks: Ranks, parts: Sequence[Sequence[int]]) -> None:
        """Gathers the rows of each part's rollouts from the rank that scored the part."""
        for name in (*_BY_TOKEN, "masses"):
            setattr(self, name, ranks.gather_rows(getattr(self, name), parts))
        self.probes = {name: ranks.gather_rows(values, parts) for name, values in self.probes.items()}

    def add_seconds(self, phase: str, elapsed_s: float) -> None:
        """Adds `elapsed_s` to the seconds of a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed_s

    def at(self, members: Tensor) -> "Measured":
        """The scores of `members` (int64), without costs."""
        rows = {name: getattr(self, name)[members] for name in (*_BY_TOKEN, "masses")}
        return Measured(**rows, probes={name: values[members] for name, values in self.probes.items()})

    def put(self, members: Tensor, part: "Measured", learned: Tensor | None = None) -> None:
        """Writes the scores of a part at rows `members` and adds its costs.

        Args:
            members: int64 [n], row of each of the part's rollouts.
            part: scores and costs of n rollouts.
            learned: bool [n, L], the only tokens that are written; None: all.
        """
        self.masses[members] = part.masses
        for name in _BY_TOKEN:
            _write(getattr(self, name), members, getattr(part, name), learned)
        for name, values in part.probes.items():
            _write(self.probes.setdefault(name, torch.zeros_like(self.logprobs)), members, values, learned)
        for phase, elapsed_s in part.seconds.items():
            self.add_seconds(phase, elapsed_s)
        for name in ("num_micro_batches", "num_inputs", "num_padding", "num_passes"):
            setattr(self, name, getattr(self, name) + getattr(part, name))


def _write(whole: Tensor, members: Tensor, values: Tensor, where: Tensor | None) -> None:
    whole[members] = values if where is None else torch.where(where, values, whole[members])


def score_batch(
    network: nn.Module,
    batch: Batch,
    plan: Sequence[PackedRows],
    probes: Mapping[str, Probe] | None = None,
    ranks: Ranks | None = None,
    noise: LayerNoise | None = None,
) -> Measured:
    """Scores every trained token (log-prob, entropy, probes) without gradient, under `noise` if given."""
    ranks = ranks or OneProcess()
    measured = Measured.empty(batch, network, probes or ())
    for index, counts in each_assigned(ranks, len(plan), "scoring"):
        with noise.perturb(index) if noise else nullcontext():
            scores = ranks.run(network, partial(score_tokens, network, plan[index], probes))
        if counts:
            measured.write(plan[index].rollouts, plan[index].positions, scores)
        measured.num_passes += 1
    measured.exchange(ranks, [packed.members for packed in plan])
    return measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """Computes the gradient of one update and leaves it in the optimizer.

    If each coefficient depends on one micro-batch, every micro-batch takes one pass: score, coefficients, backward
    (`PerMicroBatch`). If a coefficient depends on several, all micro-batches are scored first, without gradient, and
    take a second pass with the coefficients of the whole batch (`WholeBatch`).

    Example:
        loss, measured = Gradient(network=..., recipe=..., optimizer=..., clock=...).of(batch, plan)
    """

    network: nn.Module
    recipe: Recipe
    optimizer: MasterAdamW
    clock: Clock
    ranks: Ranks = field(default_factory=OneProcess)
    noise: LayerNoise | None = None  # of the recipe's ratio
    activity: str = "learning"  # name under which progress is reported

    def of(self, batch: Batch, plan: Sequence[PackedRows]) -> tuple[float, Measured]:
        """Accumulates the gradient of the whole batch in the optimizer; returns the loss and the measurements.

        Args:
            batch: with advantages; its totals are those of the update.
            plan: micro-batches with every trained token of the batch once.
        """
        parts = parts_of(batch, plan, scope_of(self.recipe, batch, self.ranks.count))
        source: CoefficientSource
        if parts is None:
            start = self.clock.monotonic_s()
            measured = score_batch(self.network, batch, plan, self.recipe.probes, self.ranks, self.noise)
            whole = coefficients(self.recipe, batch, measured.logprobs, measured.entropy, measured.probes)
            measured.write_coefficients(slice(None), whole)
            source = WholeBatch(whole)
            measured.add_seconds("score", self.clock.monotonic_s() - start)
        else:
            measured = Measured.empty(batch, self.network, self.recipe.probes)
            source = PerMicroBatch(self.recipe, batch, measured, self.ranks.count)
        for index, counts in each_assigned(self.ranks, len(plan), self.activity):
            members = () if parts is None else parts[index]
            with self.noise.perturb(index) if self.noise else nullcontext():
                self._accumulate(plan[index], source if counts else CoefficientSource(), members, measured)
        loss = source.loss
        if parts is not None:
            measured.exchange(self.ranks, parts)
            loss = self.ranks.all_sum(loss)
        measured.num_micro_batches = len(plan)
        measured.num_inputs = sum(packed.token_ids.numel() for packed in plan)
        measured.num_padding = sum(packed.num_padding for packed in plan)
        return loss, measured

    def _accumulate(
        self, packed: PackedRows, source: "CoefficientSource", members: Sequence[int], measured: Measured
    ) -> None:
        """Forward and backward pass of one micro-batch."""
        start = self.clock.monotonic_s()
        through_head = partial(self._forward_and_head_backward, packed, source, members)
        hidden, hidden_grad, scored_s = self.ranks.run(self.network, through_head)
        if hidden.requires_grad:
            hidden.backward(hidden_grad)
        self.optimizer.accumulate()
        wait_for(hidden.device)
        measured.num_passes += 1
        measured.add_seconds("score", scored_s - start)
        measured.add_seconds("backward", self.clock.monotonic_s() - scored_s)

    def _forward_and_head_backward(
        self, packed: PackedRows, source: "CoefficientSource", members: Sequence[int]
    ) -> tuple[Tensor, Tensor, float]:
        """Hidden states [n, H], the loss's gradient with respect to them, and the time at which they were ready [s]."""
        head, hidden = Head.of(self.network), hidden_states(self.network, packed)
        wait_for(hidden.device)
        scored_s = self.clock.monotonic_s()
        # Control is inverted here: the kernel calls the objective. Once a run of tokens is scored it gets their
        # coefficients from `source` and goes backward through the output layer while their logits are still in memory,
        # so that [tokens, vocabulary] never exists as a whole and is computed once.
        hidden_grad = fused_backward(
            head,
            hidden.detach(),
            packed.targets,
            packed.temperature,
            source.segments(packed),
            lambda run, scores: source.upstream(packed, run, scores, members),
            self.optimizer.gradient(head.weight),
            None if head.bias is None else self.optimizer.gradient(head.bias),
            probes=source.probes,
        )
        return hidden, hidden_grad, scored_s


# --- where coefficients come from --------------------------------------------------------------


class CoefficientSource:
    """Supplies the upstream gradients (a recipe's coefficients) of tokens that were just scored.

    The base class supplies zeros, for a micro-batch that this rank computes only to keep in step with the others.
    """

    loss: float = 0.0
    probes: Mapping[str, Probe] = {}  # further values of each token that the coefficients need

    def segments(self, packed: PackedRows) -> Sequence[int]:
        """Ends of the runs of tokens that must be scored together before any of them gets its gradient."""
        return range(1, packed.targets.shape[0] + 1)

    def upstream(self, packed: PackedRows, run: slice, scores: Scores, members: Sequence[int]) -> Upstream:
        """Upstream gradients of the tokens `run` of a micro-batch whose rollouts are `members`."""
        return torch.zeros_like(scores.logprobs), None


class WholeBatch(CoefficientSource):
    """Coefficients of the whole batch, computed before the first backward pass."""

    def __init__(self, whole: Coefficients) -> None:
        self._of = whole
        self.loss = whole.loss

    def upstream(self, packed: PackedRows, run: slice, scores: Scores, members: Sequence[int]) -> Upstream:
        tokens = (packed.rollouts[run], packed.positions[run])
        by_entropy = self._of.entropy
        return self._of.logprobs[tokens], None if by_entropy is None else by_entropy[tokens]


class PerMicroBatch(CoefficientSource):
    """Coefficients of one run of tokens (some rollouts or groups) at a time, computed once the run is scored."""

    def __init__(self, recipe: Recipe, batch: Batch, measured: Measured, num_ranks: int = 1) -> None:
        self.recipe, self.batch, self.measured = recipe, batch, measured
        self.probes = recipe.probes
        self.scope = scope_of(recipe, batch, num_ranks)
        self._used = group_masses(batch, torch.zeros_like(measured.masses))  # of each group's bound, so far

    def segments(self, packed: PackedRows) -> Sequence[int]:
        size = packed.targets.shape[0]
        if self.scope is Scope.STEP:
            return [size]
        units = packed.rollouts if self.scope is not Scope.GROUP else self.batch.group_index[packed.rollouts]
        ends = [*((units[1:] != units[:-1]).nonzero().squeeze(1) + 1).tolist(), size]
        return ends if len(ends) == len(units.unique()) else [size]  # a unit is split: all tokens at once

    def upstream(self, packed: PackedRows, run: slice, scores: Scores, members: Sequence[int]) -> Upstream:
        tokens = (packed.rollouts[run], packed.positions[run])
        self.measured.write(*tokens, scores)
        rollouts = self._complete(packed.rollouts[run], members)
        index = torch.tensor(rollouts, device=self.batch.mask.device)
        clip = self.batch.mass_clip
        batch = self.batch.select(rollouts)
        part = coefficients(
            self.recipe,
            batch if clip is None else replace(batch, mass_clip=replace(clip, used=self._used)),
            self.measured.logprobs[index],
            self.measured.entropy[index],
            {name: values[index] for name, values in self.measured.probes.items()},
        )
        self.loss += part.loss
        self.measured.write_coefficients(index, part)
        self._used = self._used + group_masses(batch, part.kept)
        whole = part.spread(index, self.batch.num_rollouts)
        return whole.logprobs[tokens], None if whole.entropy is None else whole.entropy[tokens]

    def _complete(self, rollouts: Tensor, members: Sequence[int]) -> list[int]:
        """Rollouts that get coefficients: for scopes GROUP and STEP, members without a trained token are included."""
        if self.scope is Scope.STEP:
            return list(members)
        if self.scope is Scope.GROUP:
            groups = set(self.batch.group_index[rollouts].tolist())
            return [member for member in members if int(self.batch.group_index[member]) in groups]
        return sorted(set(rollouts.tolist()))


# --- how a draw is split -----------------------------------------------------------------------


def parts_of(batch: Batch, plan: Sequence[PackedRows], scope: Scope) -> list[tuple[int, ...]] | None:
    """Rollouts of each micro-batch, if every coefficient depends on a single micro-batch.

    Returns:
        One entry per micro-batch; None if a coefficient depends on several: the whole batch must be scored first.
    """
    if len(plan) == 1:
        return [tuple(range(batch.num_rollouts))]
    if scope.reach <= Scope.ROLLOUT.reach:
        return [packed.members for packed in plan]
    if scope is Scope.STEP:
        return None
    group_of: list[int] = batch.group_index.tolist()
    holder: dict[int, int] = {}  # group -> the micro-batch with its trained tokens
    for index, packed in enumerate(plan):
        for rollout in packed.members:
            if holder.setdefault(group_of[rollout], index) != index:
                return None
    whole: list[list[int]] = [[] for _ in plan]
    for rollout, group in enumerate(group_of):  # members without a trained token belong to their group too
        if group in holder:
            whole[holder[group]].append(rollout)
    return [tuple(members) for members in whole]
