"""Runs of a benchmark kept in a file: made in worker processes, whole or not at all, never twice.

Invariant: a run is written when it is done; stopping and starting again goes on where it stopped.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar, get_type_hints

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

ROOT: Final = Path(__file__).resolve().parents[1]
INTERRUPTED: Final = 130  # exit code


class Outcome(Protocol):
    """A dataclass that names its job."""

    @property
    def job(self) -> Hashable: ...


OutcomeT = TypeVar("OutcomeT", bound=Outcome)


def decode(kind: type[Any], data: dict[str, Any]) -> Any:
    """A dataclass from the JSON of its `asdict`: lists are tuples again.

    Raises:
        KeyError or TypeError: the fields are those of another class.
    """
    kinds = get_type_hints(kind)

    def value(name: str, given: Any) -> Any:
        if is_dataclass(kinds[name]):
            return decode(kinds[name], given)
        return tuple(given) if isinstance(given, list) else given

    return kind(**{name: value(name, given) for name, given in data.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs(Generic[OutcomeT]):
    """The runs that a file keeps, one JSON line each, and the way to make those that it lacks."""

    path: Path
    outcome: type[OutcomeT]
    run: Callable[[Any], OutcomeT]  # a job to its outcome, in a worker process
    describe: Callable[[OutcomeT], str]  # one line for each finished run
    prepare: tuple[tuple[str, Sequence[Any], Callable[[Any], Any]], ...] = ()  # (name, inputs, function), one by one
    num_workers: int = 2

    def read(self) -> list[OutcomeT]:
        """The kept runs, in order; none where the file does not exist. A line cut off by a kill is left out.

        Raises:
            ValueError: a whole line is no run of this version of the benchmark.
        """
        if not self.path.is_file():
            return []
        outcomes: list[OutcomeT] = []
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                outcomes.append(decode(self.outcome, json.loads(line)))
            except json.JSONDecodeError:
                continue
            except (KeyError, TypeError) as error:
                message = f"{self.path}:{number}: not a run of this version ({error}); give another --out"
                raise ValueError(message) from error
        return outcomes

    def append(self, outcome: OutcomeT) -> None:
        """Adds a run, and a line break before it where the last line was cut off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(asdict(outcome)).encode() + b"\n")  # pyright: ignore[reportArgumentType]

    def finished(self, wanted: Sequence[Any], *, only_kept: bool = False) -> list[OutcomeT]:
        """The wanted runs, in order; missing ones are made first. Ends the program where there is none to show."""
        console = Console(stderr=True)
        if not only_kept:
            start_s = time.monotonic()
            try:
                self.make(wanted, console)
            except KeyboardInterrupt:
                console.print(f"stopped; finished runs are in {self.path}, start again to go on", soft_wrap=True)
                raise SystemExit(INTERRUPTED) from None
            console.print(f"{len(wanted)} runs in {time.monotonic() - start_s:.0f} s", highlight=False)
        place = {job: index for index, job in enumerate(wanted)}
        outcomes = sorted((o for o in self.read() if o.job in place), key=lambda outcome: place[outcome.job])
        if not outcomes:
            console.print(f"{self.path} holds no run of this setting yet", soft_wrap=True)
            raise SystemExit(1)
        return outcomes

    def make(self, wanted: Sequence[Any], console: Console) -> None:
        """Makes every wanted run that the file lacks. A run that fails stops the rest; finished ones stay."""
        done = {outcome.job for outcome in self.read()}
        missing = [job for job in wanted if job not in done]
        if not missing:
            return
        os.environ["OMP_NUM_THREADS"] = "1"  # read by the workers
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        context = multiprocessing.get_context("spawn")  # torch and fork do not go together
        with Progress(*columns, console=console) as progress, ProcessPoolExecutor(self.num_workers, context) as pool:
            for name, inputs, function in self.prepare:
                bar = progress.add_task(name, total=len(inputs))
                for future in [pool.submit(function, each) for each in inputs]:
                    future.result()
                    progress.advance(bar)
            bar = progress.add_task("runs", total=len(wanted), completed=len(wanted) - len(missing))
            running = {pool.submit(self.run, job) for job in missing}
            try:
                while running:
                    finished, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        outcome = future.result()
                        self.append(outcome)
                        progress.console.print(self.describe(outcome), highlight=False)
                        progress.advance(bar)
            finally:
                for future in running:
                    future.cancel()


def run_parser(name: str, description: str | None, *, seeds: int | None) -> argparse.ArgumentParser:
    """The options that all benchmarks of kept runs share."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=at_least_one, default=seeds, help="runs for each cell; more extends the file")
    parser.add_argument("--workers", type=at_least_one, default=2, help="processes of one thread each (default 2)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / f"{name}.jsonl", help="where runs are kept")
    parser.add_argument("--table", action="store_true", help="only print the table of the runs that are there")
    return parser


def at_least_one(text: str) -> int:
    """A positive number from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)
