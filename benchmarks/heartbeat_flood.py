"""Heartbeats and joins of honest members at a coordinator under floods: how long they take.

python -m benchmarks.heartbeat_flood
python -m benchmarks.heartbeat_flood --cases heartbeats/64,idle/50 --seconds 20 --unlisted

Coordinator, attackers (at nice 19 they take the cores that others leave) and honest members are processes each. A
subnet is an address of 127/8. Members report in turn, one every 50 ms, each from a subnet of its own; waits count from
the moment a report is due. On a busy machine look at the "work meanwhile": what the main thread of the coordinator
computed from call to answer, so the wait on a core of its own, but for the disk. Cases are KIND/SUBNETS:

none        no attack
heartbeats  free keys send the heaviest reports, 32 at a time on each connection, and come back with fresh keys when cut
strangers   the same without a session
handshakes  challenges without end
idle        5,000 connections that say nothing; members join all the while
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks._heartbeat_flood_roles import main_thread
from swarm.identity import Identity
from tests.attacks.connection_flood import loopback_addresses

CASES: Final = "none/1,heartbeats/1,heartbeats/64,strangers/64,handshakes/64,idle/1,idle/50,idle/1000"
NUM_MEMBERS: Final = 8
EVERY_S: Final = 0.05
NUM_IDLE: Final = 5000
START_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Usage:
    """The time that a process has used so far."""

    cpu_s: float
    waited_s: float  # its main thread, for a core

    @classmethod
    def of(cls, pid: int) -> "Usage":
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return cls(cpu_s, main_thread(pid)[1])


@contextmanager
def role(name: str, cores: Sequence[int] = (), **arguments: Any) -> Generator[subprocess.Popen[str]]:
    """A process that plays a role, on some cores or on any, ended with the block."""
    command = [sys.executable, "-m", "benchmarks._heartbeat_flood_roles", name, json.dumps(arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if cores:
        os.sched_setaffinity(process.pid, cores)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until_ready(process: subprocess.Popen[str]) -> None:
    """Waits for its word."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if line.strip() != "ready":
        raise RuntimeError(f"a process did not start: {line!r}")


def info_of(folder: Path) -> dict[str, Any]:
    """The coordinator's own description, once it answers."""
    ends_s = time.monotonic() + START_S
    while not (folder / "coordinator.json").exists():
        if time.monotonic() > ends_s:
            raise TimeoutError("the coordinator did not start")
        time.sleep(0.05)
    return json.loads((folder / "coordinator.json").read_text())


def measure(case: str, options: argparse.Namespace) -> str:
    """One case as a line of text."""
    kind, _, number = case.partition("/")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = [folder / f"member-{index}.key" for index in range(NUM_MEMBERS)]
        members = [Identity.create() for _ in keys]
        for key, member in zip(keys, members, strict=True):
            member.save(key)
        listed = [] if options.unlisted else [member.node_id for member in members]
        profile = f"{options.profile}-{kind}-{number}" if options.profile else ""
        sources = ["127.0.0.1"] if options.one_address else [f"127.220.0.{2 + index}" for index in range(NUM_MEMBERS)]
        cores = sorted(os.sched_getaffinity(0)) if options.pin else []
        first, others = cores[:1], cores[1:]
        with role("coordinator", first, folder=str(folder / "run"), members=listed, profile=profile) as coordinator:
            info = info_of(folder / "run")
            at = {"endpoint": info["listen"], "fingerprint": info["fingerprint"]}
            honest = {
                "keys": [str(key) for key in keys],
                "sources": sources,
                "every_s": EVERY_S,
                "seconds": options.seconds,
                "num_joins": options.joins,
                "coordinator": coordinator.pid,
            }
            with role("members", others, **at, **honest) as processes:
                until_ready(processes)
                if kind == "none":
                    return _line(case, _waits(processes, coordinator.pid), None)
                num = int(number)
                attack = {
                    "kind": kind,
                    "sources": loopback_addresses(num),
                    "connections_each": max(1, options.connections // num),
                    "num_idle": NUM_IDLE,
                    "nice": options.nice,
                }
                with role("attack", others, **at, **attack) as attackers:
                    until_ready(attackers)
                    time.sleep(options.warm)
                    measured = _waits(processes, coordinator.pid)
                    attackers.send_signal(signal.SIGTERM)
                    assert attackers.stdout is not None
                    return _line(case, measured, json.loads(attackers.stdout.readline() or "{}"))


def _waits(members: subprocess.Popen[str], pid: int) -> tuple[dict[str, list[float]], Usage, float]:
    assert members.stdin is not None and members.stdout is not None
    before, begun_s = Usage.of(pid), time.monotonic()
    members.stdin.write("begin\n")
    members.stdin.flush()
    waits = json.loads(members.stdout.readline())
    after = Usage.of(pid)
    used = Usage(after.cpu_s - before.cpu_s, after.waited_s - before.waited_s)
    return waits, used, time.monotonic() - begun_s


def _line(case: str, measured: tuple[dict[str, list[float]], Usage, float], tally: dict[str, int] | None) -> str:
    waits, used, seconds = measured
    num_failed, num = len(waits["failed"]), len(waits["heartbeat"])
    parts = [f"{case}: {num_failed} of {num_failed + num} heartbeats failed"]
    for kind in ("heartbeat", "work meanwhile"):
        p50, p99 = np.quantile(waits[kind] or [math.nan], (0.5, 0.99))
        worst = max(waits[kind], default=math.nan)
        parts.append(f"{kind} p50 {1000 * p50:.0f} ms, p99 {1000 * p99:.0f}, worst {1000 * worst:.0f}")
    for kind in ("join known", "join stranger") if waits["join known"] else ():
        parts.append(f"{kind} p50 {np.median(waits[kind]):.2f} s, worst {max(waits[kind]):.2f}")
    parts.append(
        f"coordinator {100 * used.cpu_s / seconds:.0f} % of a core, its main thread waited for one "
        f"{100 * used.waited_s / seconds:.0f} % of the time"
    )
    if tally is not None:
        parts.append(
            f"attack: {tally.get('num_opened')} connections, {tally.get('num_answered')} calls answered, "
            f"{tally.get('num_refused')} refused"
        )
    return "; ".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.heartbeat_flood",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", default=CASES, help="KIND/SUBNETS with commas between them")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each case")
    parser.add_argument("--warm", type=float, default=5.0, help="seconds of the attack before the measurement")
    parser.add_argument("--connections", type=int, default=128, help="of the attackers, at least one of each subnet")
    parser.add_argument(
        "--nice", type=int, default=19, help="of the attackers; on a busy machine 19 gets no core at all"
    )
    parser.add_argument("--pin", action="store_true", help="the coordinator has a core, and all others have the rest")
    parser.add_argument("--joins", type=int, default=10, help="of known peers and strangers, during each case")
    parser.add_argument("--unlisted", action="store_true", help="no member is listed: a private run")
    parser.add_argument("--one-address", action="store_true", help="all members report from one address")
    parser.add_argument("--profile", default="", help="start of the names of files for the coordinator's profiles")
    options = parser.parse_args(arguments)
    for case in options.cases.split(","):
        load = os.getloadavg()[0]
        print(f"{measure(case, options)}; load before {load:.1f} on {os.cpu_count()} cores", flush=True)


if __name__ == "__main__":
    main()
