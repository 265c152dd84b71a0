"""Parts of every program's command line: a directory as an argument or `--dir`, and lines while a command waits.

Invariant: both spellings of a directory work, and a command that waits prints a line with the present work and the
seconds so far from `FIRST_S` on, at least every `EVERY_S`; a fast command prints none.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import typer
from rich.console import Console
from typer.core import TyperCommand

from swarm.config import CoordinatorConfig, NodeConfig, config_file, load_config

AnyConfig = TypeVar("AnyConfig", NodeConfig, CoordinatorConfig)
FIRST_S: Final = 4.0
EVERY_S: Final = 8.0
_OPTION: Final = "--dir"


def load_in_place(
    kind: type[AnyConfig], directory: Path | None, config: Path | None, overrides: list[str], default: str
) -> tuple[AnyConfig, Path]:
    """The configuration that a directory or --config names, and its file; without a `dir`, the directory is that.

    Raises:
        ConfigError: as `config_file` and `load_config`.
    """
    path = config_file(directory, config, default)
    settings = load_config(kind, path, overrides)
    if config is None and "dir" not in settings.model_fields_set:
        settings = settings.model_copy(update={"dir": path.parent})
    return settings, path


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


@contextmanager
def ending_at_once() -> Generator[None]:
    """Context of work that leaves nothing behind: Ctrl-C ends the process, whatever its other threads compute."""

    def end(*_: object) -> None:
        Console(stderr=True).show_cursor()  # a progress bar hides it
        typer.echo("stopped", err=True)
        os._exit(128 + signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def waiting(what: str, *, is_quiet: bool = False, say: Callable[[str], None] | None = None) -> Generator["Waiting"]:
    """Context of work without any output of its own.

    Args:
        what: the work, as people name it, such as "loading the model".
        is_quiet: True: nothing is printed, as for a command whose output a program reads.
        say: takes the lines; None: standard error.

    Example:
        with waiting("loading the model") as wait:
            load()
            wait.now("writing the files")
    """
    wait = Waiting(what, say or (lambda line: typer.echo(line, err=True)))
    if not is_quiet:
        wait.start()
    try:
        yield wait
    finally:
        wait.end()


class Waiting:
    """The work that a command waits for, named by a thread of its own."""

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self._what, self._say = what, say
        self._began_s = time.monotonic()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)

    def start(self) -> None:
        """Begins to print."""
        self._thread.start()

    def now(self, what: str) -> None:
        """Names the work that goes on now, or its progress."""
        self._what = what

    def end(self) -> None:
        """Ends the lines; none comes after this call."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause_s = FIRST_S
        while not self._ends.wait(pause_s):
            pause_s = EVERY_S
            self._say(f"{self._what}, {time.monotonic() - self._began_s:.0f} s")
