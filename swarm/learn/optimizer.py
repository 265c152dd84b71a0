"""AdamW on float32 master weights, of which the network holds a rounded copy, and the learning rate of each step.

Invariant: after every step the network equals its masters rounded to the published dtype, whatever dtype it computes
in; gradients of micro-batches are summed in float32, so small bfloat16 updates and sums are never rounded away.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from swarm.config import LearnerConfig
from swarm.errors import NonFiniteStep
from swarm.model.published_dtype import published_dtype


class MasterAdamW:
    """AdamW over the trainable parameters of a network.

    A parameter that is published in float32 shares its storage with its master: there is no second copy.
    """

    def __init__(self, network: nn.Module, betas: tuple[float, float], weight_decay: float) -> None:
        self._params = {name: param for name, param in network.named_parameters() if param.requires_grad}
        self._published = {name: published_dtype(network, name, param) for name, param in self._params.items()}
        # by name; `grad` is the gradient accumulated since the last step
        self._masters = {
            name: nn.Parameter(_wide(param.detach(), copy=self._published[name] != param.dtype))
            for name, param in self._params.items()
        }
        self._adamw = torch.optim.AdamW(
            self._masters.values(), lr=0.0, betas=betas, weight_decay=weight_decay, foreach=True
        )

    def accumulate(self) -> None:
        """Adds the network's gradients to those of the masters and clears them."""
        for name, param in self._params.items():
            if param.grad is None:
                continue
            gradient = param.grad.to(self._masters[name].dtype)
            master = self._masters[name]
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            param.grad = None

    def gradient(self, param: Tensor) -> Tensor | None:
        """The accumulated gradient of a parameter, in the dtype of its master; None if the parameter is frozen."""
        for name, own in self._params.items():
            if own is param:
                master = self._masters[name]
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
                return master.grad
        return None

    def discard(self) -> None:
        """Drops every gradient without a step."""
        for parameters in (self._params, self._masters):
            for param in parameters.values():
                param.grad = None

    @property
    def has_gradient(self) -> bool:
        """True if a gradient was accumulated since the last step."""
        return any(master.grad is not None for master in self._masters.values())

    def configure(self, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        """Sets the constants of all later steps."""
        for group in self._adamw.param_groups:
            group.update(betas=betas, eps=eps, weight_decay=weight_decay)

    def step(self, learning_rate: float, max_grad_norm: float) -> float:
        """Clips the gradient by its global norm and updates masters and network; returns the norm before clipping.

        Args:
            learning_rate: the rate of this step.
            max_grad_norm: largest global norm; infinite: nothing is clipped.

        Raises:
            NonFiniteStep: the norm is not finite; weights and moments are unchanged, the gradients are dropped.
        """
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = self._norm(gradients)
        if not torch.isfinite(norm):
            self.discard()
            raise NonFiniteStep(f"gradient norm {float(norm)} is not finite")
        scale = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)  # pyright: ignore[reportPrivateUsage]
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.discard()
        self._publish()
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """Masters, moments and update counts by name, for a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            tensors[f"master.{name}"] = master.detach()
            tensors |= {f"{key}.{name}": cast(Tensor, value) for key, value in self._adamw.state[master].items()}
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restores a result of `state`, and the network's rounded copy. Raises KeyError for a missing master."""
        for name, master in self._masters.items():
            with torch.no_grad():
                master.copy_(tensors[f"master.{name}"])
            moments = {
                key: tensors[f"{key}.{name}"].clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{key}.{name}" in tensors
            }
            if moments:
                self._adamw.state[master] = {
                    key: value.to(master.device) if key != "step" else value for key, value in moments.items()
                }
        self._publish()

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        norms = torch._foreach_norm(list(gradients))  # pyright: ignore[reportPrivateUsage]
        return torch.linalg.vector_norm(torch.stack(list(norms)))

    def _publish(self) -> None:
        with torch.no_grad():
            for name, param in self._params.items():
                param.copy_(self._masters[name].to(self._published[name]))


def _wide(tensor: Tensor, *, copy: bool) -> Tensor:
    """The tensor in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=copy)


def learning_rate(config: LearnerConfig, step: int) -> float:
    """The learning rate of the step that makes version `step`, >= 1; a scheduler without state.

    Warm-up is linear, up to the full rate at step W = `warmup_steps`. Step W + 1 has the full rate, too, as in
    `get_cosine_schedule_with_warmup` of transformers. Unless the schedule is constant, all steps from `num_steps` + 1
    on have the rate 0.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (step - 1 - config.warmup_steps) / (config.num_steps - config.warmup_steps))
    left = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * left
