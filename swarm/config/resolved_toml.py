"""A configuration as TOML with every key, each with where its value comes from: a line of the file, `--set`, a default.

Invariant: what is written parses as the same configuration again, whatever its texts hold.
"""

import datetime
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from pydantic import BaseModel

from swarm.config.load_config import read_override
from swarm.config.section import Model

Key = tuple[str | int, ...]  # such as ("environments", 0, "seed")
MAX_LINES: Final = 2_000  # of a file whose lines are told apart: each is parsed with all before it
DEFAULT: Final = "default"
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


def sources_of(kind: type[Model], path: Path, overrides: list[str]) -> dict[Key, str]:
    """Where each value that is set comes from: `node.toml:12`, or `--set` on top.

    Args:
        kind: NodeConfig or CoordinatorConfig.
        path: of a file that `load_config` reads.
        overrides: as given to `load_config`.
    """
    sources = {key: f"{path.name}:{line}" for key, line in _lines_of(path.read_text(encoding="utf-8"))}
    for override in overrides:
        changed, value = read_override(kind, override)
        sources = {key: source for key, source in sources.items() if key[: len(changed)] != changed}
        sources |= dict.fromkeys([*_leaves(value, changed)] or [changed], "--set")
    return sources


def to_toml(config: Model, sources: Mapping[Key, str], notes: Mapping[Key, str] | None = None) -> str:
    """Every key with its value; `# ` tells where it comes from.

    Args:
        config: what is written.
        sources: of values, or of tables that were emptied; anything else is called a default.
        notes: what else there is to say of a key.
    """
    sources = {**sources}
    for key, note in (notes or {}).items():
        sources[key] = f"{_source(key, sources)}; {note}"
    return "\n".join(_table(config, (), (), sources)).lstrip("\n") + "\n"


def _table(model: BaseModel, name: tuple[str, ...], key: Key, sources: Mapping[Key, str]) -> Iterator[str]:
    """Values first, since tables end those of the one above."""
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
    """Of a key, of a table around it, or of what it holds."""
    for length in range(len(key), 0, -1):
        if key[:length] in sources:
            return sources[key[:length]]
    inner = dict.fromkeys(source for each, source in sources.items() if each[: len(key)] == key)
    return ", ".join(inner) or DEFAULT


def inline_value(value: Any) -> str:
    """TOML of a value on one line; null values are left out of tables."""
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
    """Each key with the line on which its value begins, from 1 on.

    A beginning of a file that is TOML ends between two statements, so what the next such beginning has in addition was
    written on the lines between them.
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
