"""Gradient checkpointing: a layer's activations are computed again in the backward pass instead of being kept.

Invariant: log-probs and gradients are what they are without it; only memory and time differ.

Source: arXiv:1604.06174.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from swarm.errors import ConfigError


def checkpoint_layers(network: nn.Module) -> None:
    """Makes each decoder layer keep only its input for the backward pass.

    Hugging Face's layers ask for training mode, and forget a cache in it: a layer alone, not what is inside of it, is
    in training mode while gradients are on, so that the same network still generates with a cache, and nothing
    random is computed twice.

    Raises:
        ConfigError: the architecture has no layers that can do this.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"learner.gradient_checkpointing: {type(network).__name__} has no layers that can be computed again; set "
            "it to false"
        )
    for layer in cast("list[Any]", layers):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        layer.register_forward_pre_hook(_train_with_gradients)


def _train_with_gradients(layer: nn.Module, _: object) -> None:
    layer.training = torch.is_grad_enabled()
