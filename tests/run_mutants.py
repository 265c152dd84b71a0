"""Mutants: each takes one defence out of the code, and the tests that claim the defence must then fail.

    make mutants                                  # all of tests/mutants.toml
    .venv/bin/python tests/run_mutants.py WORD    # those whose name contains a word

A mutant is a table of tests/mutants.toml:

    [a_copy_is_not_noticed]
    patch."swarm.exchange.novelty:Novelty.copied_bits" = "lambda *_: 0.0"
    red = ["chaos/test_hostile_admission.py::test_a_copy_is_refused"]

`patch` maps an attribute to the Python expression that replaces it, where `old` is what it replaces and every name of
the attribute's module is known. `red` names tests, of which every case must fail by an assertion; where some cases hold
without the defence, it names the others: `test_x[case]`. A mutant whose tests end otherwise says so:
`raises = "OverflowError"`, or `hangs = true` where they run into their limit.

Invariant: an exception that the table does not name is no proof: a broken mutant is not counted as caught.
"""

import argparse
import ast
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import BaseModel

TESTS: Final = Path(__file__).parent
TABLE: Final = TESTS / "mutants.toml"
LIMIT_S: Final = 60  # of one test; one that hangs is meant to
PROCESS_S: Final = 900.0  # of all tests of a mutant, which may leave threads that wait for ever
# What a test that failed leaves open is no news of the mutant.
PLUGINS_OFF: Final = ("-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "no:threadexception")
PROOFS: Final = ("AssertionError", "Failed")  # of pytest: a claim did not hold, or nothing was raised


class Mutant(BaseModel, frozen=True, extra="forbid"):
    """A change of the code, and the tests that must notice."""

    name: str
    patch: Mapping[str, str]  # "module:attribute.path" -> Python expression
    red: tuple[str, ...]  # test ids, relative to tests/
    raises: str = ""  # class of the exception that ends the tests, where it is no assertion
    hangs: bool = False

    def is_proof(self, error: BaseException) -> bool:
        """True where a test that ended with this exception noticed the mutant."""
        if isinstance(error, BaseExceptionGroup):  # of tasks
            return any(map(self.is_proof, error.exceptions))
        if str(error).startswith("Timeout"):
            return self.hangs
        return type(error).__name__ in ([self.raises] if self.raises else PROOFS)


def read_mutants(table: Path = TABLE) -> list[Mutant]:
    """All mutants, in the order of the table.

    Raises:
        ValidationError: a mutant has a key that is not known, or lacks one.
    """
    rows = tomllib.loads(table.read_text())
    return [Mutant.model_validate({"name": name, **row}) for name, row in rows.items()]


def apply(mutant: Mutant) -> None:
    """Changes the loaded modules of this process, for good.

    Raises:
        AttributeError: a target does not exist.
    """
    for target, expression in mutant.patch.items():
        owner, name, old = find(target)
        module = importlib.import_module(target.partition(":")[0])
        code = compile(expression, f"{TABLE.name}: {mutant.name}", "eval")
        setattr(owner, name, eval(code, {**vars(module), "old": old}))  # our own table, as trusted as this file


def find(target: str) -> tuple[Any, str, Any]:
    """Owner, name and present value of an attribute. Raises AttributeError, ImportError."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    old = vars(owner)[name] if isinstance(owner, type) and name in vars(owner) else getattr(owner, name)
    return owner, name, old


@dataclass(eq=False)  # pytest keeps plugins in sets
class Watcher:
    """A pytest plugin: applies a mutant once everything is imported, and notes how each test ended."""

    mutant: Mutant
    ends: dict[str, list[str]] = field(default_factory=dict[str, list[str]])  # case -> how it ended
    notices: set[str] = field(default_factory=set[str])  # cases that failed by proof
    holds: set[str] = field(default_factory=set[str])  # cases that ended otherwise

    def pytest_collection_finish(self) -> None:
        apply(self.mutant)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        case = item.nodeid.removeprefix("tests/")
        if call.excinfo is not None and not report.skipped:
            error = call.excinfo.value
            self.ends.setdefault(case, []).append(f"{type(error).__name__}: {str(error)[:200]}")
            if call.when == "call" and self.mutant.is_proof(error):
                self.notices.add(case)
        if call.when == "call" and not report.skipped and case not in self.notices:
            self.holds.add(case)
        return report

    def why_not_red(self, test: str) -> str:
        """The cases of a test that do not notice the mutant, with how each ended; nothing where all do."""
        mine = [each for each in self.holds | self.notices | set(self.ends) if test in (each, each.partition("[")[0])]
        if not mine:
            return f"{test}: ran no case"
        held = sorted(set(mine) - self.notices)
        return "; ".join(f"{each}: {' | '.join(self.ends.get(each, ['passed']))}" for each in held)


def run_here(mutant: Mutant, *, is_shown: bool) -> str:
    """Runs the tests of a mutant in this process; returns why they do not prove it, or nothing."""
    watcher = Watcher(mutant)
    ids = [str(TESTS / each) for each in mutant.red]
    words = ["--tb=short"] if is_shown else ["-q", "-q", "--no-header", "--no-summary", "--tb=no"]
    status = pytest.main([*words, *PLUGINS_OFF, f"--timeout={LIMIT_S}", *ids], plugins=[watcher])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return f"pytest ended with {status!r}"
    return "; ".join(filter(None, map(watcher.why_not_red, mutant.red)))


def run_forked(mutant: Mutant, *, is_shown: bool = False) -> tuple[str, float]:
    """The same in a child of this process, which has imported what tests need: a mutant costs its tests alone."""
    began_s = time.monotonic()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        if not is_shown:
            with Path(os.devnull).open("w") as nothing:
                os.dup2(nothing.fileno(), 1)
                os.dup2(nothing.fileno(), 2)
        try:
            answer = run_here(mutant, is_shown=is_shown)
        except BaseException as error:  # whatever it is, the parent shows it
            answer = f"{type(error).__name__}: {error}"
        with os.fdopen(writer, "wb") as out:
            pickle.dump(answer, out)
        os._exit(0)
    os.close(writer)
    end = threading.Timer(PROCESS_S, os.kill, (child, signal.SIGKILL))
    end.start()
    with os.fdopen(reader, "rb") as source:
        try:
            answer = pickle.load(source)  # not to its end: a child that was forked meanwhile may hold the pipe
        except EOFError:
            answer = "its process died"
    os.waitpid(child, 0)
    end.cancel()
    return answer, time.monotonic() - began_s


def faults(mutants: Sequence[Mutant]) -> list[str]:
    """Rows of the table that cannot be right: an expression that is none, a test that does not exist."""
    found: list[str] = []
    for mutant in mutants:
        for target, expression in mutant.patch.items():
            try:
                ast.parse(expression, mode="eval")
                find(target)
            except (SyntaxError, ImportError, AttributeError) as error:
                found.append(f"{mutant.name}: {target}: {error}")
        for test in mutant.red:
            path, _, name = test.partition("::")
            function = name.rpartition("::")[2].partition("[")[0]
            file = TESTS / path
            if not file.is_file() or f"def {function}(" not in file.read_text():
                found.append(f"{mutant.name}: {test} does not exist")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="*", help="mutants whose name contains one of these; without: all")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that run at the same time (default: 2)")
    parser.add_argument("--table", type=Path, default=TABLE, help="default: tests/mutants.toml")
    parser.add_argument("--show", action="store_true", help="print what pytest prints")
    options = parser.parse_args(arguments)
    os.chdir(TESTS.parent)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("SWARM_NIGHTLY", "1")  # a sweep is skipped elsewhere, and proves nothing then
    mutants = [
        each
        for each in read_mutants(options.table)
        if not options.word or any(word in each.name for word in options.word)
    ]
    if wrong := faults(mutants):
        print(*wrong, sep="\n")
        return 1
    survivors, began_s = 0, time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        for number, (mutant, (missed, seconds)) in enumerate(
            zip(mutants, pool.map(partial(run_forked, is_shown=options.show), mutants), strict=True), start=1
        ):
            survivors += bool(missed)
            end = f"SURVIVES: {missed}" if missed else "red"
            print(f"{number}/{len(mutants)} {mutant.name} ({seconds:.1f} s): {end}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants red in {time.monotonic() - began_s:.0f} s")
    return 1 if survivors or not mutants else 0


if __name__ == "__main__":
    sys.exit(main())
