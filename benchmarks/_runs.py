"""Runs of a benchmark kept in a file: made in worker processes, whole or not at all, never twice.

Invariant: a run is written when it is done; stopping and starting again goes on where it stopped.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Outcome(Protocol):
    """A dataclass that says which job it is of."""

    @property
    def job(self) -> Hashable: ...


OutcomeT = TypeVar("OutcomeT", bound=Outcome)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile(Generic[OutcomeT]):
    """The file that keeps runs, one JSON line each."""

    path: Path
    decode: Callable[[dict[str, Any]], OutcomeT]  # what `dataclasses.asdict` and JSON made of an outcome, back

    def read(self) -> list[OutcomeT]:
        """The runs, in order; none where the file does not exist. A line cut off by a kill is left out.

        Raises:
            ValueError: a whole line is no run of this version of the benchmark.
        """
        if not self.path.is_file():
            return []
        outcomes: list[OutcomeT] = []
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                outcomes.append(self.decode(json.loads(line)))
            except json.JSONDecodeError:
                continue
            except (KeyError, TypeError) as error:
                raise ValueError(
                    f"{self.path}:{number}: not a run of this version ({error}); give another --out"
                ) from error
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers(Generic[OutcomeT]):
    """How missing runs are made."""

    run: Callable[[Any], OutcomeT]  # a job to its outcome, in a worker
    describe: Callable[[OutcomeT], str]  # one line for each finished run
    prepare: tuple[tuple[str, Sequence[Any], Callable[[Any], Any]], ...] = ()  # (name, inputs, function), one by one
    num: int = 2

    def measure(self, wanted: Sequence[Any], file: RunFile[OutcomeT], console: Console) -> None:
        """Makes every wanted run that the file lacks. A run that fails stops the rest; finished ones stay."""
        done = {outcome.job for outcome in file.read()}
        missing = [job for job in wanted if job not in done]
        if not missing:
            return
        os.environ["OMP_NUM_THREADS"] = "1"  # read by the workers
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        context = multiprocessing.get_context("spawn")  # torch and fork do not go together
        with Progress(*columns, console=console) as progress, ProcessPoolExecutor(self.num, context) as pool:
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
                        file.append(outcome)
                        progress.console.print(self.describe(outcome), highlight=False)
                        progress.advance(bar)
            finally:
                for future in running:
                    future.cancel()
