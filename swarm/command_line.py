"""Parts of every program's command line: a directory as an argument or `--dir`, and lines while a command waits.

Invariant: both spellings of a directory work. A command that waits longer than `FIRST_S` prints a line with its current
work and the seconds so far, then another line every `EVERY_S`; a faster command prints none.
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
    """Loads a configuration; returns it and its file. Without --config, an unset `dir` becomes the file's directory.

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
        """Inserts the values of `--dir` before the other arguments, or after them if `place` is "last"."""
        found, rest = _split(args)
        return super().parse_args(ctx, [*found, *rest] if self.place == "first" else [*rest, *found])


class DirectoryLastCommand(DirectoryCommand):
    """A command whose last arguments are directories; its subject, such as a link, comes first."""

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
    """Context manager of work without clean-up: Ctrl-C ends the process at once, even while other threads compute."""

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
    """Context manager that prints progress lines during work that has no output of its own.

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
    """A thread that prints the work that a command waits for, and the seconds so far."""

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self._what, self._say = what, say
        self._began_s = time.monotonic()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def now(self, what: str) -> None:
        """Sets the current work, or its progress, that the next lines show."""
        self._what = what

    def end(self) -> None:
        """Stops the thread; no line is printed after this call."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause_s = FIRST_S
        while not self._ends.wait(pause_s):
            pause_s = EVERY_S
            self._say(f"{self._what}, {time.monotonic() - self._began_s:.0f} s")
