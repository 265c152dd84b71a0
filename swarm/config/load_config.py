"""A configuration as TOML: loaded from a file with `--set a.b=value` on top, and written with the source of each key.

Invariant: an error names the file or option and the key. Written TOML parses as the same configuration again, for any
text in its values.
"""

import datetime
import difflib
import json
import re
import tomllib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, cast, get_args

from pydantic import BaseModel, ValidationError

from swarm.config.node_config import COORDINATOR_FILE, NODE_FILE, NodeConfig
from swarm.config.section import Model
from swarm.errors import ConfigError
from swarm.read_files import read_bounded

AnyModel = TypeVar("AnyModel", bound=Model)
Key = tuple[str | int, ...]  # such as ("environments", 0, "seed")
MAX_LINES: Final = 2_000  # of a file whose keys are named with their lines: each line is parsed with all before it
MAX_FILE_BYTES: Final = 2**22  # of TOML, whose parser takes 2 s for as much
DEFAULT: Final = "default"
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


def config_file(directory: Path | None, config: Path | None = None, default: str = "swarm-node") -> Path:
    """The configuration file that a command's directory or its --config names.

    Args:
        directory: directory of a node or coordinator, or a file; None: not given.
        config: value of --config; a directory stands for the file in it.
        default: directory that is meant where neither is given.

    Raises:
        ConfigError: both are given, or no configuration is there.
    """
    if directory is not None and config is not None:
        raise ConfigError(f"{directory} and --config {config}: both name a configuration; give one")
    path = config or directory or Path(default)
    if path.is_file():
        return path
    found = [path / name for name in (NODE_FILE, COORDINATOR_FILE) if (path / name).is_file()]
    if not found:
        lacks = f"neither {NODE_FILE} nor {COORDINATOR_FILE} is there" if path.is_dir() else "no such file or directory"
        raise ConfigError(
            f"{path}: {lacks}; name the directory of a node, which `swarm train` and `swarm join` make, or a file with "
            "--config FILE"
        )
    return found[0]


def load_config(kind: type[AnyModel], path: Path | None, overrides: list[str] | None = None) -> AnyModel:
    """Reads a TOML file, applies `a.b=value` overrides, validates, and returns the model.

    Args:
        kind: NodeConfig or CoordinatorConfig.
        path: TOML file; None starts from the defaults.
        overrides: each `key.path=value`; the value is TOML, or plain text if it is no valid TOML. `recipe=...` of a
            node means `learner.recipe=...`.

    Raises:
        ConfigError: the file cannot be read or parsed, an override is malformed, or a key or value is not valid.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = _read_toml(path)
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
    if isinstance(data.get("node"), dict) and "node" not in kind.model_fields:
        raise ConfigError(f"{path}: it has a table [node], so it is a coordinator's; give the node.toml of a node here")
    apply_overrides(kind, data, overrides or [])
    return parse_config(kind, data, str(path or "configuration"))


def apply_overrides(kind: type[Model], data: dict[str, Any], overrides: list[str]) -> None:
    """Sets the keys of overrides in plain data, in place, as `load_config` does.

    Raises:
        ConfigError: an override is no `key.path=value`, or its path leads through a plain value.
    """
    for override in overrides:
        (*parents, last), value = read_override(kind, override)
        section = data
        for parent in parents:
            inner: object = section.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {override!r}: {parent} is a value, not a section")
            section = cast("dict[str, Any]", inner)
        section[last] = value


def read_override(kind: type[Model], override: str) -> tuple[tuple[str, ...], Any]:
    """Splits a `key.path=value` into its keys, from the top down, and its value. Raises ConfigError for other text."""
    key, separator, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not separator or path == ("",):
        raise ConfigError(f"--set {override!r}: expected key.path=value")
    if kind is NodeConfig and path == ("recipe",):
        path = ("learner", "recipe")
    try:
        return path, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return path, text


def has_section(path: Path, name: str) -> bool:
    """True if a file can be read as TOML and has the top-level table `name`."""
    try:
        return isinstance(_read_toml(path).get(name), dict)
    except (OSError, ValueError):
        return False  # loading it raises the error with the cause


def _read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file. Raises OSError, or ValueError for a file that is no TOML, too long or nested too deeply."""
    try:
        return tomllib.loads(read_bounded(path, MAX_FILE_BYTES).decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_config(kind: type[AnyModel], data: dict[str, Any], origin: str) -> AnyModel:
    """Validates plain data into a config model. Raises ConfigError, which names each wrong key and `origin`."""
    with explained(origin, kind):
        return kind.model_validate(data)


@contextmanager
def explained(origin: str, kind: type[Model] | None = None) -> Generator[None]:
    """Context manager that turns validation errors of a config model into a ConfigError that names each key.

    Args:
        origin: file or option of the data, for the message.
        kind: model whose keys are suggested for an unknown one; None: no suggestions.
    """
    try:
        yield
    except ValidationError as error:
        lines = [f"{'.'.join(str(p) for p in e['loc']) or '(whole)'}: {_explain(e, kind)}" for e in error.errors()]
        raise ConfigError(f"{origin}: " + "; ".join(lines)) from None


def _explain(error: Any, kind: type[Model] | None) -> str:
    if error["type"] == "extra_forbidden":
        given, section = str(error["loc"][-1]), _section(kind, error["loc"][:-1])
        if section and given in section.removed:
            return f"no longer a key, every node has {json.dumps(section.removed[given])}; leave it out"
        known = list(section.model_fields) if section else []
        near = difflib.get_close_matches(given, known, n=1)
        near = near or [key for key in known if "".join(word[0] for word in key.split("_")) == given]  # lr
        return f"unknown key; did you mean {near[0]}?" if near else "unknown key"
    given = error.get("input")
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{message} (got {given!r})" if isinstance(given, (str, int, float, bool)) else message


def _section(kind: Any, path: tuple[Any, ...]) -> type[Model] | None:
    """The section of a model at a path; None if there is none."""
    for part in path:
        if isinstance(part, int):
            continue
        field = kind.model_fields.get(part) if kind is not None else None
        inner = [field.annotation, *get_args(field.annotation)] if field is not None else []
        kind = next((each for each in inner if isinstance(each, type) and issubclass(each, Model)), None)
    return kind


# --- written ---------------------------------------------------------------------------------------------------


def sources_of(kind: type[Model], path: Path, overrides: list[str]) -> dict[Key, str]:
    """The source of each value that is set: `node.toml:12`, or `--set` if an override sets it.

    A file of more than MAX_LINES lines gives no sources.

    Args:
        kind: NodeConfig or CoordinatorConfig.
        path: path of a file that `load_config` accepts.
        overrides: as given to `load_config`.
    """
    sources = {key: f"{path.name}:{line}" for key, line in _lines_of(path.read_text(encoding="utf-8"))}
    for override in overrides:
        changed, value = read_override(kind, override)
        sources = {key: source for key, source in sources.items() if key[: len(changed)] != changed}
        sources |= dict.fromkeys([*_leaves(value, changed)] or [changed], "--set")
    return sources


def to_toml(config: Model, sources: Mapping[Key, str], notes: Mapping[Key, str] | None = None) -> str:
    """Renders a configuration as TOML: every key with its value and, after `# `, its source.

    Args:
        config: the configuration.
        sources: source of each key, as from `sources_of`; a key without one gets `default`.
        notes: further remarks by key, after the source.
    """
    sources = {**sources}
    for key, note in (notes or {}).items():
        sources[key] = f"{_source(key, sources)}; {note}"
    return "\n".join(_table(config, (), (), sources)).lstrip("\n") + "\n"


def _table(model: BaseModel, name: tuple[str, ...], key: Key, sources: Mapping[Key, str]) -> Iterator[str]:
    """Lines of a table: plain values first, since in TOML an inner table ends the values of the outer one."""
    fields = [(field, getattr(model, field)) for field in type(model).model_fields]
    for field, value in fields:
        if not isinstance(value, BaseModel) and not _is_list_of_tables(value) and value is not None:
            yield f"{field} = {inline_value(value)}  # {_source((*key, field), sources)}"
    for field, value in fields:
        title = (*name, field)
        if isinstance(value, BaseModel):
            yield from ("", f"[{'.'.join(title)}]")
            yield from _table(value, title, (*key, field), sources)
        elif _is_list_of_tables(value):
            for number, each in enumerate(value):
                yield from ("", f"[[{'.'.join(title)}]]")
                yield from _table(each, title, (*key, field, number), sources)


def _is_list_of_tables(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(cast("tuple[object, ...]", value)[0], BaseModel)


def _source(key: Key, sources: Mapping[Key, str]) -> str:
    """Source of a key: its own, that of a table around it, or those of its inner keys; else `default`."""
    for length in range(len(key), 0, -1):
        if key[:length] in sources:
            return sources[key[:length]]
    inner = dict.fromkeys(source for each, source in sources.items() if each[: len(key)] == key)
    return ", ".join(inner) or DEFAULT


def inline_value(value: Any) -> str:
    """Renders a value as TOML on one line; None values are left out of tables."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return f"{{{', '.join(f'{_name(key)} = {inline_value(each)}' for key, each in pairs if each is not None)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(inline_value, cast('list[Any]', value)))}]"
    return _text(str(value))


def _text(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in quoted)


def _name(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _lines_of(text: str) -> Iterator[tuple[Key, int]]:
    """Yields each key with the line, from 1 on, on which its statement (with blank lines before it) begins.

    The first n lines are valid TOML if line n ends a statement. A key that is new in the next valid prefix stands on
    the lines between the two.
    """
    lines, known, first = text.split("\n"), set[Key](), 1
    if len(lines) > MAX_LINES:
        return
    for number in range(1, len(lines) + 1):
        try:
            data = tomllib.loads("\n".join(lines[:number]))
        except tomllib.TOMLDecodeError:
            continue
        for key in _leaves(data, ()):
            if key not in known:
                known.add(key)
                yield key, first
        first = number + 1


def _leaves(value: object, key: Key) -> Iterator[Key]:
    if isinstance(value, dict):
        for name, inner in cast("dict[str, object]", value).items():
            yield from _leaves(inner, (*key, name))
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in cast("list[object]", value)):
        for number, inner in enumerate(cast("list[object]", value)):
            yield from _leaves(inner, (*key, number))
    else:
        yield key
