"""Gradient checkpointing: recomputes a layer's activations in the backward pass instead of keeping them.

Invariant: log-probs and gradients are the same as without checkpointing; only memory and time differ.

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

    Hugging Face's layers checkpoint only in training mode, in which they ignore a cache. So each layer, but no module
    inside it, is in training mode while gradients are on: the network still generates with a cache, and dropout stays
    off.

    Raises:
        ConfigError: the architecture has no layer that supports checkpointing.
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
