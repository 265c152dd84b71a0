"""Configuration: one TOML file per process, frozen models, `--set a.b=c` on top.

Invariant: an unknown key, a wrong type or an impossible combination stops the process before it
starts, with an error that names the key. Defaults run on a laptop.
"""

from swarm.config.base import Model
from swarm.config.generating import (
    EngineConfig,
    EnvironmentConfig,
    FollowConfig,
    GeneratorConfig,
    ModelConfig,
    WeightsConfig,
)
from swarm.config.learning import EvaluationConfig, GuardConfig, LearnerConfig, ReplayConfig
from swarm.config.load import apply_overrides, explained, has_section, load_config, parse_config
from swarm.config.network import CoordinatorLink, DirectoryConfig, ExchangeConfig
from swarm.config.process import CoordinatorConfig, FaultConfig, NodeConfig, SandboxConfig, TelemetryConfig

__all__ = [
    "CoordinatorConfig",
    "CoordinatorLink",
    "DirectoryConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "ExchangeConfig",
    "FaultConfig",
    "FollowConfig",
    "GeneratorConfig",
    "GuardConfig",
    "LearnerConfig",
    "Model",
    "ModelConfig",
    "NodeConfig",
    "ReplayConfig",
    "SandboxConfig",
    "TelemetryConfig",
    "WeightsConfig",
    "apply_overrides",
    "explained",
    "has_section",
    "load_config",
    "parse_config",
]
