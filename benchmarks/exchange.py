"""Time until every peer holds every other's rollout groups, and its cost in bytes and CPU.

Invariant: each peer is a process of its own on real connections; the clock starts when all are subscribed
and ends when the last group has passed signature, digest and structure at the last peer. Each case is
followed at once by its floors (bare TCP, verification without network), so that ratios are of one moment.

    python -m benchmarks.exchange
    python -m benchmarks.exchange --peers 4 --cases 8x2,64x4 --repetitions 9 --json
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks._baselines import ROOT, add_record, write_record
from benchmarks._recheck import Recheck, measure_rechecks
from benchmarks._tcp import TcpCounts

MESHES: Final = ("exchange", "tcp", "verify")
DEFAULT_CASES: Final = "8x2,64x4,64x16"
_LEAD_S: Final = 0.05  # between the command and the common start
_ANSWER_TIMEOUT_S: Final = 120.0
_RECHECK_GROUPS: Final = 200


@dataclass(frozen=True, slots=True)
class Case:
    """Groups per peer, and the size of each in KB of 1024 bytes as sealed."""

    num_groups: int
    kilobytes: int

    def __str__(self) -> str:
        return f"{self.num_groups} x {self.kilobytes} KB"


@dataclass(frozen=True, slots=True)
class Repetition:
    """One all-to-all exchange."""

    seconds: float  # from the common start until the last peer is complete
    cpu_s: float  # of all peers
    useful_bytes: int  # bodies that arrived where they were wanted
    tcp: TcpCounts | None  # None where the kernel cannot say, or no network was used


@dataclass(frozen=True, slots=True)
class Result:
    """One case over one mesh."""

    case: Case
    mesh: str
    repetitions: tuple[Repetition, ...]

    @property
    def seconds(self) -> float:
        """Median."""
        return statistics.median(repetition.seconds for repetition in self.repetitions)

    @property
    def cpu_s(self) -> float:
        """Median."""
        return statistics.median(repetition.cpu_s for repetition in self.repetitions)

    @property
    def payload_ratio(self) -> float | None:
        """TCP payload over useful bytes; None where the kernel does not count."""
        return _ratio([(r.tcp.payload_bytes, r.useful_bytes) for r in self.repetitions if r.tcp])

    @property
    def wire_ratio(self) -> float | None:
        """TCP payload and packet headers over useful bytes."""
        return _ratio([(r.tcp.wire_bytes, r.useful_bytes) for r in self.repetitions if r.tcp])


def _ratio(pairs: Sequence[tuple[int, int]]) -> float | None:
    return statistics.median(sent / useful for sent, useful in pairs) if pairs else None


def parse_cases(text: str) -> list[Case]:
    """ "8x2,64x16" -> 8 groups of 2 KB, then 64 of 16 KB. Raises ArgumentTypeError."""
    cases: list[Case] = []
    for part in text.split(","):
        count, _, size = part.partition("x")
        if not (count.isdecimal() and size.isdecimal() and int(count) and int(size)):
            raise argparse.ArgumentTypeError(f"{part!r} is not GROUPSxKILOBYTES, such as 8x2")
        cases.append(Case(int(count), int(size)))
    return cases


class Child:
    """A peer process, as its parent sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, number: int) -> "Child":
        """Starts a peer; it imports for a second or two."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks._peer",
            str(number),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        return cls(process)

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Sends one command and waits for its answer. Raises RuntimeError when the peer died or hangs."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise RuntimeError(f"a peer did not answer {do!r} within {_ANSWER_TIMEOUT_S:.0f} s") from None
        if not line:
            raise RuntimeError(f"a peer died during {do!r}")
        return json.loads(line)

    async def end(self) -> None:
        """Ends the process, whatever it does."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


async def _all(children: Sequence[Child], do: str, **arguments: Any) -> list[dict[str, Any]]:
    return await asyncio.gather(*(child.ask(do, **arguments) for child in children))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def measure(num_peers: int, cases: Sequence[Case], num_repetitions: int) -> list[Result]:
    """Every case over every mesh. Raises RuntimeError when a case does not complete."""
    async with AsyncExitStack() as stack:
        peers = [await Child.start(number) for number in range(num_peers)]
        for peer in peers:
            stack.push_async_callback(peer.end)
        _say(f"{num_peers} peers, each a process; {os.cpu_count()} cores; starting and connecting ...")
        addresses = await _all(peers, "start")
        await _all(peers, "connect", peers=addresses)
        results: list[Result] = []
        for number, case in enumerate(cases):
            results += await _measure_case(peers, case, num_repetitions, seed=1000 * number)
        await _all(peers, "stop")
        return results


async def _measure_case(peers: Sequence[Child], case: Case, num_repetitions: int, seed: int) -> list[Result]:
    prepared = await _all(peers, "prepare", num_groups=case.num_groups, target_bytes=1024 * case.kilobytes, seed=seed)
    published = sum(answer["num_bytes"] for answer in prepared)
    repetitions: dict[str, list[Repetition]] = {mesh: [] for mesh in MESHES}
    for number in range(num_repetitions + 1):
        for mesh in MESHES:  # interleaved, so that a busy moment of the machine meets all three
            repetition = await _repeat(peers, mesh, case)
            if number == 0:
                continue  # warms caches, allocators and congestion windows; not reported
            if mesh != "verify" and repetition.useful_bytes != published * (len(peers) - 1):
                raise RuntimeError(f"{repetition.useful_bytes} bytes arrived of {published} x {len(peers) - 1}")
            repetitions[mesh].append(repetition)
        if number:
            times = ", ".join(f"{mesh} {1000 * repetitions[mesh][-1].seconds:.0f} ms" for mesh in MESHES)
            _say(f"{case}, {number} of {num_repetitions}: {times}")
    return [Result(case, mesh, tuple(repetitions[mesh])) for mesh in MESHES]


async def _repeat(peers: Sequence[Child], mesh: str, case: Case) -> Repetition:
    await _all(peers, "arm", wanted=case.num_groups * (len(peers) - 1))
    before = await _all(peers, "counters")
    at_s = time.monotonic() + _LEAD_S
    answers = await _all(peers, "run", mesh=mesh, at_s=at_s)
    after = await _all(peers, "counters")
    tcp = None
    if mesh != "verify" and all(answer["tcp"] is not None for answer in (*before, *after)):
        tcp = _sum(after) - _sum(before)
    return Repetition(
        seconds=max(answer["done_s"] for answer in answers) - at_s,
        cpu_s=sum(a["cpu_s"] - b["cpu_s"] for a, b in zip(after, before, strict=True)),
        useful_bytes=sum(answer["received_bytes"] for answer in answers),
        tcp=tcp,
    )


def _sum(answers: Sequence[dict[str, Any]]) -> TcpCounts:
    return sum((TcpCounts(*answer["tcp"]) for answer in answers), TcpCounts(0, 0))


def table(results: Sequence[Result]) -> str:
    """The figures of every case, with the floors beside them."""
    lines = [
        "| groups per peer | all hold all, s (min - max) | bare TCP, s | checks alone, s | over both floors "
        "| TCP payload / useful | with packet headers | bare TCP, same | CPU s | CPU s, checks alone |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    by_case: dict[Case, dict[str, Result]] = {}
    for result in results:
        by_case.setdefault(result.case, {})[result.mesh] = result
    for case, of in by_case.items():
        ours, tcp, verify = (of[mesh] for mesh in MESHES)
        times = [repetition.seconds for repetition in ours.repetitions]
        cells = [
            str(case),
            f"{ours.seconds:.3f} ({min(times):.3f} - {max(times):.3f})",
            f"{tcp.seconds:.3f}",
            f"{verify.seconds:.3f}",
            f"{ours.seconds / (tcp.seconds + verify.seconds):.1f} x",
            _times(ours.payload_ratio),
            _times(ours.wire_ratio),
            _times(tcp.wire_ratio),
            f"{ours.cpu_s:.2f}",
            f"{verify.cpu_s:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figures(results: Sequence[Result]) -> dict[str, float]:
    """The ratios of every case by name, for `--record`."""
    found: dict[str, float] = {}
    for case in dict.fromkeys(result.case for result in results):
        ours, tcp, verify = (next(r for r in results if (r.case, r.mesh) == (case, mesh)) for mesh in MESHES)
        found[f"{case}, time over both floors"] = ours.seconds / (tcp.seconds + verify.seconds)
        found[f"{case}, CPU over checks alone"] = ours.cpu_s / verify.cpu_s
        if ours.wire_ratio is not None:
            found[f"{case}, wire over useful bytes"] = ours.wire_ratio
    return found


def _times(ratio: float | None) -> str:
    return "not counted" if ratio is None else f"{ratio:.2f} x"


def recheck_table(rechecks: Sequence[Recheck]) -> str:
    """Admission with the reward re-check, which the exchange table leaves out."""
    lines = ["| verifier | groups | mean bytes | ms per group | groups per s |", "|---|---|---|---|---|"]
    for r in rechecks:
        speed = f"{r.ms_per_group:.2f} | {1000 / r.ms_per_group:.0f}"
        lines.append(f"| {r.verifier} | {r.num_groups} | {r.mean_bytes:.0f} | {speed} |")
    return "\n".join(lines)


def as_json(num_peers: int, results: Sequence[Result], rechecks: Sequence[Recheck]) -> str:
    """Every repetition, for other programs."""
    rows = [
        asdict(result)
        | {"median_s": result.seconds, "payload_ratio": result.payload_ratio, "wire_ratio": result.wire_ratio}
        for result in results
    ]
    return json.dumps(
        {"num_peers": num_peers, "num_cores": os.cpu_count(), "results": rows, "rechecks": list(map(asdict, rechecks))},
        indent=2,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 when every case completed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers", type=int, default=8, help="processes, at least 2 (default 8)")
    parser.add_argument(
        "--cases", type=parse_cases, default=DEFAULT_CASES, help=f"GROUPSxKB per peer (default {DEFAULT_CASES})"
    )
    parser.add_argument("--repetitions", type=int, default=7, help="timed ones for each case (default 7)")
    parser.add_argument("--no-recheck", action="store_true", help="leave out admission with the reward re-check")
    parser.add_argument("--json", action="store_true", help="every repetition as JSON on standard output")
    add_record(parser)
    options = parser.parse_args(arguments)
    if options.peers < 2 or options.repetitions < 1:
        parser.error("--peers must be at least 2 and --repetitions at least 1")
    try:
        results = asyncio.run(measure(options.peers, options.cases, options.repetitions))
    except RuntimeError as error:
        _say(f"did not complete: {error}")
        return 1
    write_record(options.record, "exchange", arguments, figures(results))
    rechecks = [] if options.no_recheck else measure_rechecks(_RECHECK_GROUPS)
    if options.json:
        print(as_json(options.peers, results, rechecks))
        return 0
    print(table(results))
    if rechecks:
        print()
        print(recheck_table(rechecks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
