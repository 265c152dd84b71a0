"""Learnable Gaussian noise at the input of every layer, for methods with a perturbed policy in the ratio's numerator.

Invariant: the noise is a function of (update, micro-batch, layer), so a batch that is scored twice is scored by the
same policy, and checkpoint and draws still reproduce the learner. Outside `perturb` the network is not perturbed.
"""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from swarm.errors import ConfigError
from swarm.learn.ranks import Ranks
from swarm.objectives.part import Noise


class LayerNoise:
    """Gaussian noise on the layers' inputs, with one standard deviation per layer that Adam trains.

    The deviations are not weights of the policy: they are in checkpoints, but neither published nor in the digest.
    Gradient clipping leaves out their gradient, since Adam's steps hardly depend on its scale.
    """

    def __init__(self, network: nn.Module, settings: Noise, ranks: Ranks) -> None:
        """`ranks` have prepared `network`. Raises ConfigError if its layers cannot be found."""
        self._layers, self._ranks = layers_of(network), ranks
        logs = torch.full((len(self._layers),), math.log(settings.std), device=ranks.device)
        self.log_std = nn.Parameter(logs)  # float32 [layers], natural log
        # Without weight decay: that would pull the logarithm to 0, a deviation of 1.
        self._adam = torch.optim.Adam([self.log_std], lr=settings.rate)

    @property
    def num_updates(self) -> int:
        """Number of Adam steps on the deviations so far."""
        return int(self._adam.state[self.log_std].get("step", 0))

    @contextmanager
    def perturb(self, part: int) -> Generator[None]:
        """Context whose forward passes see the noise of micro-batch number `part` of the coming update."""
        handles = [
            layer.register_forward_pre_hook(partial(self._add, part, number), with_kwargs=True)
            for number, layer in enumerate(self._layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def step(self) -> None:
        """Makes one Adam step on the deviations, from the summed gradients of all ranks."""
        if self.log_std.grad is not None:
            summed = [self._ranks.all_sum(value) for value in self.log_std.grad.tolist()]
            self.log_std.grad = torch.tensor(summed, dtype=torch.float32, device=self.log_std.device)
            self._adam.step()
        self.discard()

    def discard(self) -> None:
        """Drops the gradient of the deviations without a step."""
        self.log_std.grad = None

    def state(self) -> dict[str, Tensor]:
        """Logarithms of the deviations and their Adam moments, for a checkpoint."""
        moments = {f"noise.{name}": cast(Tensor, value) for name, value in self._adam.state[self.log_std].items()}
        return {"noise.log_std": self.log_std.detach(), **moments}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores a result of `state`. Raises KeyError if a tensor is missing."""
        with torch.no_grad():
            self.log_std.copy_(tensors["noise.log_std"])
        if "noise.step" in tensors:
            moments = {name: tensors[f"noise.{name}"].to(self.log_std.device) for name in ("exp_avg", "exp_avg_sq")}
            self._adam.state[self.log_std] = {"step": tensors["noise.step"].clone(), **moments}

    def _add(self, part: int, number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's arguments with noise on the hidden states."""
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        seed = int(np.random.SeedSequence((self.num_updates, part, number)).generate_state(1)[0])
        generator = torch.Generator(device=hidden.device).manual_seed(seed)
        noise = torch.randn(hidden.shape, generator=generator, device=hidden.device, dtype=torch.float32)
        noisy = hidden + (self.log_std[number].exp() * noise).to(hidden.dtype)
        return ((noisy, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": noisy})


def layers_of(network: nn.Module) -> list[nn.Module]:
    """The decoder layers of a Hugging Face causal language model, in order. Raises ConfigError if not found."""
    model = cast(Any, network)
    for modules in model.base_model.children():
        if isinstance(modules, nn.ModuleList) and len(modules) == model.config.num_hidden_layers:
            return list(modules)
    raise ConfigError(
        f"learner.recipe: {type(network).__name__} has no list of {model.config.num_hidden_layers} layers "
        "whose input could be perturbed; choose a recipe without this need"
    )
