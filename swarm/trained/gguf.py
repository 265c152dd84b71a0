"""A Hugging Face model as one GGUF file, the format of llama.cpp.

Invariant: bfloat16 matrices keep their dtype and everything else is float32, so that no value changes; an architecture
or a way to split text without an exact form is refused, never guessed.

Source: the keys and tensor names of llama.cpp's gguf-py; rows of the query and key projections of Llama are
interleaved, since llama.cpp rotates neighbouring dimensions where transformers rotates halves.
"""

import json
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from swarm.errors import ConfigError

_OTHERWISE: Final = "export it with --format hf and convert that folder with llama.cpp's convert_hf_to_gguf.py"
_ARCHITECTURES: Final = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}  # model_type -> gguf.MODEL_ARCH
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How text is split before merges: the regular expression, and llama.cpp's name for it.
_SPLITS: Final = {_CONTRACTIONS + r"\p{N}" + _REST: "qwen2", _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe"}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # llama.cpp's kinds of tokens


def write_file(network: nn.Module, tokenizer: Path, path: Path, name: str) -> None:
    """Writes a transformers causal LM without adapters, and its tokenizer, as a GGUF file.

    Args:
        network: the causal LM.
        tokenizer: folder with the files of the tokenizer.
        path: file to write.
        name: name of the model in the file.

    Raises:
        ConfigError: the architecture, its rope type, a tensor or the tokenizer has no form here.
    """
    import gguf

    config: Any = cast("Any", network).config
    key = _ARCHITECTURES.get(config.model_type)
    if key is None:
        known = ", ".join(_ARCHITECTURES)
        raise ConfigError(f"--format gguf: architecture {config.model_type!r} is none of {known}; {_OTHERWISE}")
    architecture = gguf.MODEL_ARCH[key]
    words = _read(tokenizer / "tokenizer.json")
    split = _split_name(words)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name(name)
    _add_shape(writer, config)
    _add_tokenizer(writer, words, tokenizer, split, config)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    seen: set[int] = set()
    for own, tensor in cast("dict[str, Tensor]", network.state_dict(keep_vars=True)).items():
        target = names.get_name(own, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ConfigError(f"--format gguf: tensor {own!r} has no name in GGUF; {_OTHERWISE}")
        if id(tensor) in seen:
            continue  # an output head tied to the embedding is not written again
        seen.add(id(tensor))
        values = tensor.detach().cpu()
        projection = own.rpartition(".")[0].rpartition(".")[2]
        if key == "LLAMA" and projection in ("q_proj", "k_proj"):  # weight and bias
            heads = config.num_attention_heads if projection == "q_proj" else config.num_key_value_heads
            values = _interleaved(values, heads)
        _add_tensor(writer, target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: Any, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"--format gguf: rope type {rope['rope_type']!r} is not written here; {_OTHERWISE}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or getattr(config, "rope_theta", 10_000.0)))
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: Any, words: dict[str, Any], folder: Path, split: str, config: Any) -> None:
    added: dict[int, dict[str, Any]] = {each["id"]: each for each in words["added_tokens"]}
    by_id = {index: text for text, index in words["model"]["vocab"].items()}
    by_id |= {index: each["content"] for index, each in added.items()}
    texts: list[str] = []
    kinds: list[int] = []
    for index in range(config.vocab_size):
        texts.append(by_id.get(index, f"[PAD{index}]"))
        if index in added:
            kinds.append(_CONTROL if added[index]["special"] else _USER_DEFINED)
        else:
            kinds.append(_NORMAL if index in by_id else _UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in words["model"]["merges"]]
    )
    settings = _read(folder / "tokenizer_config.json")
    index_of = {text: index for index, text in by_id.items()}
    for key, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        token = settings.get(key)
        text = token["content"] if isinstance(token, dict) else token
        if text in index_of:
            add(index_of[text])
    writer.add_add_bos_token(False)
    template = folder / "chat_template.jinja"
    text = template.read_text("utf-8") if template.is_file() else settings.get("chat_template")
    if isinstance(text, str):
        writer.add_chat_template(text)


def _split_name(words: dict[str, Any]) -> str:
    """llama.cpp's name for the way a byte-level BPE tokenizer splits text. Raises ConfigError for an unknown way."""
    steps: Any = words["pre_tokenizer"]
    steps = steps["pretokenizers"] if steps and steps["type"] == "Sequence" else [steps]
    kinds = [step and step["type"] for step in steps]
    if words["model"]["type"] == "BPE" and kinds[-1:] == ["ByteLevel"] and not steps[-1].get("add_prefix_space"):
        has_regex = steps[-1].get("use_regex", True)
        if kinds == ["ByteLevel"] and has_regex:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and has_regex and steps[0]["individual_digits"]:
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not has_regex:
            found = _SPLITS.get(steps[0]["pattern"].get("Regex", ""))
            if found:
                return found
    raise ConfigError(f"--format gguf: its tokenizer splits text in a way without a name here; {_OTHERWISE}")


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """The weight with the rows of each head reordered from [2, half] to [half, 2]."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _add_tensor(writer: Any, name: str, values: Tensor) -> None:
    import gguf

    if values.dtype == torch.bfloat16 and values.dim() > 1:
        raw = values.contiguous().view(torch.uint16).numpy()
        writer.add_tensor(
            name, raw.view(np.uint8), raw_shape=raw.view(np.uint8).shape, raw_dtype=gguf.GGMLQuantizationType.BF16
        )
    else:
        writer.add_tensor(name, values.float().contiguous().numpy())


def _read(path: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
