"""Export formats of a trained model: a Hugging Face folder, a PEFT adapter, a GGUF file.

Invariant: the files hold the weights of the version and no others; adapters are merged in float32 and rounded once, to
the dtype of the model.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from safetensors import SafetensorError

from swarm.config.generation_config import is_char_model
from swarm.errors import ConfigError
from swarm.model.char_folder import write_char_tokenizer
from swarm.model.lora import LoraLinear, merge_adapters
from swarm.model.peft_folder import write_adapter
from swarm.model.source import model_folder
from swarm.trained.model import TrainedModel

Format = Literal["hf", "peft", "gguf"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)

# Anything else in the folder of a base model (an adapter, notes, a secret) is not taken along.
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.json",
    "*.jinja",
)


def require_format(kind: str) -> Format:
    """Returns the format of this name. Raises ConfigError for an unknown name."""
    for known in FORMATS:
        if kind == known:
            return known
    raise ConfigError(f"--format {kind}: expected one of {', '.join(FORMATS)}")


def write_hf(model: TrainedModel, folder: Path) -> None:
    """Writes config, safetensors, tokenizer and chat template for `from_pretrained`; merges adapters in the network.

    Raises:
        OSError: the disk refused a file.
    """
    merge_adapters(model.network)
    try:
        cast("Any", model.network).save_pretrained(folder)
    except SafetensorError as error:  # what the system refused has this name, too
        raise OSError(f"{folder}: {error}") from error
    _write_tokenizer(model, folder)


def write_peft(model: TrainedModel, folder: Path) -> None:
    """Writes the adapter, in a form that PEFT, vLLM and transformers load onto the initial model, and the tokenizer.

    Raises:
        ConfigError: the node trains all weights, so there is no adapter.
    """
    if not any(isinstance(layer, LoraLinear) for layer in model.network.modules()):
        raise ConfigError(
            "--format peft: this model has no adapters, as model.lora_rank is 0; export it with --format hf"
        )
    write_adapter(model.network, folder, model.source_name)
    _write_tokenizer(model, folder)


def write_gguf(model: TrainedModel, folder: Path) -> None:
    """Writes the file model.gguf for llama.cpp, Ollama and LM Studio; merges adapters into the network.

    Raises:
        ConfigError: the architecture or the tokenizer has no form in `swarm.trained.gguf`.
    """
    from swarm.trained.gguf import write_file  # needs gguf, which the other formats do not

    if is_char_model(model.source):
        raise ConfigError("--format gguf: the tiny model's tokenizer has no form in GGUF; export it with --format hf")
    merge_adapters(model.network)
    write_file(model.network, model_folder(model.source), folder / "model.gguf", model.source_name)


WRITERS: Final[Mapping[Format, Callable[[TrainedModel, Path], None]]] = {
    "hf": write_hf,
    "peft": write_peft,
    "gguf": write_gguf,
}


def _write_tokenizer(model: TrainedModel, folder: Path) -> None:
    if is_char_model(model.source):
        write_char_tokenizer(folder)
        return
    source = model_folder(model.source)
    for pattern in _TOKENIZER_FILES:
        for path in sorted(source.glob(pattern)):
            shutil.copyfile(path, folder / path.name)
