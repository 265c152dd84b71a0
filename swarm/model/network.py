"""Loads and saves the network itself: a Hugging Face causal language model in eval mode, without dropout.

Invariant: every weight comes from the checkpoint (none is silently initialised), and no code from it is run.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from swarm.config import ModelConfig
from swarm.config.generation_config import SHIPPED
from swarm.errors import ConfigError
from swarm.interfaces import Tokenizer
from swarm.model.lora import add_adapters
from swarm.model.source import TINY_SHAPE, positions_in, resolve_source
from swarm.model.tokenizer import CharTokenizer, tokenizer_of
from swarm.model.version_digest import load_published, published_state, weights_digest
from swarm.types import Digest

_ATTENTION: Final = frozenset({"full_attention", "sliding_attention"})
_ALIBI: Final = ("bloom", "mpt")  # use alibi without an entry in config.json that says so
_RANDOM: Final = ("drop", "jitter")  # in the names of numbers that make passes in train mode random


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A network ready for scoring, its tokenizer, and the digest of its initial weights."""

    network: nn.Module  # transformers causal LM, eval mode; trainable parameters require grad
    tokenizer: Tokenizer
    digest: Digest  # of the published tensors before adapters were added: the initial weights of a run

    @property
    def context_tokens(self) -> int:
        """Most tokens of a prompt with its answer that the model was made for."""
        return most_tokens(self.network)


def load_model(config: ModelConfig, cache_dir: Path | None = None) -> LoadedModel:
    """Network and tokenizer of a configured model.

    Args:
        cache_dir: folder of converted models; None takes default_cache_dir().

    Raises:
        ConfigError: missing package, folder or file, incomplete checkpoint, unsupported architecture, no layer for
            adapters, or a digest other than `model.digest`.
    """
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    if config.source in SHIPPED:
        tokenizer, network = tokenizer_of(config, Path()), _shipped(config.source).to(dtype)
    else:
        folder = resolve_source(config, cache_dir, with_weights=True)
        tokenizer, network = tokenizer_of(config, folder), _from_folder(folder, dtype)
    _without_dropout(network)
    digest = weights_digest(published_state(network))
    if config.digest and digest.hex() != config.digest.lower():
        raise ConfigError(
            f"model.digest: {config.source!r} has {digest.hex()}, expected {config.digest}; "
            "use the same model and dtype as the run, or clear the key"
        )
    if config.lora_rank:
        add_adapters(network, config.lora_rank, config.lora_scale, config.lora_targets)
    return LoadedModel(network=network, tokenizer=tokenizer, digest=digest)


def most_tokens(network: nn.Module) -> int:
    """Maximum number of positions of a transformers network, in tokens."""
    config: Any = network.config
    return positions_in(config.get_text_config().to_dict())


def entry_bytes(network: nn.Module) -> int:
    """Bytes of the keys and values of one token in the cache of a transformers network."""
    config: Any = cast("Any", network.config).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = next(network.parameters()).element_size()
    return int(2 * config.num_hidden_layers * heads * width * size)


def tiny_network(seed: int = 0) -> nn.Module:
    """The tiny character-level Llama (0.19M parameters, float32) with random weights; the global RNG is untouched."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = CharTokenizer()
    assert tokenizer.vocab_size == TINY_SHAPE["vocab_size"]
    config = LlamaConfig(
        **TINY_SHAPE,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_id,
        eos_token_id=tokenizer.eos_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cast("nn.Module", LlamaForCausalLM(config)).eval()


def save_tensors(state: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes published tensors as one safetensors file, whole or not at all. Raises OSError (a full disk)."""
    staging = path.with_name(f".{path.name}.partial")
    try:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, staging, metadata)
        staging.replace(path)
    except SafetensorError as error:  # errors of the operating system have this type, too
        raise OSError(f"{path.name}: {error}") from error
    finally:
        staging.unlink(missing_ok=True)


def _shipped(source: str) -> nn.Module:
    network, name = tiny_network(), SHIPPED[source]
    with resources.as_file(resources.files("swarm") / "assets" / name) as path:
        if not path.is_file():
            raise ConfigError(
                f"model.source {source!r}: {name} is missing from this installation; reinstall, "
                f"or build it with python -m swarm.simulate.{Path(name).stem}"
            )
        # one shipped model is stored in half precision
        load_published(network, {key: tensor.float() for key, tensor in load_file(path).items()})
    return network


def _from_folder(folder: Path, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        shape: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a file by anybody: transformers and huggingface_hub raise many kinds of errors
        raise ConfigError(f"model.source {str(folder)!r}: config.json cannot be read: {error}") from error
    _require_trainable(folder, shape)
    try:
        network, info = cast(
            "tuple[nn.Module, dict[str, Any]]",
            AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            ),
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # as above; ImportError where a family needs a package of its own
        raise ConfigError(f"model.source {str(folder)!r}: cannot be loaded: {error}") from error
    lacking = sorted(info["missing_keys"])
    if lacking:
        raise ConfigError(
            f"model.source {str(folder)!r}: the checkpoint lacks {len(lacking)} tensors, {lacking[0]!r} first; "
            "download or save it again"
        )
    return network


def _require_trainable(folder: Path, config: Any) -> None:
    """Raises ConfigError, before weights are read, for a network that engine or learner would compute wrongly."""
    shape = config.get_text_config()
    where = f"model.source {str(folder)!r} ({shape.model_type})"
    if quantized := getattr(config, "quantization_config", None):
        kind = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        raise ConfigError(
            f"{where}: its weights are quantized ({getattr(kind, 'value', kind)}), so that a step cannot change them; "
            "choose the model in bfloat16, or save a copy of it that transformers has dequantized"
        )
    if others := sorted(set(getattr(shape, "layer_types", None) or ()) - _ATTENTION):
        raise ConfigError(
            f"{where}: its layers of kind {', '.join(others)} keep a state that neither engine nor learner handles; "
            "choose a model of attention layers alone"
        )
    if getattr(shape, "alibi", False) or shape.model_type in _ALIBI:
        raise ConfigError(f"{where}: it has alibi, which the learner's masks do not allow; choose another model")
    if "local" in (getattr(shape, "attention_layers", None) or ()):
        raise ConfigError(
            f"{where}: its local attention counts columns, responses to the same prompt included; choose another model"
        )
    if not positions_in(shape.to_dict()):
        raise ConfigError(
            f"{where}: config.json names no max_position_embeddings, so its longest text is unknown; choose a model "
            "with positions"
        )


def _without_dropout(network: nn.Module) -> None:
    # The learner may switch to train mode (checkpointing needs it); log-probs must stay those of the engine.
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    config: Any = cast("Any", network).config
    for holder in (config, config.get_text_config(), *network.modules()):
        for name, value in vars(holder).items():
            if isinstance(value, float) and any(kind in name for kind in _RANDOM):
                setattr(holder, name, 0.0)
    network.eval()
