"""Swarm Trainer: asynchronous, decentralized reinforcement learning of language models."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`swarm.train` and `swarm.Training`, imported when first asked for: whatever imports us stays light."""
    if name in ("train", "Training"):
        return getattr(importlib.import_module("node.api"), name)
    raise AttributeError(f"module 'swarm' has no attribute {name!r}")
