"""Sizes of a run by arithmetic alone: bytes of a worker's memory, of a group and of a version.

Invariant: nothing is measured here, and only config.json of a model is read. Shape letters: L layers, H hidden size, I
width of the feed-forward layers, V vocabulary, T trained parameters.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from swarm.config import ModelConfig, NodeConfig
from swarm.model.source import positions_of, read_model_config
from swarm.types import Role

LIKE_LLAMA: Final = ("llama", "mistral", "qwen2", "qwen3", "smollm3")  # model types whose parameters are counted here
PROCESS_BYTES: Final = 440 * 2**20  # of a worker without a model: Python, torch, transformers; measured, CPU
CONTEXT_BYTES: Final = 700 * 2**20  # of a GPU beside tensors: driver, libraries and rounding; not measured by us
CHUNK_ELEMENTS: Final = 16 * 2**20  # logits of the output layer at a time, `swarm.learn.fused_head`
MASTER_BYTES: Final = 4  # of a parameter; as many of each of AdamW's two moments, and of its gradient
CHECKPOINT_BYTES: Final = 3 * MASTER_BYTES  # of a trained parameter: its master and both moments
LOGPROB_BYTES: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Shape of a decoder, for counting parameters. Example: SmolLM2-135M has L 30, H 576, I 1536, V 49152."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    is_tied: bool  # the output layer is the embedding
    has_qkv_bias: bool = False
    has_qk_norm: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "ModelShape | None":
        """Shape in a Hugging Face config.json; None for an architecture that is not counted here."""
        kind = settings.get("model_type")
        try:
            hidden, heads = int(settings["hidden_size"]), int(settings["num_attention_heads"])
            if kind not in LIKE_LLAMA or settings.get("mlp_bias"):
                return None
            return cls(
                num_layers=int(settings["num_hidden_layers"]),
                hidden_size=hidden,
                intermediate_size=int(settings["intermediate_size"]),
                vocab_size=int(settings["vocab_size"]),
                num_heads=heads,
                num_kv_heads=int(settings.get("num_key_value_heads") or heads),
                head_size=int(settings.get("head_dim") or hidden // heads),
                is_tied=bool(settings.get("tie_word_embeddings", False)),
                has_qkv_bias=kind == "qwen2",
                has_qk_norm=kind == "qwen3",
            )
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def query_size(self) -> int:
        """Width of all queries of a token."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.num_kv_heads * self.head_size

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each linear layer of a decoder layer, by name."""
        h, i, q, kv = self.hidden_size, self.intermediate_size, self.query_size, self.kv_size
        attention = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h)}
        return {**attention, "gate_proj": (h, i), "up_proj": (h, i), "down_proj": (i, h)}

    @property
    def num_parameters(self) -> int:
        """Number of all parameters, tied ones counted once."""
        per_layer = sum(inputs * outputs for inputs, outputs in self.linear_layers.values()) + 2 * self.hidden_size
        per_layer += (self.query_size + 2 * self.kv_size) * self.has_qkv_bias + 2 * self.head_size * self.has_qk_norm
        embeddings = self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)
        return self.num_layers * per_layer + embeddings + self.hidden_size

    def num_adapter_parameters(self, rank: int, targets: Collection[str] = ()) -> int:
        """Number of parameters of adapters on the named linear layers; without names on all but the output layer."""
        adapted = (sum(sizes) for name, sizes in self.linear_layers.items() if not targets or name in targets)
        return self.num_layers * rank * sum(adapted)

    def num_trained(self, config: ModelConfig) -> int:
        """Number of parameters that the learner trains: all of them, or the adapters."""
        rank = config.lora_rank
        return self.num_adapter_parameters(rank, config.lora_targets) if rank else self.num_parameters

    def activation_bytes(self, value_bytes: int) -> int:
        """Bytes that a token's forward pass keeps for the backward pass, with values of `value_bytes` each.

        Norms keep their input in float32 and two results; attention its queries, its keys and values for each query
        head, and its result; the feed-forward layer four values of its width.
        """
        norms = 2 * self.hidden_size * (4 + 2 * value_bytes)
        attention = 4 * value_bytes * self.query_size
        return self.num_layers * (norms + attention + 4 * value_bytes * self.intermediate_size)

    def cache_bytes(self, value_bytes: int) -> int:
        """Bytes of the keys and values of a token."""
        return 2 * self.num_layers * self.kv_size * value_bytes


def read_shape(config: ModelConfig) -> ModelShape | None:
    """Shape of a configured model, from its config.json; None for one that is not counted here. Raises ConfigError."""
    return ModelShape.of(read_model_config(config))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of a worker's memory by use: the first block is held always, parts of the second in turn (see `peak`)."""

    process: int
    weights: int  # of the learner
    engine_weights: int  # the generator's own copy
    published: int  # the newest version, which does not change while the next one is made
    reference: int  # the weights before training, where the recipe asks for them
    masters: int
    moments: int
    kv_cache: int

    gradients: int  # float32 sums, and those of the newest pass in the compute dtype
    activations: int  # of the largest forward pass, with the chunk of logits
    optimizer_scratch: int
    checkpoint: int  # the copy of masters and moments that is written

    @property
    def held(self) -> int:
        """Bytes that are held always once a step was made."""
        steady = self.process + self.weights + self.engine_weights + self.published + self.reference
        return steady + self.masters + self.moments + self.kv_cache

    @property
    def device_peak(self) -> int:
        """Most bytes in the memory of a GPU: `peak` without process and checkpoint copy, which the host holds.

        The engine's old weights count as well: it keeps them while new ones are checked, perhaps during a step.
        """
        held, backward = self.held - self.process + self.engine_weights, self.gradients + self.activations
        return held + max(backward, self.gradients + self.optimizer_scratch)

    @property
    def beside_device(self) -> int:
        """Most bytes in the machine's memory if a GPU holds the models: models are loaded here, checkpoints pass."""
        return self.process + max(self.weights, self.checkpoint)

    @property
    def peak(self) -> int:
        """Most bytes: in the backward pass, in the optimizer, or while a checkpoint is written."""
        backward = self.gradients + self.activations
        return self.held + max(backward, self.gradients + self.optimizer_scratch, self.checkpoint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Numbers of tokens that determine memory, as the configuration bounds them."""

    prompt: int  # of the longest prompt
    response: int  # of the longest response or episode

    def group(self, size: int) -> int:
        """Tokens of a group in a forward pass, whose rollouts share one copy of the prompt."""
        return self.prompt + size * self.response


def lengths_of(config: NodeConfig, prompt: int, has_turns: bool) -> Lengths:
    """Bounds of a run whose longest prompt has `prompt` tokens; no response is longer than the model's context."""
    response = config.generator.max_new_tokens
    response = max(response, config.generator.max_episode_tokens) if has_turns else response
    return Lengths(prompt=prompt, response=min(response, positions_of(config.model) or response))


def pass_tokens(config: NodeConfig, lengths: Lengths) -> int:
    """Tokens of the largest forward pass: one step, capped at learner.token_budget, but at least prompt + response."""
    groups = config.replay.local_groups + config.replay.external_groups
    step = groups * lengths.group(config.generator.group_size)
    return max(min(step, config.learner.token_budget), lengths.prompt + lengths.response)


def estimate_memory(
    config: NodeConfig, shape: ModelShape, lengths: Lengths, has_reference: bool = False
) -> MemoryEstimate:
    """Memory of the worker of a node if all responses are as long as they may be.

    With `compute_dtype` auto, passes are assumed in the published dtype; `device_checks.machine_choice` measures it.
    """
    published_bytes = 4 if config.model.dtype == "float32" else 2
    value_bytes = 4 if config.compute_dtype == "float32" else published_bytes
    whole = shape.num_parameters * value_bytes
    trains, generates = Role.TRAINER in config.roles, Role.GENERATOR in config.roles
    is_own_engine = generates and config.engine.kind == "transformers"
    trained = shape.num_trained(config.model) if trains else 0
    tokens = pass_tokens(config, lengths)
    rows = config.engine.max_rows  # of whoever calls a served policy
    if not config.serve.listen:
        rows = min(rows, config.generator.groups_per_batch * config.generator.group_size)
    learned = min(tokens, CHUNK_ELEMENTS // shape.vocab_size)
    kept = shape.activation_bytes(value_bytes)
    if config.learner.gradient_checkpointing:  # each layer's input, and all of one layer
        kept = kept // shape.num_layers + shape.num_layers * shape.hidden_size * value_bytes
    return MemoryEstimate(
        process=PROCESS_BYTES,
        weights=whole,
        engine_weights=whole if trains and is_own_engine else 0,
        published=trained * published_bytes * (2 if config.weights.publish else 1),
        reference=trained * value_bytes if has_reference and trains else 0,
        masters=0 if published_bytes == MASTER_BYTES else trained * MASTER_BYTES,
        moments=2 * trained * MASTER_BYTES,
        kv_cache=rows * (lengths.prompt + lengths.response) * shape.cache_bytes(value_bytes) if is_own_engine else 0,
        gradients=trained * (MASTER_BYTES + value_bytes),
        activations=(tokens * kept + 3 * 4 * learned * shape.vocab_size) if trains else 0,
        optimizer_scratch=trained * MASTER_BYTES,
        checkpoint=trained * CHECKPOINT_BYTES,
    )


def group_bytes(config: NodeConfig, lengths: Lengths, vocab_size: int) -> int:
    """Most bytes of a group: an id, a log-prob and the text of each token, the prompt's ids, and a frame."""
    id_bytes = 1 if vocab_size <= 128 else 2 if vocab_size <= 2**14 else 3
    text_bytes = 1 if vocab_size <= 128 else 4  # of a token, on average
    lengths_bytes = 1 if config.generator.byte_lengths else 0
    per_token = id_bytes + LOGPROB_BYTES + text_bytes + lengths_bytes
    return 400 + lengths.prompt * id_bytes + config.generator.group_size * lengths.response * per_token


def version_bytes(config: NodeConfig, shape: ModelShape) -> int:
    """Bytes of all tensors that a trainer publishes, before they are coded."""
    return shape.num_trained(config.model) * (4 if config.model.dtype == "float32" else 2)


def patch_bytes(config: NodeConfig, shape: ModelShape) -> int | None:
    """Bytes of the patch from one version to the next; None for float32 and for adapters, which were not measured.

    All bfloat16 weights trained at 1e-5 gave 1/200 of the version, at 3e-6 1/365 and at 1e-6 1/620
    (docs/measurements/weights.md): the size goes with the square root of the learning rate.
    """
    if config.model.dtype == "float32" or config.model.lora_rank:
        return None
    return round(version_bytes(config, shape) / (200 * (1e-5 / config.learner.learning_rate) ** 0.5))
