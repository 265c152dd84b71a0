"""What `swarm why` says first of nodes whose ailment is known: real nodes of the tiny model, each made ill for real.

    python -m benchmarks.ailments                     # all of them: about ten minutes
    python -m benchmarks.ailments --only prompt,rate  # those whose name has one of these words
    python -m benchmarks.ailments --unseen            # those that the rules were not written for
    python -m benchmarks.ailments --examiner          # those of an examiner, who had not read the rules
    python -m benchmarks.ailments --third-examiner    # those of the third examiner, who had not either
    python -m benchmarks.ailments --fourth-examiner   # those of the fourth examiner, who had not either
    python -m benchmarks.ailments --fifth-examiner    # those of the fifth examiner, who had not either
    python -m benchmarks.ailments --fix               # the printed fix goes into node.toml, and the node is asked again

Each ailment is planted in a folder of its own (`--out`), in a node that a daemon runs; then a snapshot of its directory
is diagnosed as if the node ran, or stopped, as the ailment says. Right is what names the planted cause first.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks._ailing_node import empty
from benchmarks._ailments_examiner import EXAMINER, HEALTHY
from benchmarks._ailments_fifth_examiner import FIFTH_EXAMINER, FIFTH_HEALTHY
from benchmarks._ailments_fourth_examiner import FOURTH_EXAMINER, FOURTH_HEALTHY
from benchmarks._ailments_known import KNOWN, Ailment
from benchmarks._ailments_mended import MENDINGS, mend
from benchmarks._ailments_third_examiner import THIRD_EXAMINER, THIRD_HEALTHY
from benchmarks._ailments_unseen import FOURTH, SECOND, THIRD, UNSEEN
from swarm.diagnosis import Diagnosed, Gravity, diagnose, read_snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What was said of one planted ailment."""

    ailment: Ailment
    found: tuple[Diagnosed, ...]  # notes left out
    seconds: float
    error: str = ""  # it could not be planted

    @property
    def is_right(self) -> bool:
        """The planted cause is named first; of a healthy node nothing is blamed."""
        if not self.ailment.expected:
            return not self.found and not self.error
        return bool(self.found) and self.ailment.is_named_by(self.found[0])

    @property
    def is_named(self) -> bool:
        """The planted cause is among what is found."""
        return self.is_right or any(self.ailment.is_named_by(each) for each in self.found)


def ask(directory: Path, *, runs: bool) -> tuple[Diagnosed, ...]:
    """What is wrong with a node, causes first; it is looked at in the moment in which it wrote its last status."""
    snapshot = read_snapshot(directory, time.time())
    if runs:  # the node was stopped so that its files stand still: it is asked about as if it had not been
        snapshot = replace(snapshot, runs=True, now_s=snapshot.value("at_s", snapshot.now_s))
    return tuple(each for each in diagnose(snapshot) if each.gravity is not Gravity.NOTE)


async def try_one(ailment: Ailment, folder: Path) -> Answer:
    """Plants an ailment and asks."""
    began_s = time.monotonic()
    try:
        directory = await ailment.plant(empty(folder))
        found, error = await asyncio.to_thread(ask, directory, runs=ailment.is_running), ""
    except Exception as failure:  # one that cannot be planted is a row of the table
        found, error = (), f"{type(failure).__name__}: {failure}"
    finally:
        await asyncio.to_thread(end_children)
    return Answer(ailment=ailment, found=found, seconds=time.monotonic() - began_s, error=error)


def end_children() -> None:
    """Ends the nodes that an ailment left behind, frozen ones too."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if "node.cli" in child.cmdline():
                child.kill()


def row(answer: Answer) -> str:
    """A line of the table."""
    first = answer.found[0] if answer.found else None
    said = answer.error or (f"`{first.name}`" if first else "nothing is wrong")
    others = ", ".join(each.name for each in answer.found[1:]) or "-"
    verdict = "right" if answer.is_right else "named, not first" if answer.is_named else "WRONG"
    return f"| {answer.ailment.name} | {said} | {others} | {verdict} |"


async def run(ailments: Sequence[Ailment], out: Path) -> list[Answer]:
    """Each in turn, with a row as it is done."""
    answers: list[Answer] = []
    print("| planted | said first | also said | |\n|---|---|---|---|", flush=True)
    for number, ailment in enumerate(ailments):
        answers.append(await try_one(ailment, out / f"{number:02d}"))
        print(row(answers[-1]), flush=True)
        print(f"{answers[-1].seconds:.0f} s", file=sys.stderr, flush=True)
    right = sum(answer.is_right for answer in answers)
    print(f"\n{right} of {len(answers)} right")
    return answers


def first_of(directory: Path) -> tuple[str, str]:
    """Name and fix of what is found first in a node that ran until a moment ago."""
    found = ask(directory, runs=True)
    return (found[0].name, found[0].fix) if found else ("nothing is wrong", "")


async def run_mendings(out: Path, words: Sequence[str]) -> bool:
    """Tries the fixes that are printed; whether all of them helped."""
    print("| planted | said first | done | said then |\n|---|---|---|---|", flush=True)
    failed = 0
    for number, mending in enumerate(MENDINGS):
        if words and not any(word in mending.name for word in words):
            continue
        try:
            name, line, after = await mend(mending, empty(out / f"mended{number:02d}"), first_of)
        except Exception as failure:  # one that cannot be tried is a row of the table
            name, line, after = "?", "?", f"{type(failure).__name__}: {failure}"
        failed += after != "nothing is wrong"
        print(f"| {mending.name} | `{name}` | `{line}` | {after} |", flush=True)
    return not failed


def main() -> None:
    """Plants, asks and prints a table; what it is started with is in the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words of names, separated by commas")
    parser.add_argument("--out", type=Path, default=None, help="folder to keep the directories in")
    parser.add_argument("--unseen", action="store_true", help="those that the rules were not written for")
    parser.add_argument("--examiner", action="store_true", help="those of an examiner, and healthy nodes")
    parser.add_argument("--third-examiner", action="store_true", help="those of a third examiner, and healthy nodes")
    parser.add_argument("--fourth-examiner", action="store_true", help="those of a fourth examiner, and healthy nodes")
    parser.add_argument("--fifth-examiner", action="store_true", help="those of a fifth examiner, and healthy nodes")
    parser.add_argument("--fix", action="store_true", help="do what is said, and ask again")
    arguments = parser.parse_args()
    words = [word for word in arguments.only.split(",") if word]
    planted = UNSEEN + SECOND + THIRD + FOURTH if arguments.unseen else KNOWN
    planted = EXAMINER + HEALTHY if arguments.examiner else planted
    planted = THIRD_EXAMINER + THIRD_HEALTHY if arguments.third_examiner else planted
    planted = FOURTH_EXAMINER + FOURTH_HEALTHY if arguments.fourth_examiner else planted
    planted = FIFTH_EXAMINER + FIFTH_HEALTHY if arguments.fifth_examiner else planted
    chosen = [each for each in planted if not words or any(word in each.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        if arguments.fix:
            sys.exit(0 if asyncio.run(run_mendings(arguments.out or Path(folder), words)) else 1)
        answers = asyncio.run(run(chosen, arguments.out or Path(folder)))
    sys.exit(0 if all(answer.is_right for answer in answers) else 1)


if __name__ == "__main__":
    main()
