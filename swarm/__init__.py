"""Swarm Trainer: asynchronous, decentralized reinforcement learning of language models."""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "train": "node.python_api.training",
    "Training": "node.python_api.training",
    "Callback": "node.python_api.training",
    "Metrics": "node.python_api.step_metrics",
    "agent_run": "node.python_api.agent_run",
    "AgentRun": "node.python_api.agent_run",
    "connect": "node.python_api.rollout_source",
    "trl_columns": "node.python_api.rollout_source",
    "RolloutSource": "node.python_api.rollout_source",
    "SourcedGroup": "node.python_api.rollout_source",
}


def __getattr__(name: str) -> Any:
    """Imports a name of the Python API on first access, so that importing `swarm` stays fast."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'swarm' has no attribute {name!r}")
