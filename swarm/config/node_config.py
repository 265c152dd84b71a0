"""Configuration of a process: node.toml and coordinator.toml, and which combinations of their keys can work.

Invariant: a combination that cannot work does not validate, and the message names the key and the fix. The
configuration for joining nodes is a whole node configuration, and is validated as one.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

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
from swarm.config.learning_config import EvaluationConfig, GuardConfig, LearnerConfig, ReplayConfig, WarmUpConfig
from swarm.config.network_config import (
    CoordinatorLink,
    DirectoryConfig,
    Endpoint,
    EntryConfig,
    ExchangeConfig,
    RelayPort,
)
from swarm.config.section import Listening, ListeningOrOff, Model, NotNegative, Positive, PositiveFloat, Usual
from swarm.printable import one_line
from swarm.types import RUN_ID_PATTERN, Role

COORDINATOR_FILE = "coordinator.toml"  # of a coordinator, where its directory holds one
NODE_FILE = "node.toml"  # of a node, in its directory
AGENT_RUNS = "agent-runs"  # environment of what agents did with a served model; no section can have this name


class SandboxConfig(Model):
    """Limits of the process that scores answers."""

    removed: ClassVar = {"cpu_s": 20.0, "replay_s_per_minute": 15.0}

    timeout_s: Annotated[PositiveFloat, Usual("0.5..60", "pace")] = 5.0
    """Wall-clock seconds for the answers of one group; most CPU seconds that an environment may declare for one."""
    memory_bytes: Annotated[Positive, Usual("128e6..", "pace")] = 1024 * 2**20
    """Largest address space, bytes."""


class DiskConfig(Model):
    """Room and checkpoints on this machine's disk."""

    removed: ClassVar = {"checkpoint_bytes_per_s": 2_000_000}

    max_bytes: NotNegative = 0
    """Most bytes that `dir` may take. Checkpoints and what else has a fixed size come first; exchange.store_bytes and
    weights.store_bytes are lowered to what is left. `swarm check` shows the parts. 0: those two alone bound it."""
    checkpoint_at_end: bool = True
    """Write one after the last step, and when the node is stopped. Without it a restart makes the steps since the last
    one again from the draw journal, all of them where there is none."""
    kept_checkpoints: Annotated[int, Field(ge=1, le=16)] = 2
    """Newest checkpoints that stay; while one is written the disk has one more. With 1 there is none before a damaged
    one."""


class TelemetryConfig(Model):
    """Metrics, logs and event files."""

    metrics_listen: ListeningOrOff = ""
    """host:port of /metrics; empty: off."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is logged."""
    log_format: Literal["console", "json"] = "console"
    """`console` for people, `json` for machines."""
    tensorboard: bool = False
    """Write event files to <dir>/tensorboard."""
    wandb_project: str = ""
    """Weights & Biases project; empty: off."""
    trackio_project: str = ""
    """Trackio project on this machine, with episodes of evaluations as traces and what `swarm why` finds as alerts;
    empty: off."""


class FaultConfig(Model):
    """Faults that simulations inject: they make this node slower than its machine."""

    slow_factor: Annotated[float, Field(ge=1), Usual("..1", "pace")] = 1.0
    """Generation and steps take this many times as long (an awaited delay, no CPU)."""
    latency_ms: Annotated[float, Field(ge=0), Usual("..0", "exchange")] = 0.0
    """Delay before each group from a peer is looked at."""


class NodeConfig(Model):
    """Everything one node needs. File: node.toml."""

    dir: Path = Path("swarm-node")
    """State of the node: key, store, checkpoints, logs."""
    name: str = Field(default="", max_length=40)
    """For people, and shown to the run; empty uses the name of the node's directory."""
    run_id: str = Field(default="local", pattern=RUN_ID_PATTERN)
    """The swarm to take part in."""
    roles: tuple[Role, ...] = (Role.TRAINER, Role.GENERATOR)
    """Loops that run."""
    seed: NotNegative = 0
    """Seed of task choice, sampling and draws."""
    worker: Literal["process", "inline"] = "process"
    """Trainer and generator in a process of their own, or in threads of the agent (tiny models)."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device of the models: `cpu`, `cuda`, `cuda:1`; `auto` takes the first GPU where torch sees one. vLLM finds its
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
    """Niceness of all processes of the node: at 19 they stand back farthest where others want the CPU."""
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
    warm_up: WarmUpConfig = WarmUpConfig()
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
    def shown_name(self) -> str:
        """Name for people: `name`, else the name of the node's directory."""
        return self.name or one_line(self.dir.resolve().name)[:40]

    @property
    def is_alone(self) -> bool:
        """True if the node looks for no other node: it has no directory and no anchors."""
        return self.directory.kind == "none" and not self.exchange.anchors

    @property
    def own_environments(self) -> frozenset[str]:
        """Names of the environments whose episodes never leave the node."""
        return frozenset(each.name for each in self.environments if each.exchange == "own") | {AGENT_RUNS}

    @property
    def learns_from_agents(self) -> bool:
        """True if runs of agents that call the served policy become rollouts."""
        return bool(self.serve.listen) and any(key.learn for key in self.serve.keys)

    @property
    def may_have_turns(self) -> bool:
        """True if an episode may have several turns."""
        return self.learns_from_agents or any(each.may_have_turns for each in self.environments)

    @property
    def is_private(self) -> bool:
        """True if the groups of every node that reaches this one count in full, by `entry.established`."""
        entry = self.entry
        if entry.established != "auto" or entry.kind != "open" or entry.members:
            return entry.established == "everybody"
        return all(is_private_host(endpoint.rpartition(":")[0]) for endpoint in self._endpoints)

    @property
    def is_on_one_machine(self) -> bool:
        """True if all configured addresses, at which the node listens or finds others, are loopback addresses."""
        endpoints = [*self._endpoints, self.exchange.listen, endpoint_of(self.directory.listen)]
        endpoints += [anchor.partition("@")[2] for anchor in self.exchange.anchors]
        return all(is_loopback(endpoint.rpartition(":")[0]) for endpoint in endpoints)

    @property
    def _endpoints(self) -> list[str]:
        """host:port of the coordinator, the bootstrap peers, the announced addresses and this node."""
        maddrs = (*self.directory.bootstrap, *self.directory.announce)
        own = self.exchange.advertise or self.exchange.listen
        return [*self.coordinator.addresses, *map(endpoint_of, maddrs), own]

    @model_validator(mode="after")
    def _rate_of_the_model(self) -> "NodeConfig":
        """One default rate whichever command starts the node: `swarm train`, `swarm join`, a file, a manifest."""
        if "learning_rate" not in self.learner.model_fields_set:
            rate = {"learning_rate": self.model.usual_rate}
            object.__setattr__(self, "learner", self.learner.model_copy(update=rate))  # frozen for everybody else
        return self

    @model_validator(mode="after")
    def _can_work(self) -> "NodeConfig":
        if self.compute_dtype == "bfloat16" and self.model.dtype == "float32":
            raise ValueError(
                'compute_dtype: bfloat16 would round what the run publishes in model.dtype = "float32"; set it to auto'
            )
        if Role.TRAINER not in self.roles and self.weights.publish:
            raise ValueError("weights.publish: a node without the trainer role has no versions; set it to false")
        if self.learner.num_processes > 1 and self.worker == "inline":
            raise ValueError('learner.num_processes: threads of the agent are one process; set worker = "process"')
        if self.serve.listen and (Role.GENERATOR not in self.roles or self.engine.kind != "transformers"):
            raise ValueError(
                'serve.listen: needs the generator role and engine.kind = "transformers"; `swarm serve` serves what '
                "any node has saved"
            )
        if self.learns_from_agents and Role.TRAINER not in self.roles:
            raise ValueError(
                "serve.keys: runs of agents are learned from by the node that serves; add the trainer role"
            )
        if self.learns_from_agents and self.learner.deterministic:
            raise ValueError("serve.keys: no run with agents is deterministic; set learner.deterministic = false")
        if Role.TRAINER not in self.roles and self.learner.deterministic:
            raise ValueError("learner.deterministic: needs the trainer role")
        if self.warm_up.answers and (Role.TRAINER not in self.roles or self.learner.num_processes > 1):
            raise ValueError(
                "warm_up.answers: needs the trainer role and learner.num_processes = 1; a node that follows a trainer "
                'gets its weights from there. Set it to ""'
            )
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


class CoordinatorConfig(Model):
    """Everything the coordinator needs. File: coordinator.toml."""

    dir: Path = Path("swarm-coordinator")
    """State: key, SQLite database."""
    run_id: str = Field(default="local", pattern=RUN_ID_PATTERN)
    """Name of the run."""
    listen: Listening = "127.0.0.1:0"
    """host:port of the gRPC service."""
    http_listen: Listening = "127.0.0.1:0"
    """host:port of /metrics, /healthz and the status page."""
    advertise: Endpoint = ""
    """host:port in the join link; empty uses the listening address."""
    lease_s: PositiveFloat = 30.0
    """A node without a heartbeat for this long is gone."""
    relay_reservations: Annotated[int, Field(ge=0, le=4096)] = 128
    """Nodes that cannot be dialled for which the coordinator passes on connections, whose content it cannot read, while
    no node does; 0: none."""
    relay_bytes_per_s: Positive = 8 * 2**20
    """Most bytes a second that it passes on for them, both directions together."""
    relay_port: RelayPort = 0
    """TCP port at which it passes their bytes on from socket to socket: 443, or 1024 to 65535, the same for others as
    here; 0: a free one, another one at each start. Where others do not reach it, bytes go by `listen`, at several times
    the work."""
    manifest_days: Annotated[float, Field(ge=0, le=3650)] = 0.0
    """Days after which a signed manifest is refused; it is signed anew when half of them are over. 0: never."""
    next_key: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Node id of a second key, kept elsewhere (`swarm keys new`), that takes over when this coordinator's is lost or
    stolen (`swarm-coordinator rotate`). It is named once: nodes hold to the first one that they see."""
    directory: DirectoryConfig = DirectoryConfig()
    node: NodeConfig = NodeConfig()
    """Configuration that a joining node starts from: environments, model, limits and recommended recipe."""
    telemetry: TelemetryConfig = TelemetryConfig()
