"""Directories that commands of this user made, and the rule that code named in any other directory is not run.

Invariant: nothing inside a directory makes it own. What does is a line in the user's state folder, with the path and
with marks of a file in the directory (inode and time of its making) that no copy, archive or other directory has.
The line also names the working directory, from which alone code that is named by a relative path is run.
"""

import logging
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from swarm.config import EnvironmentConfig, NodeConfig
from swarm.errors import ConfigError
from swarm.plugins import is_relative
from swarm.process import file_lock, write_json
from swarm.read_files import read_json

logger = logging.getLogger(__name__)

MARKED: Final = ".made_here"  # empty file of a directory, which is written once
RECORD: Final = "own_directories.json"  # resolved path -> marks and working directory, newest last
MAX_RECORDED: Final = 4096
_MAX_BYTES: Final = MAX_RECORDED * 8192  # a path has 4096 at most, and an escape takes more in JSON
_LOCK_S: Final = 10.0  # another command holds the record for milliseconds


def record_own(directory: Path) -> None:
    """Records a directory as the user's own: a command here makes it, or starts a node in it (blocking).

    Where the record cannot be written, as without a home, a warning says so, and reading asks for --trust.
    """
    folder = _state_folder()
    try:
        if folder is None:
            raise OSError("this user has no home, and XDG_STATE_HOME is no absolute path")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(directory / MARKED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        with file_lock(folder / f"{RECORD}.lock", _LOCK_S):
            recorded, path = _recorded(folder), str(directory.resolve())
            if recorded.get(path) != (line := f"{_marks(directory)} {Path.cwd()}"):
                recorded.pop(path, None)
                newest = [*recorded.items(), (path, line)][-MAX_RECORDED:]
                write_json(folder / RECORD, dict(newest))
    except OSError as error:
        why = f"{error.strerror or error}; set XDG_STATE_HOME to a folder that can be written"
        logger.warning("not recorded as own: reading it asks for --trust", extra={"dir": str(directory), "why": why})


def is_own(directory: Path) -> bool:
    """True if a command of this user made the directory, and it is still the same one (blocking)."""
    return _made_from(directory) is not None


def _made_from(directory: Path) -> str | None:
    """Working directory of the command that made an own directory, "" if it was not recorded; None if it is not own."""
    folder, marks = _state_folder(), _marks(directory)
    if folder is None or not marks:
        return None
    line = f"{_recorded(folder).get(str(directory.resolve()), '')} "
    return line.removeprefix(f"{marks} ").removesuffix(" ") if line.startswith(f"{marks} ") else None


def code_of(environments: Iterable[EnvironmentConfig]) -> dict[str, str]:
    """Key -> code that these environments load, beyond what a run's manifest may name."""
    found: dict[str, str] = {}
    for each in environments:
        inner = each.inner or each
        is_package = ":" not in inner.dataset and bool(inner.digest)
        if inner.kind == "function" or (inner.kind == "plugin" and not is_package):
            found[f"environments.{each.name}"] = inner.dataset
    return found


def code_of_node(config: NodeConfig) -> dict[str, str]:
    """Key -> code that a configuration loads, of its environments and its recipes."""
    learner = config.learner
    recipes = {
        "learner.recipe": learner.recipe,
        "learner.recipe_without_logprobs": learner.recipe_without_logprobs,
        "learner.recipe_text_only": learner.recipe_text_only,
    }
    return code_of(config.environments) | {key: spec for key, spec in recipes.items() if ":" in spec}


def code_of_engine(config: NodeConfig) -> dict[str, str]:
    """Key -> program that the engine of a configuration is, or secret of this user's that it sends."""
    engine = config.engine
    if engine.kind == "vllm":  # its options may name code, too
        return {"engine.python": engine.python or ".venv-vllm/bin/python"}
    secret = engine.options.get("api_key_env")
    return {"engine.options.api_key_env": str(secret)} if engine.kind == "openai" and secret else {}


def require_trusted(
    directory: Path, code: Mapping[str, str], is_trusted: bool, command_line: Iterable[str] = ()
) -> None:
    """Refuses to load code that a directory names, unless the directory is own, or the user trusts it (blocking).

    Args:
        directory: directory of the configuration.
        code: as from `code_of`.
        is_trusted: True: the user said so for this command (--trust).
        command_line: options of the command, such as `learner.recipe=my.py:MINE`; code that they name is the user's.

    Raises:
        ConfigError: names key, code and directory.
    """
    texts = [*command_line]
    foreign = {key: spec for key, spec in code.items() if not any(_is_named(spec, text) for text in texts)}
    if not foreign or is_trusted:
        return
    made_from = _made_from(directory)
    if made_from is not None:  # another working directory may be a stranger's, with a file of that name
        foreign = {key: spec for key, spec in foreign.items() if is_relative(spec) and made_from != str(Path.cwd())}
        if not foreign:
            return
    key, spec = next(iter(foreign.items()))
    if made_from is not None:
        raise ConfigError(
            f"{directory}: its {key} names code, {spec[:200]!a}, from the working directory, which was another one "
            f"({made_from or 'not recorded'}) when a command of yours used this directory; go there, or add --trust"
        )
    raise ConfigError(
        f"{directory}: its {key} names code, {spec[:200]!a}, and no command of yours is known to have made this "
        "directory, so the code is not run; if it is yours, or you trust whoever made it, add --trust"
    )


def _is_named(spec: str, text: str) -> bool:
    return text.rpartition("=")[2] == spec or f'"{spec}"' in text or f"'{spec}'" in text


def _state_folder() -> Path | None:
    """Folder of the user's state; None without one."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:  # a relative path is to be ignored, as the XDG base directory specification has it
        base = given if given.is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:  # no HOME, and no entry of the user in passwd
        return None
    return base / "swarm-trainer"


def _marks(directory: Path) -> str:
    """Marks of the marked file of a directory, which no copy has; "" without one."""
    try:
        found = (directory / MARKED).lstat()
    except OSError:
        return ""
    # the device is left out: its number may change when the machine starts again
    return f"{found.st_ino} {found.st_ctime_ns}" if stat.S_ISREG(found.st_mode) else ""


def _recorded(folder: Path) -> dict[str, str]:
    """Resolved path -> marks; empty where the record is missing, damaged, or another user's."""
    path = folder / RECORD
    try:
        if path.stat().st_uid != os.geteuid():  # HOME may be another user's, as under sudo
            return {}
        found: Any = read_json(path, _MAX_BYTES)
    except (OSError, ValueError):
        return {}
    return cast("dict[str, str]", found) if isinstance(found, dict) else {}
