"""One optimizer update's gradient: scores of a batch, coefficients of its recipe, backward by micro-batch.

Invariant: micro-batches accumulate exactly the gradient of the one big batch. Where a coefficient reaches
beyond what one micro-batch holds, everything is scored without gradient before the first backward.
Shape letters: N rollouts, L longest response in tokens, M groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from swarm.clock import Clock
from swarm.learn.batch import Batch
from swarm.learn.objective import Coefficients, coefficients
from swarm.learn.optimizer import MasterAdamW
from swarm.learn.packing import PackedRows
from swarm.learn.part import Scope
from swarm.learn.recipe import Recipe
from swarm.learn.score import token_logprobs


@dataclass(slots=True)
class Measured:
    """What the updates of a draw measured, filled micro-batch by micro-batch, at the places of the whole draw."""

    logprobs: Tensor  # [N, L] nats under the policy at its update, 0 off the mask
    entropy: Tensor  # [N, L] nats
    bounded: Tensor  # bool [N, L]
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # by phase
    num_micro_batches: int = 0
    num_inputs: int = 0  # tokens of those micro-batches, padding included
    num_padding: int = 0
    num_passes: int = 0  # forward passes, those without gradient included

    @classmethod
    def empty(cls, batch: Batch, dtype: torch.dtype) -> "Measured":
        """For a batch, in the dtype of the scores."""
        zeros = torch.zeros(batch.mask.shape, dtype=dtype, device=batch.mask.device)
        return cls(logprobs=zeros, entropy=zeros.clone(), bounded=torch.zeros_like(batch.mask))

    def add_seconds(self, phase: str, elapsed_s: float) -> None:
        """Adds to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed_s

    def put(self, members: Tensor, part: "Measured") -> None:
        """Writes a part at the places of `members` (int64) and adds up its costs."""
        for name in ("logprobs", "entropy", "bounded"):
            getattr(self, name)[members] = getattr(part, name)
        for phase, elapsed_s in part.seconds.items():
            self.add_seconds(phase, elapsed_s)
        for name in ("num_micro_batches", "num_inputs", "num_padding", "num_passes"):
            setattr(self, name, getattr(self, name) + getattr(part, name))


def score_dtype(network: nn.Module) -> torch.dtype:
    """Of log-probs and entropies: float32, or float64 for a float64 network."""
    return torch.promote_types(next(network.parameters()).dtype, torch.float32)


def score_batch(network: nn.Module, batch: Batch, plan: Sequence[PackedRows]) -> Measured:
    """Log-probs and entropies of every trained token, without gradient."""
    found = Measured.empty(batch, score_dtype(network))
    with torch.no_grad():
        for packed in plan:
            _scatter(found, packed, *token_logprobs(network, packed))
            found.num_passes += 1
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """Computes the gradient of one update and leaves it in the optimizer.

    Example:
        loss, measured = Gradient(network=..., recipe=..., optimizer=..., clock=...).of(batch, plan)
    """

    network: nn.Module
    recipe: Recipe
    optimizer: MasterAdamW
    clock: Clock

    def of(self, batch: Batch, plan: Sequence[PackedRows]) -> tuple[float, Measured]:
        """Loss and measurements; the gradient of the whole batch is accumulated in the optimizer.

        Args:
            batch: with advantages; its totals are those of the update.
            plan: every trained token of it once.
        """
        found = Measured.empty(batch, score_dtype(self.network))
        loss, shared = 0.0, None
        parts = parts_of(batch, plan, self.recipe.scope)
        if parts is None:
            start = self.clock.monotonic_s()
            scored = score_batch(self.network, batch, plan)
            found.put(torch.arange(batch.num_rollouts, device=batch.mask.device), scored)
            shared = coefficients(self.recipe, batch, found.logprobs, found.entropy)
            found.bounded, loss = shared.bounded, shared.loss
            found.add_seconds("score", self.clock.monotonic_s() - start)
        for index, packed in enumerate(plan):
            start = self.clock.monotonic_s()
            logprobs, entropy = token_logprobs(self.network, packed)
            scored_s = self.clock.monotonic_s()
            if parts is None:
                assert shared is not None
                chosen = shared
            else:
                _scatter(found, packed, logprobs, entropy)
                chosen = self._part(batch, parts[index], found)
                loss += chosen.loss
            _chain(packed, logprobs, entropy, chosen)
            self.optimizer.accumulate()
            found.num_passes += 1
            found.add_seconds("score", scored_s - start)
            found.add_seconds("backward", self.clock.monotonic_s() - scored_s)
        found.num_micro_batches = len(plan)
        found.num_inputs = sum(packed.token_ids.numel() for packed in plan)
        found.num_padding = sum(packed.num_padding for packed in plan)
        return loss, found

    def _part(self, batch: Batch, rollouts: Sequence[int], found: Measured) -> Coefficients:
        """Coefficients of one micro-batch, at their places in the batch."""
        members = torch.tensor(rollouts, device=batch.mask.device)
        part = coefficients(self.recipe, batch.select(rollouts), found.logprobs[members], found.entropy[members])
        found.bounded[members] = part.bounded
        return part.spread(members, batch.num_rollouts)


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


def _scatter(found: Measured, packed: PackedRows, logprobs: Tensor, entropy: Tensor) -> None:
    found.logprobs[packed.rollouts, packed.positions] = logprobs.detach()
    found.entropy[packed.rollouts, packed.positions] = entropy.detach()


def _chain(packed: PackedRows, logprobs: Tensor, entropy: Tensor, found: Coefficients) -> None:
    """Backward from d(loss)/d(log pi) and d(loss)/d(entropy) into the network."""
    place = (packed.rollouts, packed.positions)
    if found.entropy is None:
        torch.autograd.backward([logprobs], [found.logprobs[place]])
    else:
        torch.autograd.backward([logprobs, entropy], [found.logprobs[place], found.entropy[place]])
