"""The two files: node.toml and coordinator.toml, with the sections that are about a process.

Invariant: a combination that cannot work does not validate; the message names the key and the fix.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from swarm.config.base import Endpoint, Model, NotNegative, Positive, PositiveFloat
from swarm.config.generating import (
    EngineConfig,
    EnvironmentConfig,
    FollowConfig,
    GeneratorConfig,
    ModelConfig,
    WeightsConfig,
)
from swarm.config.learning import EvaluationConfig, GuardConfig, LearnerConfig, ReplayConfig
from swarm.config.network import CoordinatorLink, DirectoryConfig, ExchangeConfig
from swarm.types import Role


class SandboxConfig(Model):
    """Limits of the process that scores answers."""

    cpu_s: PositiveFloat = 20.0
    """CPU seconds of one scoring process before it is replaced."""
    timeout_s: PositiveFloat = 5.0
    """Wall seconds for one group."""
    memory_bytes: Positive = 1024 * 2**20
    """Address space."""


class TelemetryConfig(Model):
    """Where figures go."""

    metrics_listen: str = ""
    """host:port of /metrics; empty: off."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least level that is logged."""
    log_format: Literal["console", "json"] = "console"
    """Human or machine."""
    tensorboard: bool = False
    """Write event files to <dir>/tensorboard."""
    wandb_project: str = ""
    """Weights & Biases project; empty: off."""


class FaultConfig(Model):
    """Knobs of simulations: they make this node worse than its machine."""

    slow_factor: Annotated[float, Field(ge=1)] = 1.0
    """Generation and steps take this many times as long (an awaited delay, no CPU)."""
    latency_ms: Annotated[float, Field(ge=0)] = 0.0
    """Delay before each group from a peer is looked at."""


class NodeConfig(Model):
    """Everything one node needs. File: node.toml."""

    dir: Path = Path("swarm-node")
    """State of the node: key, store, checkpoints, logs."""
    name: str = Field(default="", max_length=40)
    """For people; empty uses the first eight characters of the node id."""
    run_id: str = Field(default="local", pattern=r"^[A-Za-z0-9._-]{1,40}$")
    """The swarm to take part in."""
    roles: tuple[Role, ...] = (Role.TRAINER, Role.GENERATOR)
    """Which loops run."""
    seed: NotNegative = 0
    """Of task choice, sampling and draws."""
    worker: Literal["process", "inline"] = "process"
    """Trainer and generator in a process of their own, or in threads of the agent (tiny models)."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Where models are held: `cpu`, `cuda`, `cuda:1`; `auto` takes the first GPU where torch sees one. vLLM finds its
    own, and so does each of several learner processes."""
    num_threads: Positive = 1
    """torch threads of the worker."""
    environments: tuple[EnvironmentConfig, ...] = ()
    """Every environment of the run."""
    model: ModelConfig = ModelConfig()
    generator: GeneratorConfig = GeneratorConfig()
    engine: EngineConfig = EngineConfig()
    follow: FollowConfig = FollowConfig()
    weights: WeightsConfig = WeightsConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    guard: GuardConfig = GuardConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    directory: DirectoryConfig = DirectoryConfig()
    coordinator: CoordinatorLink = CoordinatorLink()
    evaluation: EvaluationConfig = EvaluationConfig()
    sandbox: SandboxConfig = SandboxConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    faults: FaultConfig = FaultConfig()

    @model_validator(mode="after")
    def _roles_can_work(self) -> "NodeConfig":
        if Role.TRAINER not in self.roles and self.weights.publish:
            raise ValueError("weights.publish: a node without the trainer role has no versions; set it to false")
        if self.learner.num_processes > 1 and self.worker == "inline":
            raise ValueError('learner.num_processes: threads of the agent are one process; set worker = "process"')
        if Role.TRAINER not in self.roles and self.learner.deterministic:
            raise ValueError("learner.deterministic: needs the trainer role")
        alone = Role.TRAINER in self.roles and Role.GENERATOR not in self.roles and not self.weights.publish
        if alone and self.replay.local_groups > 0:
            raise ValueError(
                "roles: without the generator role, groups of the own policy come from nodes that follow it; "
                "set weights.publish, or replay.local_groups to 0"
            )
        return self

    @model_validator(mode="after")
    def _names_exist(self) -> "NodeConfig":
        names = [env.name for env in self.environments]
        if len(set(names)) != len(names):
            raise ValueError(f"environments: names must differ, got {names}")
        for section, used in (
            ("generator.asks", self.generator.asks),
            ("evaluation.environments", self.evaluation.environments),
        ):
            unknown = sorted(set(used) - set(names))
            if unknown:
                raise ValueError(f"{section}: unknown environment {unknown[0]!r}; known: {names}")
        return self


class CoordinatorConfig(Model):
    """Everything the coordinator needs. File: coordinator.toml."""

    dir: Path = Path("swarm-coordinator")
    """State: key, SQLite database."""
    run_id: str = Field(default="local", pattern=r"^[A-Za-z0-9._-]{1,40}$")
    """Name of the run."""
    listen: str = "127.0.0.1:0"
    """host:port of the gRPC service."""
    http_listen: str = "127.0.0.1:0"
    """host:port of /metrics, /healthz and the status page."""
    advertise: Endpoint = ""
    """host:port in the join link; empty uses the listening address."""
    lease_s: PositiveFloat = 30.0
    """A node without a heartbeat for this long is gone."""
    directory: DirectoryConfig = DirectoryConfig()
    node: NodeConfig = NodeConfig()
    """What a joining node starts from: environments, model, limits and recommended recipe."""
    telemetry: TelemetryConfig = TelemetryConfig()
