"""Training of one adapter by single calls of its owner: gradients add up until an optimizer step uses them.

Invariant: the base weights are shared with others and never change; log-probs are those of the weights before the step.
Shape letters: N sequences, S tokens of one, K targets of a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from swarm.clock import Clock
from swarm.errors import ConfigError
from swarm.learn.gradient import Gradient, score_batch
from swarm.learn.optimizer import MasterAdamW
from swarm.learn.packing import MIN_FILL, PADDING, PackedRows
from swarm.model.lora import add_adapters, linear_names, with_shared_weights
from swarm.model.version_digest import PublishedTensors, published_state, snapshot
from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import coefficients
from swarm.objectives.recipe import Recipe

TOKEN_BUDGET: Final = 4096  # of a forward pass, padding included; a longer sequence is one of its own
Ids = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterShape:
    """Rank, scale, seed and layers of an adapter."""

    rank: int  # > 0
    alpha: float  # scale of what it adds, times the rank
    seed: int
    has_attention: bool
    has_mlp: bool


def adapted(base: nn.Module, shape: AdapterShape) -> nn.Module:
    """A network that shares the base's weights and has a new adapter.

    Raises:
        ConfigError: there is no layer to adapt.
    """
    network = with_shared_weights(base)
    names = set[str]()
    if shape.has_attention:
        names |= linear_names(network, attention=True)
    if shape.has_mlp:
        names |= linear_names(network, attention=False)
    if not names:
        raise ConfigError("train_attn, train_mlp: no layer of this model is left to adapt; set one of them")
    add_adapters(network, shape.rank, shape.alpha / shape.rank, names, shape.seed)
    return network


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamSettings:
    """Settings of one step of AdamW."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float  # infinite: nothing is clipped


class AdapterTraining:
    """Network, gradient and optimizer of one adapter.

    Example:
        training = AdapterTraining(base, AdapterShape(rank=8, alpha=32, seed=0, ...), clock)
        logprobs, loss = training.forward_backward(recipe, batch, token_ids, targets, is_forward_only=False)
        norm = training.step(AdamSettings(learning_rate=1e-4, ...))
    """

    def __init__(self, base: nn.Module, shape: AdapterShape, clock: Clock) -> None:
        self.shape = shape
        self.network = adapted(base, shape)
        self.num_steps = 0
        self._clock = clock
        self._optimizer = MasterAdamW(self.network, betas=(0.9, 0.95), weight_decay=0.0)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.network.parameters()).device

    def forward_backward(
        self, recipe: Recipe, batch: Batch, token_ids: Sequence[Ids], targets: Sequence[Ids], *, is_forward_only: bool
    ) -> tuple[list[Ids], float]:
        """Scores sequences, and adds the gradient of their loss to the gradient of the next step (blocking).

        Args:
            recipe: recipe that defines the loss.
            batch: N rollouts, with a column for each target of a sequence, in order.
            token_ids: N arrays of int64 [S], which the network reads.
            targets: N arrays of int64 [S] or [S, K], which are predicted at each token.
            is_forward_only: leaves the gradient as it is.

        Returns:
            Log-probs of the targets, N arrays of float32 in the shapes of `targets`, and the loss.
        """
        plan = rows_of(token_ids, targets, self.device)
        if is_forward_only:
            measured = score_batch(self.network, batch, plan)
            loss = coefficients(recipe, batch, measured.logprobs, measured.entropy).loss
        else:
            gradient = Gradient(network=self.network, recipe=recipe, optimizer=self._optimizer, clock=self._clock)
            loss, measured = gradient.of(batch, plan)
        logprobs = measured.logprobs.float().cpu().numpy()
        return [row[: each.size].reshape(each.shape) for row, each in zip(logprobs, targets, strict=True)], loss

    def step(self, settings: AdamSettings) -> float:
        """Makes a step with the sum of all gradients since the last step; returns its norm before clipping (blocking).

        Raises:
            ConfigError: there is no gradient.
            NonFiniteStep: the norm is not finite; the weights stay as they are, and the gradient is discarded.
        """
        if not self._optimizer.has_gradient:
            raise ConfigError("optim_step: there is no gradient; call forward_backward first")
        self._optimizer.configure(settings.betas, settings.eps, settings.weight_decay)
        norm = self._optimizer.step(settings.learning_rate, settings.max_grad_norm)
        self.num_steps += 1
        return norm

    def adapter(self) -> PublishedTensors:
        """A copy of the adapter's tensors, by name."""
        return snapshot(self.network)

    def state(self) -> dict[str, Tensor]:
        """The adapter in float32 and the state of the optimizer, by name, for `load_state`; not a copy."""
        return self._optimizer.state()

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int, *, has_moments: bool) -> None:
        """Replaces the adapter with a saved one, and discards the gradient.

        Args:
            tensors: saved result of `state`.
            num_steps: optimizer steps that were made until then.
            has_moments: loads the saved moments of the optimizer as well; else its present moments stay.

        Raises:
            ConfigError: the saved adapter has other layers or another rank.
        """
        shapes = {f"master.{name}": tensor.shape for name, tensor in published_state(self.network).items()}
        given = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("master.")}
        if shapes != given:
            raise ConfigError("saved weights: adapters of another model, or of another rank")
        kept = {name: each for name, each in tensors.items() if has_moments or name.startswith("master.")}
        self._optimizer.discard()
        self._optimizer.load_state(kept)
        self.num_steps = num_steps


def rows_of(
    token_ids: Sequence[Ids], targets: Sequence[Ids], device: torch.device, budget: int = TOKEN_BUDGET
) -> list[PackedRows]:
    """Packs sequences of similar lengths into micro-batches, one row for each sequence.

    A micro-batch has at most `budget` tokens, padding included; a longer sequence has its own.
    """
    order = sorted(range(len(token_ids)), key=lambda row: -token_ids[row].size)
    parts: list[list[int]] = []
    for row in order:
        longest = token_ids[parts[-1][0]].size if parts else 0
        is_similar = token_ids[row].size >= MIN_FILL * longest
        if parts and is_similar and longest * (len(parts[-1]) + 1) <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [_packed(part, token_ids, targets, device) for part in parts]


def _packed(part: Sequence[int], token_ids: Sequence[Ids], targets: Sequence[Ids], device: torch.device) -> PackedRows:
    longest = max(token_ids[row].size for row in part)
    shape = (len(part), longest)
    ids, segments = np.zeros(shape, np.int64), np.full(shape, PADDING, np.int64)
    columns: list[Ids] = []
    for place, row in enumerate(part):
        size = token_ids[row].size
        ids[place, :size], segments[place, :size] = token_ids[row], 0
        columns.append(np.repeat(np.arange(size), targets[row].size // size))
    counts = [len(each) for each in columns]

    def tensor(values: Ids) -> Tensor:
        return torch.from_numpy(np.array(values)).to(device)  # a copy: what came over the wire is not writable

    return PackedRows(
        token_ids=tensor(ids),
        position_ids=tensor(np.broadcast_to(np.arange(longest), shape)),
        segment_ids=tensor(segments),
        prompt_ids=tensor(np.zeros(shape, np.int64)),
        rows=tensor(np.repeat(np.arange(len(part)), counts)),
        columns=tensor(np.concatenate(columns)),
        targets=tensor(np.concatenate([targets[row].reshape(-1) for row in part])),
        temperature=torch.ones(sum(counts), device=device),
        rollouts=tensor(np.repeat(np.asarray(part, np.int64), counts)),
        positions=tensor(np.concatenate([np.arange(count) for count in counts])),
        members=tuple(sorted(part)),
    )
