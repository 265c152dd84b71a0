"""One optimizer update's gradient: scores of a batch, coefficients of its recipe, backward by micro-batch.

Invariant: micro-batches accumulate exactly the gradient of the one big batch. Where a coefficient reaches
beyond what one micro-batch holds, everything is scored without gradient before the first backward.
Shape letters: N rollouts, L longest response in tokens, M groups.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from swarm.clock import Clock
from swarm.learn.fused_head import Head, Scores, Upstream, pull
from swarm.learn.layer_noise import LayerNoise
from swarm.learn.optimizer import MasterAdamW
from swarm.learn.packing import PackedRows
from swarm.learn.ranks import OneProcess, Ranks
from swarm.learn.score import hidden_states, score_tokens
from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import Coefficients, coefficients
from swarm.objectives.part import Probe, Scope
from swarm.objectives.recipe import Recipe


@dataclass(slots=True)
class Measured:
    """What the updates of a draw measured, filled micro-batch by micro-batch, at the places of the whole draw."""

    logprobs: Tensor  # [N, L] nats under the policy at its update, 0 off the mask
    entropy: Tensor  # [N, L] nats
    bounded: Tensor  # bool [N, L]
    factor: Tensor  # [N, L], product of the corrections, 1 where there is none
    probes: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # name -> [N, L]
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # by phase
    num_micro_batches: int = 0
    num_inputs: int = 0  # tokens of those micro-batches, padding included
    num_padding: int = 0
    num_passes: int = 0  # forward passes, those without gradient included

    @classmethod
    def empty(cls, batch: Batch, network: nn.Module, probes: Iterable[str] = ()) -> "Measured":
        """For a batch and probes of these names; scores are float32, or float64 for a float64 network."""
        dtype = torch.promote_types(next(network.parameters()).dtype, torch.float32)
        zeros = torch.zeros(batch.mask.shape, dtype=dtype, device=batch.mask.device)
        return cls(
            logprobs=zeros,
            entropy=zeros.clone(),
            bounded=torch.zeros_like(batch.mask),
            factor=torch.ones_like(zeros),
            probes={name: zeros.clone() for name in probes},
        )

    def write(self, rollouts: Tensor, positions: Tensor, scores: Scores) -> None:
        """Puts scores [n] at their places (int64 [n] each)."""
        self.logprobs[rollouts, positions] = scores.logprobs
        self.entropy[rollouts, positions] = scores.entropy
        for name, values in scores.probes.items():
            self.probes[name][rollouts, positions] = values

    def exchange(self, ranks: Ranks, parts: Sequence[Sequence[int]]) -> None:
        """Takes the rollouts of each part from the rank that scored it."""
        for name in ("logprobs", "entropy", "bounded", "factor"):
            setattr(self, name, ranks.rows(getattr(self, name), parts))
        self.probes = {name: ranks.rows(values, parts) for name, values in self.probes.items()}

    def add_seconds(self, phase: str, elapsed_s: float) -> None:
        """Adds to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed_s

    def at(self, members: Tensor) -> "Measured":
        """The scores of `members` (int64), without costs."""
        return Measured(
            logprobs=self.logprobs[members],
            entropy=self.entropy[members],
            bounded=self.bounded[members],
            factor=self.factor[members],
            probes={name: values[members] for name, values in self.probes.items()},
        )

    def put(self, members: Tensor, part: "Measured") -> None:
        """Writes a part at the places of `members` (int64) and adds up its costs."""
        for name in ("logprobs", "entropy", "bounded", "factor"):
            getattr(self, name)[members] = getattr(part, name)
        for name, values in part.probes.items():
            self.probes.setdefault(name, torch.zeros_like(self.logprobs))[members] = values
        for phase, elapsed_s in part.seconds.items():
            self.add_seconds(phase, elapsed_s)
        for name in ("num_micro_batches", "num_inputs", "num_padding", "num_passes"):
            setattr(self, name, getattr(self, name) + getattr(part, name))


def score_batch(
    network: nn.Module,
    batch: Batch,
    plan: Sequence[PackedRows],
    probes: Mapping[str, Probe] | None = None,
    ranks: Ranks | None = None,
    noise: LayerNoise | None = None,
) -> Measured:
    """Log-probs, entropies and probes of every trained token, without gradient; under `noise` where there is some."""
    ranks = ranks or OneProcess()
    found = Measured.empty(batch, network, probes or ())
    for place, counts in ranks.turns(len(plan)):
        with noise.drawn(place) if noise else nullcontext():
            scores = ranks.run(network, partial(score_tokens, network, plan[place], probes))
        if counts:
            found.write(plan[place].rollouts, plan[place].positions, scores)
        found.num_passes += 1
    found.exchange(ranks, [packed.members for packed in plan])
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """Computes the gradient of one update and leaves it in the optimizer.

    The output layer's part of the backward pass happens chunk by chunk while the logits are still there: a
    recipe's coefficients are asked for as soon as the tokens that they depend on are scored.

    Example:
        loss, measured = Gradient(network=..., recipe=..., optimizer=..., clock=...).of(batch, plan)
    """

    network: nn.Module
    recipe: Recipe
    optimizer: MasterAdamW
    clock: Clock
    ranks: Ranks = field(default_factory=OneProcess)
    noise: LayerNoise | None = None  # of the recipe's ratio

    def of(self, batch: Batch, plan: Sequence[PackedRows]) -> tuple[float, Measured]:
        """Loss and measurements; the gradient of the whole batch is accumulated in the optimizer.

        Args:
            batch: with advantages; its totals are those of the update.
            plan: every trained token of it once.
        """
        parts = parts_of(batch, plan, self.recipe.scope)
        if parts is None:
            start = self.clock.monotonic_s()
            found = score_batch(self.network, batch, plan, self.recipe.probes, self.ranks, self.noise)
            rule: _Rule = _Known.of(self.recipe, batch, found)
            found.add_seconds("score", self.clock.monotonic_s() - start)
        else:
            found = Measured.empty(batch, self.network, self.recipe.probes)
            rule = _Asked(recipe=self.recipe, batch=batch, found=found)
        for place, counts in self.ranks.turns(len(plan)):
            members = () if parts is None else parts[place]
            with self.noise.drawn(place) if self.noise else nullcontext():
                self._pass(plan[place], rule if counts else _Nothing(), members, found)
        loss = rule.loss
        if parts is not None:
            found.exchange(self.ranks, parts)
            loss = self.ranks.total(loss)
        found.num_micro_batches = len(plan)
        found.num_inputs = sum(packed.token_ids.numel() for packed in plan)
        found.num_padding = sum(packed.num_padding for packed in plan)
        return loss, found

    def _pass(self, packed: PackedRows, rule: "_Rule", members: Sequence[int], found: Measured) -> None:
        start = self.clock.monotonic_s()
        hidden, hidden_grad, scored_s = self.ranks.run(self.network, partial(self._pulled, packed, rule, members))
        if hidden.requires_grad:
            hidden.backward(hidden_grad)
        self.optimizer.accumulate()
        found.num_passes += 1
        found.add_seconds("score", scored_s - start)
        found.add_seconds("backward", self.clock.monotonic_s() - scored_s)

    def _pulled(self, packed: PackedRows, rule: "_Rule", members: Sequence[int]) -> tuple[Tensor, Tensor, float]:
        """Hidden states [n, H], the loss's gradient by them, and when they were there."""
        head, hidden = Head.of(self.network), hidden_states(self.network, packed)
        scored_s = self.clock.monotonic_s()
        hidden_grad = pull(
            head,
            hidden.detach(),
            packed.targets,
            packed.temperature,
            rule.segments(packed),
            lambda run, scores: rule(packed, run, scores, members),
            self.optimizer.gradient(head.weight),
            None if head.bias is None else self.optimizer.gradient(head.bias),
            probes=rule.probes,
        )
        return hidden, hidden_grad, scored_s


class _Rule(Protocol):
    """Where the upstream gradients of scored tokens come from."""

    loss: float

    @property
    def probes(self) -> Mapping[str, Probe]:
        """What it wants to know of each token."""
        ...

    def segments(self, packed: PackedRows) -> Sequence[int]:
        """Ends of the runs of tokens that must be scored before any of them gets its gradient."""
        ...

    def __call__(self, packed: PackedRows, run: slice, scores: Scores, members: Sequence[int]) -> Upstream:
        """Upstream gradients of the tokens `run` of a micro-batch whose rollouts are `members`."""
        ...


class _Nothing:
    """A pass that another rank makes in earnest: its gradient is zero here."""

    loss = 0.0
    probes: Mapping[str, Probe] = {}

    def segments(self, packed: PackedRows) -> Sequence[int]:
        return range(1, packed.targets.shape[0] + 1)

    def __call__(self, packed: PackedRows, run: slice, scores: Scores, members: Sequence[int]) -> Upstream:
        return torch.zeros_like(scores.logprobs), None


@dataclass(slots=True)
class _Known:
    """Coefficients of the whole batch, computed before the first backward."""

    found: Coefficients
    loss: float

    @classmethod
    def of(cls, recipe: Recipe, batch: Batch, scores: Measured) -> "_Known":
        found = coefficients(recipe, batch, scores.logprobs, scores.entropy, scores.probes)
        scores.bounded, scores.factor = found.bounded, found.factor
        return cls(found=found, loss=found.loss)

    @property
    def probes(self) -> Mapping[str, Probe]:
        return {}

    def segments(self, packed: PackedRows) -> Sequence[int]:
        return range(1, packed.targets.shape[0] + 1)

    def __call__(self, packed: PackedRows, run: slice, scores: Scores, members: Sequence[int]) -> Upstream:
        place = (packed.rollouts[run], packed.positions[run])
        return self.found.logprobs[place], None if self.found.entropy is None else self.found.entropy[place]


@dataclass(slots=True)
class _Asked:
    """Coefficients of a few rollouts or groups at a time, as they are scored."""

    recipe: Recipe
    batch: Batch
    found: Measured
    loss: float = 0.0

    @property
    def probes(self) -> Mapping[str, Probe]:
        return self.recipe.probes

    def segments(self, packed: PackedRows) -> Sequence[int]:
        size = packed.targets.shape[0]
        if self.recipe.scope is Scope.STEP:
            return [size]
        units = packed.rollouts if self.recipe.scope is not Scope.GROUP else self.batch.group_index[packed.rollouts]
        ends = [*((units[1:] != units[:-1]).nonzero().squeeze(1) + 1).tolist(), size]
        return ends if len(ends) == len(units.unique()) else [size]  # a unit in several places: all at once

    def __call__(self, packed: PackedRows, run: slice, scores: Scores, members: Sequence[int]) -> Upstream:
        place = (packed.rollouts[run], packed.positions[run])
        self.found.write(*place, scores)
        rollouts = self._seen(packed.rollouts[run], members)
        index = torch.tensor(rollouts, device=self.batch.mask.device)
        part = coefficients(
            self.recipe,
            self.batch.select(rollouts),
            self.found.logprobs[index],
            self.found.entropy[index],
            {name: values[index] for name, values in self.found.probes.items()},
        )
        self.loss += part.loss
        self.found.bounded[index] = part.bounded
        self.found.factor[index] = part.factor
        whole = part.spread(index, self.batch.num_rollouts)
        return whole.logprobs[place], None if whole.entropy is None else whole.entropy[place]

    def _seen(self, rollouts: Tensor, members: Sequence[int]) -> list[int]:
        """Rollouts whose coefficients follow from these; members without a trained token belong to their unit."""
        if self.recipe.scope is Scope.STEP:
            return list(members)
        if self.recipe.scope is Scope.GROUP:
            groups = set(self.batch.group_index[rollouts].tolist())
            return [member for member in members if int(self.batch.group_index[member]) in groups]
        return sorted(set(rollouts.tolist()))


def parts_of(batch: Batch, plan: Sequence[PackedRows], scope: Scope) -> list[tuple[int, ...]] | None:
    """For each micro-batch the rollouts whose coefficients can be computed from it alone.

    Returns:
        One entry per micro-batch; None where coefficients reach beyond one, so that the batch must be scored first.
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


def minibatches(batch: Batch, count: int) -> list[tuple[Tensor, Batch]]:
    """A draw split by whole groups into at most `count` batches, each a step with totals of its own.

    Group g goes to batch g mod count, so that each has local and foreign groups alike.

    Returns:
        (places of its rollouts in `batch`, int64; the batch).
    """
    if count == 1:
        return [(torch.arange(batch.num_rollouts, device=batch.mask.device), batch)]
    num_groups = len(batch.prompts)
    chosen = [list(range(first, num_groups, count)) for first in range(min(count, num_groups))]
    return [batch.of_groups(groups) for groups in chosen]
