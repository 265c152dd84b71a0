"""The processes of `benchmarks.heartbeat_flood`: coordinator, attackers and honest members, each one on its own.

Invariant: a role gets everything in one JSON argument, and prints its measurements as one line of JSON.
"""

import asyncio
import cProfile
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from coordinator.daemon import CoordinatorDaemon
from swarm.config import (
    CoordinatorConfig,
    DirectoryConfig,
    EntryConfig,
    EnvironmentConfig,
    ModelConfig,
    NodeConfig,
)
from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.process import run_until_signal
from swarm.testing.builders import make_report
from swarm.types import EdgeReport
from swarm.wire.reports import report_to_heartbeat
from swarm.wire.session import AuthenticatedChannel, open_channel
from swarm.wire.v1 import coordinator_service_pb2 as pb
from swarm.wire.v1 import session_service_pb2
from swarm.wire.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub
from tests.attacks.call_flood import RawConnection, Tally, forwarding
from tests.attacks.connection_flood import ConnectionFlood, allow_open_files

RUN_ID: Final = "heartbeat-flood"
_SERVICE: Final = f"/{pb.DESCRIPTOR.services_by_name['CoordinatorService'].full_name}/"
_CALL_TIMEOUT_S: Final = 20.0


def heartbeat_of(identity: Identity, num_edges: int) -> Any:
    """A report about sources that nobody ever heard of."""
    edges = tuple(
        EdgeReport(
            source=f"{identity.node_id[:60]}{number:04x}",
            num_groups=5,
            age_mean_steps=1.0,
            ess_share=0.5,
            mismatch_kl=0.01,
            reward_mean=0.5,
        )
        for number in range(num_edges)
    )
    report = make_report(identity.node_id, name="eve", edges=edges)
    return report_to_heartbeat(report)


# --- coordinator ---------------------------------------------------------------------------------------


def run_coordinator(folder: str, members: list[str], profile: str) -> None:
    """A coordinator until SIGTERM; its profile goes to a file where one is named."""
    entry = EntryConfig(established="members", members=tuple(members)) if members else EntryConfig()
    node = NodeConfig(
        environments=(EnvironmentConfig(name="echo", kind="char", dataset="copy"),),
        model=ModelConfig(source="tiny"),
        entry=entry,
    )
    values = {"dir": Path(folder), "run_id": RUN_ID, "directory": DirectoryConfig(kind="none"), "node": node}
    config = CoordinatorConfig.model_validate(values)

    async def run() -> None:
        async with CoordinatorDaemon(config) as daemon:
            await daemon.run()

    with cProfile.Profile(time.thread_time) if profile else nullcontext() as profiler:
        asyncio.run(run_until_signal_of(run))
    if profiler is not None:
        profiler.dump_stats(profile)


async def run_until_signal_of(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs work that SIGTERM ends."""
    await run_until_signal(work())


# --- attackers -----------------------------------------------------------------------------------------


class Attack:
    """Attackers of some subnets until SIGTERM."""

    def __init__(self, endpoint: str, fingerprint: str, sources: list[str], connections_each: int) -> None:
        self._endpoint = endpoint
        self._fingerprint = fingerprint
        self._sources = sources
        self._connections_each = connections_each
        self.tally = Tally()

    async def run(self, kind: str) -> None:
        """One connection after the other from each place, and on each what `kind` says."""
        attack = {"heartbeats": self._heartbeats, "strangers": self._strangers, "handshakes": self._handshakes}[kind]
        async with asyncio.TaskGroup() as tasks:
            for source in self._sources:
                for _ in range(self._connections_each):
                    tasks.create_task(self._again_and_again(attack, source))

    async def _again_and_again(self, attack: Callable[[RawConnection], Coroutine[Any, Any, None]], source: str) -> None:
        while True:
            with suppress(OSError, ValueError):
                async with asyncio.timeout(30.0):
                    connection = await RawConnection.open(self._endpoint, source, self.tally)
                async with connection:
                    await attack(connection)
            await asyncio.sleep(0.02)

    async def _heartbeats(self, connection: RawConnection) -> None:
        """The heaviest reports of a fresh key."""
        key = Identity.create()
        await connection.hello(key, self._fingerprint, RUN_ID)
        await connection.call_on(_SERVICE + "Heartbeat", heartbeat_of(key, 64))

    async def _strangers(self, connection: RawConnection) -> None:
        """The same without a session."""
        await connection.call_on(_SERVICE + "Heartbeat", heartbeat_of(Identity.create(), 64))

    async def _handshakes(self, connection: RawConnection) -> None:
        """Challenges without end."""
        service = session_service_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name
        await connection.call_on(
            f"/{service}/Challenge", session_service_pb2.ChallengeRequest(client_nonce=os.urandom(32))
        )


def run_attack(
    endpoint: str, fingerprint: str, kind: str, sources: list[str], connections_each: int, num_idle: int, nice: int
) -> None:
    """An attack until SIGTERM; prints what it got."""
    os.nice(nice)
    allow_open_files(20_000)
    if kind == "idle":
        with ConnectionFlood(endpoint, sources, num_idle, reopened_per_s=1000.0) as flood:
            flood.until_all_were_opened()
            print("ready", flush=True)
            signal.sigwait({signal.SIGTERM})
        print(json.dumps({"num_opened": flood.num_opened, "num_answered": 0, "num_refused": 0}), flush=True)
        return
    attack = Attack(endpoint, fingerprint, sources, connections_each)
    print("ready", flush=True)
    asyncio.run(run_until_signal_of(lambda: attack.run(kind)))
    print(json.dumps(asdict(attack.tally)), flush=True)


# --- honest members ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class HonestMembers:
    """Members that beat in turn, and keys that join, beside a flood: how long each of them waits.

    `waits` lists seconds: of heartbeats from the moment they are due, and of joins from known and from strange subnets.
    "work meanwhile" is what the main thread of the coordinator computed between call and answer: the wait on a core of
    its own.
    """

    endpoint: str
    fingerprint: str
    keys: list[str]  # files
    sources: list[str]  # addresses that they call from
    every_s: float  # one heartbeat of all members together
    seconds: float
    num_joins: int
    coordinator: int  # its process id
    waits: dict[str, list[float]] = field(
        default_factory=lambda: {
            "heartbeat": [],
            "work meanwhile": [],
            "join known": [],
            "join stranger": [],
            "failed": [],
        }
    )

    async def measure(self) -> None:
        """Connects everybody, waits for a line on stdin, then beats and joins for `seconds`."""
        members = [Identity.load(Path(key)) for key in self.keys]
        async with AsyncExitStack() as stack:
            channels: list[AuthenticatedChannel] = []
            for number, member in enumerate(members):
                at = await stack.enter_async_context(_from(self.sources[number % len(self.sources)], self.endpoint))
                channel = await open_channel(at, self.fingerprint, member, RUN_ID, _CALL_TIMEOUT_S)
                stack.push_async_callback(channel.close)
                channels.append(channel)
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            loop = asyncio.get_running_loop()
            begun_s = loop.time()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._join_again_and_again())
                for number in range(int(self.seconds / self.every_s)):
                    due_s = begun_s + number * self.every_s
                    await asyncio.sleep(max(0.0, due_s - loop.time()))
                    place = number % len(members)
                    tasks.create_task(self._beat(channels[place], members[place], due_s))

    async def _beat(self, channel: AuthenticatedChannel, member: Identity, due_s: float) -> None:
        loop, before_s = asyncio.get_running_loop(), main_thread(self.coordinator)[0]
        stub: Any = CoordinatorServiceStub(channel.channel)
        try:
            metadata = await channel.metadata(_CALL_TIMEOUT_S)
            await stub.Heartbeat(heartbeat_of(member, 8), metadata=metadata, timeout=_CALL_TIMEOUT_S)
        except (grpc.RpcError, SwarmError) as error:
            self.waits["failed"].append(loop.time() - due_s)
            print(type(error).__name__, str(error)[:300], file=sys.stderr)
            return
        self.waits["heartbeat"].append(loop.time() - due_s)
        self.waits["work meanwhile"].append(main_thread(self.coordinator)[0] - before_s)

    async def _join_again_and_again(self) -> None:
        for number in range(self.num_joins):
            await self._join("join known", self.sources[0])
            await self._join("join stranger", f"127.200.0.{2 + number}")
            await asyncio.sleep(0.3)

    async def _join(self, kind: str, source: str) -> None:
        loop = asyncio.get_running_loop()
        async with _from(source, self.endpoint) as at:
            joined_s = loop.time()
            while True:
                try:
                    channel = await open_channel(at, self.fingerprint, Identity.create(), RUN_ID, 10.0)
                except SwarmError:
                    await asyncio.sleep(0.1)
                    continue
                break
            self.waits[kind].append(loop.time() - joined_s)
            await channel.close()


def main_thread(pid: int) -> tuple[float, float]:
    """Seconds that the main thread of a process has computed, and waited for a core."""
    computed_ns, waited_ns, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    return int(computed_ns) / 1e9, int(waited_ns) / 1e9


@asynccontextmanager
async def _from(source: str, endpoint: str) -> AsyncGenerator[str]:
    if source == "127.0.0.1":
        yield endpoint
        return
    async with forwarding(source, endpoint) as at:
        yield at


def run_members(**arguments: Any) -> None:
    """Honest members; prints what they waited."""
    members = HonestMembers(**arguments)
    asyncio.run(members.measure())
    print(json.dumps(members.waits), flush=True)


def main() -> None:
    """Plays the role that the arguments name."""
    role, arguments = sys.argv[1], json.loads(sys.argv[2])
    {"coordinator": run_coordinator, "attack": run_attack, "members": run_members}[role](**arguments)


if __name__ == "__main__":
    main()
