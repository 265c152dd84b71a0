"""Values and bounds of programs that are carried out with counted steps."""

import ast
from dataclasses import dataclass
from typing import Any, Final, Protocol

MAX_STEPS: Final = 40_000
MAX_SIZE: Final = 10_000  # items of a list, characters of a text
MAX_CHARS: Final = 4_000  # of a program
MAX_BITS: Final = 2_000  # of a whole number
MAX_DEPTH: Final = 300  # of statements and expressions within one another, calls included
MAX_NESTING: Final = 40  # of lists in lists


class ProgramFailed(Exception):
    """A program ended with an error: name of its class, and the line."""

    def __init__(self, name: str, line: int) -> None:
        super().__init__(f"{name} in line {line}")
        self.name = name
        self.line = line


class StepLimit(Exception):
    """The steps are used up; no program can catch it."""


class RunningProgram(Protocol):
    """A program under way, as functions that it may call see it (`program_steps.Run`)."""

    def charge(self, steps: int) -> None:
        """Takes steps away."""

    def weigh(self, *values: object) -> int:
        """Charges all that values hold, and returns how much that is."""
        ...

    def items(self, value: Any) -> list[Any]:
        """Charges and returns all items of an iterable value."""
        ...

    def text(self, value: Any) -> str:
        """The value as `str` writes it."""
        ...

    def invoke(self, function: Any, given: list[Any], named: dict[str, Any]) -> Any:
        """The result of a function of the program, or of ours."""
        ...


@dataclass(eq=False, repr=False, slots=True)
class Closure:
    """A function of the program, with the scope that it was made in."""

    def __repr__(self) -> str:  # in a list that is printed; no address
        return "function"

    parameters: list[str]
    defaults: list[Any]
    body: list[ast.stmt] | ast.expr
    scope: "NameScope"


@dataclass(eq=False, repr=False, slots=True)
class NamedFunction:
    """A function of ours, by name."""

    def __repr__(self) -> str:
        return "function"

    name: str


@dataclass(eq=False, slots=True)
class NameScope:
    """Names of a function or of the program, and those around it."""

    names: dict[str, Any]
    outer: "NameScope | None" = None

    def get(self, name: str) -> Any:
        """The value of a name. Raises NameError."""
        scope: NameScope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        raise NameError(name)


@dataclass(eq=False, slots=True)
class Returned:
    """Return from a function, with its value."""

    value: Any


BREAK: Final = object()
CONTINUE: Final = object()
DATA: Final = (int, float, str, bool, type(None), list, tuple, dict, range)
