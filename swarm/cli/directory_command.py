"""Commands about a directory: the directory is their first argument, or the value of `--dir`.

Invariant: both spellings work with every one of these commands.
"""

from collections.abc import Sequence
from typing import Any, Final

from typer.core import TyperCommand

_OPTION: Final = "--dir"


class DirectoryCommand(TyperCommand):
    """A command whose first arguments are one or more directories, which `--dir` may also give."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["epilog"] = kwargs.get("epilog") or f"{_OPTION} DIR is the same as the first argument."
        super().__init__(*args, **kwargs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the directories of `--dir` before the other arguments."""
        return super().parse_args(ctx, _as_arguments(args))


def _as_arguments(args: Sequence[str]) -> list[str]:
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
    return [*found, *rest]
