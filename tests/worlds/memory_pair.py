"""Alice and Bob on a faulty network in memory: Alice serves what a test gives her, Bob dials."""

from collections.abc import Awaitable, Callable
from typing import Any

from swarm.interfaces import ExchangeHandler, PeerAddress
from swarm.simulate.virtual.faults import FaultPlan
from swarm.simulate.virtual.loop import run_virtual
from swarm.simulate.virtual.network import MemoryNetwork
from swarm.simulate.virtual.transport import MemoryTransport

ALICE, BOB = "a" * 64, "b" * 64
Scene = Callable[[MemoryNetwork, MemoryTransport, Any], Awaitable[Any]]


def play(scene: Scene, faults: FaultPlan, holder: ExchangeHandler, seed: int = 1, log: list[Any] | None = None) -> Any:
    """Runs a scene with Alice serving `holder` and Bob's transport in hand; `log` gets the network's events."""
    events = list[Any]() if log is None else log

    async def main() -> Any:
        network = MemoryNetwork(seed, faults, lambda *event: events.append(event))
        await MemoryTransport(network, ALICE).serve(holder)
        return await scene(network, MemoryTransport(network, BOB), holder)

    return run_virtual(main())


async def dial(bob: MemoryTransport) -> Any:
    """Bob's connection to Alice."""
    return await bob.connect(PeerAddress(node_id=ALICE, endpoint=f"{ALICE[:16]}.memory:1"), 5.0)
