"""An honest group behind a flood of answers that never end: how long its admission takes.

python -m benchmarks.verifier_flood
python -m benchmarks.verifier_flood --subnets 1,8,64 --seconds 20

Real admission over real confined processes; no sockets. Attackers send from some subnets as long as it takes, each with
several keys that have a group under way all the time; a key that is refused is replaced by a fresh one. Answers either
never end, or take just less than a first try may. Honest groups come one after the other, each newcomer's from a subnet
of its own.
"""

import argparse
import asyncio
import itertools
import json
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from swarm.clock import SystemClock
from swarm.config import EnvironmentConfig, NodeConfig, SandboxConfig
from swarm.environments.load import build_environment
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.identity import Identity
from swarm.peers.reputation import Reputation
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import make_group, make_sealed
from swarm.testing.nodes import make_admission, make_context
from swarm.types import NodeId, RefusalReason, Refused, SealedGroup

RULE: Final = """
import time

def score(question, answer, reference):
    if answer == "77":
        while True:
            pass
    if answer == "88":
        ends_s = time.process_time() + 0.0045
        while time.process_time() < ends_s:
            pass
    return answer == reference
"""
WRONG: Final = {"never end": "77", "take 18 ms a group": "88"}
HONEST_EVERY_S: Final = 0.25
NUM_TASKS: Final = 4000


@dataclass(slots=True)
class Waits:
    """Seconds of one kind of group, from its arrival to its admission."""

    kind: str
    seconds: list[float] = field(default_factory=list[float])

    def __str__(self) -> str:
        p50, p99 = np.quantile(self.seconds, (0.5, 0.99))
        return f"{self.kind} p50 {1000 * p50:.0f} ms, p99 {1000 * p99:.0f}, worst {1000 * max(self.seconds):.0f}"


class Victim:
    """The admission of one node, in front of a verifier that some answers keep busy."""

    def __init__(self, folder: Path) -> None:
        (folder / "rule.py").write_text(RULE)
        records = [{"question": f"{i}=", "answer": str(i % 10)} for i in range(NUM_TASKS)]
        (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
        params = {"path": str(folder / "records.jsonl")}
        config = EnvironmentConfig(name="digits", kind="function", dataset=f"{folder / 'rule.py'}:score", params=params)
        environment = build_environment(config)
        self._tasks = itertools.cycle(i for i in range(NUM_TASKS) if not environment.task(i).is_held_out)
        self.verifier = SandboxVerifier((config,), SandboxConfig())
        self.subnets: dict[NodeId, str] = {}
        context = make_context(NodeConfig(), Identity.create(), clock=SystemClock(), offload=asyncio.to_thread)
        self._admission = make_admission(
            context,
            MemoryGroupStore(context.clock, 2**30),
            verifier=self.verifier,
            reputation=Reputation(context.clock, 10**9),
            environments=frozenset({"digits"}),
            origin_of=lambda node_id: self.subnets.get(node_id, node_id),
        )

    def sealed(self, identity: Identity, wrong: str) -> SealedGroup:
        """A group of which half of the answers are right."""
        task_id = next(self._tasks)
        now_s = SystemClock().now_s()
        texts = [str(task_id % 10), wrong] * 4
        group = make_group(identity.node_id, env="digits", task_id=task_id, texts=texts, created_at_s=now_s)
        return make_sealed(group, identity)

    async def timed(self, identity: Identity, wrong: str = "??") -> tuple[float, RefusalReason | None]:
        """Seconds of one admission, and why it was refused."""
        sealed = self.sealed(identity, wrong)
        began_s = time.monotonic()
        result = await self._admission.admit(sealed, via=identity.node_id)
        return time.monotonic() - began_s, result.reason if isinstance(result, Refused) else None

    async def attack(self, subnet: str, wrong: str) -> None:
        """One key after the other, as long as each is looked at."""
        while True:
            key = Identity.create()
            self.subnets[key.node_id] = subnet
            reason: RefusalReason | None = None
            while reason is not RefusalReason.LOW_REPUTATION:
                _, reason = await self.timed(key, wrong)
            del self.subnets[key.node_id]

    async def honest(self, identity: Identity) -> float:
        """Seconds of the admission of a group that nobody could refuse."""
        seconds, reason = await self.timed(identity)
        if reason is not None:
            raise RuntimeError(f"an honest group was refused: {reason}")
        return seconds


@asynccontextmanager
async def attacked(victim: Victim, num_subnets: int, keys_each: int, wrong: str) -> AsyncGenerator[None]:
    """Keys of some subnets attack."""
    floods = [
        asyncio.create_task(victim.attack(f"10.{number}.0.0/24", wrong))
        for number in range(num_subnets)
        for _ in range(keys_each)
    ]
    try:
        yield
    finally:
        for task in floods:
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)


async def measure(num_subnets: int, keys_each: int, wrong: str, seconds: float) -> list[Waits]:
    """Honest waits at the first moment of a flood, and while it goes on."""
    first, newcomer, known = Waits("newcomer, first moment"), Waits("newcomer"), Waits("known")
    with tempfile.TemporaryDirectory() as name:
        victim = Victim(Path(name))
        try:
            established = Identity.create()
            for _ in range(3):
                await victim.honest(established)  # starts the processes
            async with attacked(victim, num_subnets, keys_each, wrong):
                await asyncio.sleep(0)
                first.seconds.append(await victim.honest(Identity.create()))
                await asyncio.sleep(2.0)
                ends_s = time.monotonic() + seconds
                while time.monotonic() < ends_s:
                    newcomer.seconds.append(await victim.honest(Identity.create()))
                    await asyncio.sleep(HONEST_EVERY_S / 2)
                    known.seconds.append(await victim.honest(established))
                    await asyncio.sleep(HONEST_EVERY_S / 2)
        finally:
            await victim.verifier.close()
    return [first, newcomer, known]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verifier_flood", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--subnets", default="0,1,8,64", help="of the attackers, with commas between them")
    parser.add_argument("--keys", type=int, default=8, help="at work at a time, of one subnet (of 64 subnets: 1)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each case")
    options = parser.parse_args(arguments)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for kind, wrong in WRONG.items():
        for num_subnets in map(int, options.subnets.split(",")):
            keys_each = options.keys if num_subnets < 64 else 1
            waits = asyncio.run(measure(num_subnets, keys_each, wrong, options.seconds))
            print(
                f"answers {kind}, {num_subnets} subnets x {keys_each} keys: " + "; ".join(map(str, waits)), flush=True
            )
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
