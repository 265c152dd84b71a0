"""Swarm Trainer: asynchronous, decentralized reinforcement learning of language models."""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "train": "node.api",
    "Training": "node.api",
    "Callback": "node.callbacks",
    "Metrics": "node.callbacks",
    "connect": "node.rollout_source",
    "trl_columns": "node.rollout_source",
    "RolloutSource": "node.rollout_source",
    "SourcedGroup": "node.rollout_source",
}


def __getattr__(name: str) -> Any:
    """The names for Python programs, imported when first asked for: whatever imports us stays light."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'swarm' has no attribute {name!r}")
