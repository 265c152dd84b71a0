"""Methods and functions that programs with counted steps may call.

Invariant: a program can call nothing else of Python, and pays for the data of a call before the call looks at them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from swarm.extras.environments.program_values import Closure, NamedFunction, RunningProgram

METHODS: Final[Mapping[type, frozenset[str]]] = {
    str: frozenset(
        {"upper", "lower", "title", "capitalize", "swapcase", "strip", "lstrip", "rstrip", "split", "join", "replace"}
        | {"find", "index", "count", "startswith", "endswith"}
        | {"isdigit", "isalpha", "isalnum", "isupper", "islower", "isspace"}
    ),
    list: frozenset(
        ["append", "extend", "pop", "insert", "remove", "index", "count", "reverse", "copy", "clear", "sort"]
    ),
    dict: frozenset(["get", "keys", "values", "items", "pop", "setdefault", "update", "copy", "clear"]),
    tuple: frozenset(["index", "count"]),
}
Builtin = Callable[[RunningProgram, list[Any], dict[str, Any]], Any]


def _keyed(run: RunningProgram, values: list[Any], key: Any) -> list[Any]:
    keys = values if key is None else [run.invoke(key, [value], {}) for value in values]
    run.charge(run.weigh(*keys) * len(values).bit_length())
    return keys


def sort_values(run: RunningProgram, given: list[Any], named: dict[str, Any]) -> list[Any]:
    """Built-in function `sorted`, with `key` and `reverse`. Raises TypeError for other arguments."""
    values = run.items(*given)
    if named.keys() - {"key", "reverse"}:
        raise TypeError
    keys = _keyed(run, values, named.get("key"))
    order = sorted(range(len(values)), key=keys.__getitem__, reverse=bool(named.get("reverse", False)))
    return [values[index] for index in order]


def _extreme(choose: Callable[..., Any]) -> Builtin:
    def extreme(run: RunningProgram, given: list[Any], named: dict[str, Any]) -> Any:
        values = run.items(given[0]) if len(given) == 1 else given
        if named.keys() - {"key", "default"}:
            raise TypeError
        if not values and "default" in named:
            return named["default"]
        keys = _keyed(run, values, named.get("key"))
        return values[choose(range(len(values)), key=keys.__getitem__)]

    return extreme


def _sum(run: RunningProgram, given: list[Any], _: dict[str, Any]) -> Any:
    values = run.items(given[0])
    if not all(isinstance(value, (int, float)) for value in [*values, *given[1:]]):
        raise TypeError
    return sum(values, *given[1:])


def _isinstance(_run: RunningProgram, given: list[Any], _: dict[str, Any]) -> bool:
    value, kinds = given
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    types = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "tuple": tuple}
    return isinstance(value, tuple([types[kind.name] for kind in kinds]))


def _of_data(function: Callable[..., Any], most: int = 2) -> Builtin:
    """Makes a built-in function of a function over at most `most` plain values, charged by what they hold."""

    def call(run: RunningProgram, given: list[Any], named: dict[str, Any]) -> Any:
        if named or len(given) > most or any(isinstance(each, (Closure, NamedFunction)) for each in given):
            raise TypeError
        run.weigh(*given)
        return function(*given)

    return call


def _of_items(function: Callable[..., Any], most: int = 1) -> Builtin:
    """Makes a built-in function of a function over at most `most` iterables, charged by their items."""

    def call(run: RunningProgram, given: list[Any], named: dict[str, Any]) -> Any:
        if named or len(given) > most:
            raise TypeError
        made = function(*[run.items(each) for each in given])
        return made if isinstance(made, (bool, list, tuple, dict)) else list(made)

    return call


def _round(value: Any, digits: int | None = None) -> Any:
    if digits is not None and not -20 <= digits <= 20:
        raise OverflowError
    return round(value, digits)


def _map(run: RunningProgram, given: list[Any], _: dict[str, Any]) -> list[Any]:
    function, values = given
    return [run.invoke(function, [value], {}) for value in run.items(values)]


def _filter(run: RunningProgram, given: list[Any], _: dict[str, Any]) -> list[Any]:
    function, values = given
    return [value for value in run.items(values) if (value if function is None else run.invoke(function, [value], {}))]


def _enumerate(run: RunningProgram, given: list[Any], named: dict[str, Any]) -> list[Any]:
    (values, *start) = given
    return list(enumerate(run.items(values), *start, **named))


FUNCTIONS: Final[Mapping[str, Builtin]] = {
    "abs": _of_data(abs, 1),
    "all": _of_items(all),
    "any": _of_items(any),
    "bool": _of_data(bool, 1),
    "chr": _of_data(chr, 1),
    "dict": _of_data(lambda *given: dict(*given), 1),
    "divmod": _of_data(divmod),
    "enumerate": _enumerate,
    "filter": _filter,
    "float": _of_data(float, 1),
    "int": _of_data(int),
    "isinstance": _isinstance,
    "len": _of_data(len, 1),
    "list": _of_items(lambda *given: list(*given)),
    "map": _map,
    "max": _extreme(max),
    "min": _extreme(min),
    "ord": _of_data(ord, 1),
    "print": lambda run, given, _: run.charge(len(given)),
    "range": _of_data(range, 3),
    "reversed": _of_items(lambda values: values[::-1]),
    "round": _of_data(_round),
    "sorted": sort_values,
    "str": lambda run, given, _: run.text(given[0]) if given else "",
    "sum": _sum,
    "tuple": _of_items(lambda *given: tuple(*given)),
    "zip": _of_items(lambda *given: [*zip(*given, strict=False)], 8),
}
