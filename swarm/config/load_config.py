"""Loads a configuration: a TOML file, `--set a.b=value` on top, validated as a whole.

Invariant: an error names the file, the key and the fix, before anything starts.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from pydantic import ValidationError

from swarm.config.node_config import NodeConfig
from swarm.config.section import REMOVED, Model
from swarm.errors import ConfigError

AnyModel = TypeVar("AnyModel", bound=Model)


def load_config(kind: type[AnyModel], path: Path | None, overrides: list[str] | None = None) -> AnyModel:
    """Reads a TOML file, applies `a.b=value` overrides, validates.

    Args:
        kind: NodeConfig or CoordinatorConfig.
        path: TOML file; None starts from the defaults.
        overrides: each `key.path=value`; the value is TOML, or plain text where it is not. `recipe=...` of a
            node means `learner.recipe=...`.

    Raises:
        ConfigError: names the file, the key and the fix.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
    if isinstance(data.get("node"), dict) and "node" not in kind.model_fields:
        raise ConfigError(f"{path}: it has a table [node], so it is a coordinator's; give the node.toml of a node here")
    apply_overrides(kind, data, overrides or [])
    return parse_config(kind, data, str(path or "configuration"))


def apply_overrides(kind: type[Model], data: dict[str, Any], overrides: list[str]) -> None:
    """Sets keys of plain data in place, as `load_config` does. Raises ConfigError for what is no `key.path=value`."""
    for override in overrides:
        _apply_override(kind, data, override)


def read_override(kind: type[Model], override: str) -> tuple[tuple[str, ...], Any]:
    """The keys from the top down to the one that a `key.path=value` sets, and the value. Raises ConfigError."""
    key, separator, text = _full_key(kind, override).partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override!r}: expected key.path=value")
    path = tuple(key.strip().split("."))
    try:
        return path, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return path, text


def has_section(path: Path, name: str) -> bool:
    """True where the file is TOML with that table."""
    try:
        return isinstance(tomllib.loads(path.read_text(encoding="utf-8")).get(name), dict)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return False  # loading it raises the error with the cause


def parse_config(kind: type[AnyModel], data: dict[str, Any], origin: str) -> AnyModel:
    """Validates plain data into a config model. Raises ConfigError with what is wrong with each key."""
    with explained(origin, kind):
        return kind.model_validate(data)


@contextmanager
def explained(origin: str, kind: type[Model] | None = None) -> Generator[None]:
    """Around the construction of a config model: turns validation errors into a ConfigError that names each key.

    Args:
        origin: file or option that the data came from.
        kind: the model, for the keys that it knows; None: none are named.
    """
    try:
        yield
    except ValidationError as error:
        lines = [f"{'.'.join(str(p) for p in e['loc']) or '(whole)'}: {_explain(e, kind)}" for e in error.errors()]
        raise ConfigError(f"{origin}: " + "; ".join(lines)) from None


def _explain(error: Any, kind: type[Model] | None) -> str:
    if error["type"] == "extra_forbidden":
        given, section = str(error["loc"][-1]), _section(kind, error["loc"][:-1])
        removed = REMOVED.get(section.__name__, {}) if section else {}
        if given in removed:
            return f"no longer a key, every node has {json.dumps(removed[given])}; leave it out"
        known = list(section.model_fields) if section else []
        near = difflib.get_close_matches(given, known, n=1)
        near = near or [key for key in known if "".join(word[0] for word in key.split("_")) == given]  # lr
        return f"unknown key; did you mean {near[0]}?" if near else "unknown key"
    given = error.get("input")
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{message} (got {given!r})" if isinstance(given, (str, int, float, bool)) else message


def _full_key(kind: type[Model], override: str) -> str:
    is_short = kind is NodeConfig and re.match(r"\s*recipe\s*=", override) is not None
    return f"learner.{override.lstrip()}" if is_short else override


def _apply_override(kind: type[Model], data: dict[str, Any], override: str) -> None:
    (*parents, last), value = read_override(kind, override)
    for parent in parents:
        section: object = data.setdefault(parent, {})
        if not isinstance(section, dict):
            raise ConfigError(f"--set {override!r}: {parent} is a value, not a section")
        data = cast(dict[str, Any], section)
    data[last] = value


def _section(kind: Any, path: tuple[Any, ...]) -> type[Model] | None:
    """The section at a path of a model; None where the path leads out of it."""
    for part in path:
        if isinstance(part, int):
            continue
        field = kind.model_fields.get(part) if kind is not None else None
        inner = [field.annotation, *get_args(field.annotation)] if field is not None else []
        kind = next((each for each in inner if isinstance(each, type) and issubclass(each, Model)), None)
    return kind
