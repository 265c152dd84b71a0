"""JSON schema check of decoded values, by the keywords that structured outputs use; other keywords are ignored.

Invariant: hostile schemas and values cost bounded time: at most MAX_CHECKS comparisons, MAX_DEPTH levels deep.

Source: https://json-schema.org/draft/2020-12, without patterns, formats and remote references.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

MAX_CHECKS: Final = 20_000
MAX_DEPTH: Final = 64
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


class _TooMuch(Exception):
    """The check would take more than its bounds."""


def misfit(value: object, schema: Mapping[str, Any]) -> str:
    """Describes the first mismatch of a value with a schema, and its place; "" if the value fits."""
    try:
        return _Check(schema).misfit(value, schema, "$", 0)
    except _TooMuch:
        return f"its check needs more than {MAX_CHECKS} comparisons or {MAX_DEPTH} levels"


class _Check:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = MAX_CHECKS

    def misfit(self, value: object, given: object, place: str, depth: int) -> str:
        self._num_left -= 1
        if self._num_left < 0 or depth > MAX_DEPTH:
            raise _TooMuch
        if not isinstance(given, dict):
            return f"{place}: nothing is allowed here" if given is False else ""
        schema = cast("dict[str, Any]", given)
        reference = schema.get("$ref")
        if isinstance(reference, str) and (found := self.misfit(value, self._at(reference), place, depth + 1)):
            return found
        wanted = schema.get("type")
        names: list[Any] = cast("list[Any]", wanted) if isinstance(wanted, list) else [] if wanted is None else [wanted]
        self._num_left -= len(names)
        if names and not any(_is_of(value, name) for name in names):
            return f"{place}: {type(value).__name__} is not {' or '.join(map(str, names))}"
        if "const" in schema and not _equal(value, schema["const"]):
            return f"{place}: not the value {_shown(schema['const'])}"
        options = _list(schema.get("enum"))
        self._num_left -= len(options) + len(_list(schema.get("required")))
        if options and not any(_equal(value, each) for each in options):
            return f"{place}: none of the {len(options)} values of enum"
        return (
            self._of_parts(value, schema, place, depth)
            or self._of_size(value, schema, place)
            or self._of_choices(value, schema, place, depth)
        )

    def _of_parts(self, value: object, schema: Mapping[str, Any], place: str, depth: int) -> str:
        if isinstance(value, dict):
            fields = cast("dict[str, Any]", value)
            known: dict[str, Any] = _dict(schema.get("properties"))
            for name in _list(schema.get("required")):
                if not isinstance(name, str) or name not in fields:
                    return f"{place}: {_shown(name)!r} is missing"
            other = schema.get("additionalProperties")
            for name, inner in fields.items():
                if found := self.misfit(inner, known.get(name, other), f"{place}.{name[:80]}", depth + 1):
                    return found
        elif isinstance(value, list):
            for index, inner in enumerate(cast("list[Any]", value)):
                if found := self.misfit(inner, schema.get("items"), f"{place}[{index}]", depth + 1):
                    return found
        return ""

    def _of_size(self, value: object, schema: Mapping[str, Any], place: str) -> str:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        size: Any = value if is_number else len(cast("Any", value)) if isinstance(value, str | list) else None
        if size is None:
            return ""
        least, most = ("minimum", "maximum") if is_number else ("min", "max")
        if not is_number:
            least, most = (f"{each}{'Length' if isinstance(value, str) else 'Items'}" for each in (least, most))
        low, high = schema.get(least), schema.get(most)
        if isinstance(low, int | float) and size < low:
            return f"{place}: {size} is below {least} {low}"
        if isinstance(high, int | float) and size > high:
            return f"{place}: {size} is above {most} {high}"
        return ""

    def _of_choices(self, value: object, schema: Mapping[str, Any], place: str, depth: int) -> str:
        for part in _list(schema.get("allOf")):
            if found := self.misfit(value, part, place, depth + 1):
                return found
        for name in ("anyOf", "oneOf"):
            options = _list(schema.get(name))
            found = [self.misfit(value, option, place, depth + 1) for option in options]
            if found and all(found):
                return f"{place}: none of {name}; {found[0]}"
        return ""

    def _at(self, reference: str) -> object:
        """The schema that a reference into this document names; None, which every value fits, for an unknown path."""
        found: Any = self._root
        parts = reference.removeprefix("#").split("/")[1:]
        self._num_left -= len(reference) // 16
        for part in parts:
            found = _dict(found).get(part.replace("~1", "/").replace("~0", "~"))
        return found


def _is_of(value: object, name: object) -> bool:
    if isinstance(value, bool) and name != "boolean":
        return False
    if isinstance(value, float) and name == "integer":
        return value.is_integer()
    return not isinstance(name, str) or name not in _TYPES or isinstance(value, _TYPES[name])


def _equal(one: object, other: object) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _shown(value: object) -> str:
    return value[:80] if isinstance(value, str) else reprlib.repr(value)  # in bounded time


def _dict(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: object) -> Sequence[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else ()
