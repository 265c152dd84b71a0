"""Configuration of a node (node.toml): its sections, and which of their combinations can work.

Invariant: a section is frozen and has no unknown keys; a combination that cannot work does not validate, and the
message names the key and the fix.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from swarm.addresses import endpoint_of, is_loopback, is_private_host
from swarm.config.environment_config import EnvironmentConfig
from swarm.config.generation_config import (
    EngineConfig,
    FollowConfig,
    GeneratorConfig,
    ModelConfig,
    ServeConfig,
    WeightsConfig,
)
from swarm.config.learning_config import EvaluationConfig, GuardConfig, LearnerConfig, ReplayConfig
from swarm.config.network_config import CoordinatorLink, DirectoryConfig, EntryConfig, ExchangeConfig
from swarm.config.runtime_config import DiskConfig, FaultConfig, SandboxConfig, TelemetryConfig
from swarm.config.section import Model, NotNegative, Positive, Usual
from swarm.types import RUN_ID_PATTERN, Role

NODE_FILE = "node.toml"  # of a node, in its directory


class NodeConfig(Model):
    """Everything one node needs. File: node.toml."""

    dir: Path = Path("swarm-node")
    """State of the node: key, store, checkpoints, logs."""
    name: str = Field(default="", max_length=40)
    """For people; empty uses the first eight characters of the node id."""
    run_id: str = Field(default="local", pattern=RUN_ID_PATTERN)
    """The swarm to take part in."""
    roles: tuple[Role, ...] = (Role.TRAINER, Role.GENERATOR)
    """Which loops run."""
    seed: NotNegative = 0
    """Seed of task choice, sampling and draws."""
    worker: Literal["process", "inline"] = "process"
    """Trainer and generator in a process of their own, or in threads of the agent (tiny models)."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Where models are held: `cpu`, `cuda`, `cuda:1`; `auto` takes the first GPU where torch sees one. vLLM finds its
    own, and so does each of several learner processes."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of this node's passes: learner, transformers and vLLM engine, evaluation. It may differ between nodes of a
    run, whose versions are the same all the same: passes use exactly the values that are published in `model.dtype`.
    `auto` measures which is faster here (a second, once for a machine and a model; on a GPU bfloat16 where it has it),
    and goes on with the dtype of the checkpoint where there is one."""
    num_threads: Annotated[Positive, Usual("..32", "pace")] = 1
    """Threads of a computation, in every process of the node: torch, OpenMP, BLAS. Learner and generator compute at the
    same time, each with so many; tokenizers, and each process that scores answers, have one."""
    niceness: Annotated[int, Field(ge=0, le=19), Usual("..10", "pace")] = 0
    """How far all processes of the node stand back where others of the machine want the CPU; 19 the farthest."""
    environments: tuple[EnvironmentConfig, ...] = ()
    """Every environment of the run."""
    model: ModelConfig = ModelConfig()
    generator: GeneratorConfig = GeneratorConfig()
    engine: EngineConfig = EngineConfig()
    serve: ServeConfig = ServeConfig()
    follow: FollowConfig = FollowConfig()
    weights: WeightsConfig = WeightsConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    guard: GuardConfig = GuardConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    directory: DirectoryConfig = DirectoryConfig()
    coordinator: CoordinatorLink = CoordinatorLink()
    entry: EntryConfig = EntryConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sandbox: SandboxConfig = SandboxConfig()
    disk: DiskConfig = DiskConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    faults: FaultConfig = FaultConfig()

    @property
    def is_alone(self) -> bool:
        """Whether the node looks for no other: what it makes never leaves it."""
        return self.directory.kind == "none" and not self.exchange.anchors

    @property
    def own_environments(self) -> frozenset[str]:
        """Names of those whose episodes never leave the node."""
        return frozenset(each.name for each in self.environments if each.exchange == "own")

    @property
    def is_private(self) -> bool:
        """Whether the groups of every node that reaches this one count in full, as `entry.established` says."""
        entry = self.entry
        if entry.established != "auto" or entry.kind != "open" or entry.members:
            return entry.established == "everybody"
        return all(is_private_host(endpoint.rpartition(":")[0]) for endpoint in self._endpoints)

    @property
    def is_on_one_machine(self) -> bool:
        """True where every address that the node listens at, or knows of others, is a loopback one."""
        endpoints = [*self._endpoints, self.exchange.listen, endpoint_of(self.directory.listen)]
        endpoints += [anchor.partition("@")[2] for anchor in self.exchange.anchors]
        return all(is_loopback(endpoint.rpartition(":")[0]) for endpoint in endpoints)

    @property
    def _endpoints(self) -> list[str]:
        """Addresses at which others find this node, and at which it first looks for others."""
        maddrs = (*self.directory.bootstrap, *self.directory.announce)
        own = self.exchange.advertise or self.exchange.listen
        return [*self.coordinator.addresses, *map(endpoint_of, maddrs), own]

    @model_validator(mode="after")
    def _compute_dtype_holds_values(self) -> "NodeConfig":
        if self.compute_dtype == "bfloat16" and self.model.dtype == "float32":
            raise ValueError(
                'compute_dtype: bfloat16 would round what the run publishes in model.dtype = "float32"; set it to auto'
            )
        return self

    @model_validator(mode="after")
    def _roles_can_work(self) -> "NodeConfig":
        if Role.TRAINER not in self.roles and self.weights.publish:
            raise ValueError("weights.publish: a node without the trainer role has no versions; set it to false")
        if self.learner.num_processes > 1 and self.worker == "inline":
            raise ValueError('learner.num_processes: threads of the agent are one process; set worker = "process"')
        if self.serve.listen and (Role.GENERATOR not in self.roles or self.engine.kind != "transformers"):
            raise ValueError(
                'serve.listen: needs the generator role and engine.kind = "transformers"; `swarm serve` serves what '
                "any node has saved"
            )
        if Role.TRAINER not in self.roles and self.learner.deterministic:
            raise ValueError("learner.deterministic: needs the trainer role")
        alone = Role.TRAINER in self.roles and Role.GENERATOR not in self.roles and not self.weights.publish
        if alone and self.replay.local_groups > 0:
            raise ValueError(
                "roles: without the generator role, groups of the own policy come from nodes that follow it; "
                "set weights.publish, or replay.local_groups to 0"
            )
        follows = Role.TRAINER not in self.roles and Role.GENERATOR in self.roles
        asked = self.generator.env_weights or {each.name for each in self.environments}
        if follows and (wasted := sorted(self.own_environments & set(asked))):
            raise ValueError(
                f'environments: {wasted[0]!r} has exchange "own", so its episodes reach no other node, and this node, '
                "without the trainer role, learns from none; add the role, or name the other environments alone in "
                "generator.env_weights"
            )
        return self

    @model_validator(mode="after")
    def _names_exist(self) -> "NodeConfig":
        names = [env.name for env in self.environments]
        if len(set(names)) != len(names):
            raise ValueError(f"environments: names must differ, got {names}")
        for section, used in (
            ("generator.env_weights", self.generator.env_weights),
            ("evaluation.environments", self.evaluation.environments),
        ):
            unknown = sorted(set(used) - set(names))
            if unknown:
                raise ValueError(f"{section}: unknown environment {unknown[0]!r}; known: {names}")
        return self
