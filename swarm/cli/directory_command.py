"""Commands about a directory: the directory is an argument, or the value of `--dir`.

Invariant: both spellings work with every one of these commands.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from typer.core import TyperCommand

_OPTION: Final = "--dir"


class DirectoryCommand(TyperCommand):
    """A command whose first arguments are one or more directories, which `--dir` may also give."""

    place: ClassVar = "first"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["epilog"] = kwargs.get("epilog") or f"{_OPTION} DIR is the same as the {self.place} argument."
        super().__init__(*args, **kwargs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the directories of `--dir` among the arguments, in their place."""
        found, rest = _split(args)
        return super().parse_args(ctx, [*found, *rest] if self.place == "first" else [*rest, *found])


class DirectoryLastCommand(DirectoryCommand):
    """A command whose last arguments are directories, after the thing that it is about, such as a link."""

    place = "last"


def _split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns (values of `--dir`, all other words), each in order."""
    found: list[str] = []
    rest: list[str] = []
    waiting = iter(args)
    for each in waiting:
        if each == "--":
            rest += [each, *waiting]
        elif each.startswith(f"{_OPTION}="):
            found.append(each.removeprefix(f"{_OPTION}="))
        elif each == _OPTION and (value := next(waiting, None)) is not None:
            found.append(value)
        else:
            rest.append(each)
    return found, rest
