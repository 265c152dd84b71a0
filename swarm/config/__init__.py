"""Configuration: one TOML file per process, read into frozen models, with `--set a.b=c` overrides.

Invariant: an unknown key, a wrong type or an impossible combination stops the process at its start, with an error that
names the key. Defaults run on a laptop.
"""

from swarm.config.environment_config import EnvironmentConfig
from swarm.config.generation_config import EngineConfig, FollowConfig, GeneratorConfig, ModelConfig, WeightsConfig
from swarm.config.learning_config import (
    SAFE_RECIPE,
    EvaluationConfig,
    GuardConfig,
    GuardLimits,
    LearnerConfig,
    ReplayConfig,
    WarmUpConfig,
)
from swarm.config.load_config import (
    apply_overrides,
    config_file,
    explained,
    has_section,
    inline_value,
    load_config,
    parse_config,
    sources_of,
    to_toml,
)
from swarm.config.network_config import (
    MAX_ANCHORS,
    MAX_MEMBERS,
    Anchor,
    CoordinatorLink,
    DirectoryConfig,
    EntryConfig,
    ExchangeConfig,
)
from swarm.config.node_config import (
    NODE_FILE,
    CoordinatorConfig,
    DiskConfig,
    FaultConfig,
    NodeConfig,
    SandboxConfig,
    TelemetryConfig,
)
from swarm.config.section import Model

__all__ = [
    "MAX_ANCHORS",
    "MAX_MEMBERS",
    "NODE_FILE",
    "SAFE_RECIPE",
    "Anchor",
    "CoordinatorConfig",
    "CoordinatorLink",
    "DirectoryConfig",
    "DiskConfig",
    "EngineConfig",
    "EntryConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "ExchangeConfig",
    "FaultConfig",
    "FollowConfig",
    "GeneratorConfig",
    "GuardConfig",
    "GuardLimits",
    "LearnerConfig",
    "Model",
    "ModelConfig",
    "NodeConfig",
    "ReplayConfig",
    "SandboxConfig",
    "TelemetryConfig",
    "WarmUpConfig",
    "WeightsConfig",
    "apply_overrides",
    "config_file",
    "explained",
    "has_section",
    "inline_value",
    "load_config",
    "parse_config",
    "sources_of",
    "to_toml",
]
