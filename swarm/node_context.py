"""The parts of a node that every collaborator of its agent shares: configuration, identity, clock, events, threads.

Invariant: built before any collaborator, and none of it is replaced afterwards.
"""

import asyncio
from dataclasses import dataclass, field

from swarm.clock import Clock
from swarm.config import NodeConfig
from swarm.events import Emit
from swarm.flow import Signal
from swarm.identity import Identity
from swarm.interfaces import Offload
from swarm.types import NodeId


@dataclass(frozen=True, kw_only=True)
class NodeContext:
    """What the collaborators of one node's agent share.

    Example:
        context = NodeContext(config=config, identity=identity, clock=SystemClock(), emit=events.write)
        agent = Agent(context, store=store, tokenizer=tokenizer, verifier=verifier)
    """

    config: NodeConfig
    identity: Identity
    clock: Clock
    emit: Emit
    offload: Offload = asyncio.to_thread
    changed: Signal = field(default_factory=Signal)  # groups, versions or connections came, or there is room for more

    @property
    def node_id(self) -> NodeId:
        """Our own; also the name of our lineage."""
        return self.identity.node_id
