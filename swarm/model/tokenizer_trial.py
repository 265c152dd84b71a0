"""First use of a model's tokenizer and chat template, in a process with limits: both run code by the model's author.

Invariant: a trial depends on files, arguments and the version of `tokenizers`; equal trials are made once on a machine.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

from swarm.errors import ConfigError
from swarm.model.chat_template import TemplateArgument
from swarm.model.source import default_cache_dir
from swarm.process import run_bounded

logger = logging.getLogger(__name__)

CPU_S: Final = 60  # SmolLM2's takes 1.1 s
MEMORY_BYTES: Final = 4 * 2**30  # of address space; SmolLM2's takes 0.24
_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def require_tried(folder: Path, arguments: Mapping[str, TemplateArgument]) -> None:
    """Tries the tokenizer and template of a folder, unless equal ones were tried before (blocking, a second).

    Raises:
        ConfigError: the trial takes more than CPU_S of CPU time or MEMORY_BYTES, or its process ends with an error.
    """
    known = hashlib.sha256(f"1 {metadata.version('tokenizers')} {json.dumps(arguments, sort_keys=True)}".encode())
    for name in _FILES:
        with suppress(OSError):
            known.update(f"\0{name}\0{hashlib.sha256((folder / name).read_bytes()).hexdigest()}".encode())
    mark = default_cache_dir() / "tried_tokenizers" / known.hexdigest()
    if mark.exists():
        return
    request = json.dumps({"folder": str(folder), "arguments": dict(arguments)}).encode()
    try:
        is_done = run_bounded("swarm.model.tokenizer:try_out", request, CPU_S, MEMORY_BYTES) == b"tried"
    except ValueError as error:
        raise ConfigError(
            f"{folder}: tokenizer and chat template cannot be used: a first prompt and answer of some thousand "
            f"characters {error}; take another model, or mend tokenizer.json and the template"
        ) from None
    if is_done:
        with suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
