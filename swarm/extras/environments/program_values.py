"""Values and bounds of programs that are interpreted with counted steps."""

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
    """Error of a program: the name of its class, and the line."""

    def __init__(self, name: str, line: int) -> None:
        super().__init__(f"{name} in line {line}")
        self.name = name
        self.line = line


class StepLimit(Exception):
    """Error that ends a program whose steps are used up; no program can catch it."""


class RunningProgram(Protocol):
    """The running program, as the built-in functions see it (`program_steps.Run`)."""

    def charge(self, steps: int) -> None:
        """Subtracts steps from those left. Raises StepLimit if too few are left."""

    def weigh(self, *values: object) -> int:
        """Charges for everything that the values hold, at any depth, and returns the number of steps charged."""
        ...

    def items(self, value: Any) -> list[Any]:
        """Charges for the items of an iterable value and returns them. Raises TypeError for any other value."""
        ...

    def text(self, value: Any) -> str:
        """Charges for a value and returns it as `str` writes it. Raises TypeError for a function."""
        ...

    def invoke(self, function: Any, given: list[Any], named: dict[str, Any]) -> Any:
        """Calls a function of the program, or a built-in one, and returns its result.

        Args:
            function: the function; TypeError for any other value.
            given: arguments by position.
            named: arguments by name.
        """
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
    """A built-in function of `program_functions.FUNCTIONS`, by name."""

    def __repr__(self) -> str:
        return "function"

    name: str


@dataclass(eq=False, slots=True)
class NameScope:
    """Names of a function, a comprehension or the program, with the scope around it."""

    names: dict[str, Any]
    outer: "NameScope | None" = None

    def get(self, name: str) -> Any:
        """The value of a name, in this scope or else the nearest one around it. Raises NameError."""
        scope: NameScope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        raise NameError(name)


@dataclass(eq=False, slots=True)
class Returned:
    """Signal that a function returns, with its value."""

    value: Any


BREAK: Final = object()
CONTINUE: Final = object()
DATA: Final = (int, float, str, bool, type(None), list, tuple, dict, range)
