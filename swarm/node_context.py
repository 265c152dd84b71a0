"""State that all collaborators of a node's agent share: configuration, identity, clock, events, threads.

Invariant: the context is built before any collaborator, and no field is replaced afterwards.
"""

import asyncio
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from swarm.clock import Clock
from swarm.config import NodeConfig
from swarm.events import Emit
from swarm.flow import Signal
from swarm.identity import Identity
from swarm.interfaces import Offload
from swarm.types import NodeId

# A group of 4 KB is opened and checked in .4 ms (at worst in 1.4 ms), most of it under the interpreter's lock: each of
# three threads would take 60 us more, and block the event loop all the same.
IN_PLACE_BYTES: Final = 4096


class Pause:
    """Pause of a node at its owner's request: no batch and no step begins, and no groups are admitted.

    Only `Agent.pause` and `Agent.resume` begin and end it.
    """

    def __init__(self, changed: Signal) -> None:
        """Begins unpaused; `changed` must be fired when the pause begins or ends."""
        self._changed = changed
        self.since_s: float | None = None  # wall clock; None: the node works

    @property
    def is_on(self) -> bool:
        """True while the node is paused."""
        return self.since_s is not None

    async def over(self) -> None:
        """Waits until the node is not paused."""
        await self._changed.until(lambda: not self.is_on)


@dataclass(frozen=True, kw_only=True)
class NodeContext:
    """State that the collaborators of one node's agent share.

    Example:
        context = NodeContext(config=config, identity=identity, clock=SystemClock(), emit=events.write)
        agent = Agent(context, store=store, tokenizer=tokenizer, verifier=verifier)
    """

    config: NodeConfig
    identity: Identity
    clock: Clock
    emit: Emit
    offload: Offload = asyncio.to_thread
    in_place_bytes: int = IN_PLACE_BYTES  # of a group, decompressed; 0: every group is checked by `offload`
    changed: Signal = field(default_factory=Signal)  # fired for new groups, versions, connections or room

    @cached_property
    def pause(self) -> Pause:
        """The pause of this node, one object for all collaborators."""
        return Pause(self.changed)

    @property
    def node_id(self) -> NodeId:
        """Node id of this node; also the `policy_id` of its lineage."""
        return self.identity.node_id
