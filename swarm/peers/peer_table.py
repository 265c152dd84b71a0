"""Peer table: the newest signed head and delivered step of each other node, and the connected peers.

Invariant: every table is bounded, a head never goes back, and heads of lineages in use are forgotten last.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from swarm.flow import BoundedTable
from swarm.interfaces import PeerAddress
from swarm.types import Advert, NodeId, PolicyVersion, Role, RolloutGroup

MAX_INBOUND = 1024
MAX_PEERS = 4096  # remembered; the one updated longest ago is forgotten first
MAX_IN_USE = 1024  # lineages of admitted groups; those that any group named lately


class Peers:
    """The other nodes, from adverts and from the groups that they signed.

    Args:
        node_id: our own id.
        is_established: returns True for a peer whose groups count in full, in a run where not all do.

    Example:
        peers = Peers(identity.node_id)
        peers.observe(await directory.lookup())
    """

    def __init__(self, node_id: NodeId, is_established: Callable[[NodeId], bool] = lambda peer: False) -> None:
        self._node_id = node_id
        self._is_established = is_established
        self.own_head = PolicyVersion(policy_id=node_id, step=0)  # newest version of our own lineage
        self.heads = BoundedTable[NodeId, PolicyVersion](MAX_PEERS, self.is_in_use)  # newest signed one of each other
        self.in_use = BoundedTable[str, None](MAX_IN_USE)  # lineages of admitted groups, the one named last comes last
        self._served: frozenset[str] = frozenset()  # lineages that connected peers advertise
        self.delivered_steps = BoundedTable[NodeId, int](MAX_PEERS)  # newest policy step in admitted groups of each
        self.connected: set[NodeId] = set()
        self.inbound: dict[NodeId, str] = {}  # callers that proved their key -> subnet of the call, or ""
        self._num_streams: Counter[NodeId] = Counter()  # from each peer: an old one may end after a new one began
        # peers that offer reservations to nodes that cannot be dialled, at their advertised addresses
        self.relays: Mapping[NodeId, PeerAddress] = {}
        self._trains = BoundedTable[NodeId, bool](MAX_PEERS)  # True for a peer whose advert has the role of trainer

    def head_of(self, policy_id: NodeId) -> PolicyVersion | None:
        """Newest known head of a lineage, ours included; None if none is known."""
        return self.own_head if policy_id == self._node_id else self.heads.get(policy_id)

    def is_in_use(self, policy_id: str) -> bool:
        """True if groups of a lineage are expected: its head is kept before those of other adverts."""
        return (
            policy_id in self.in_use
            or policy_id in self.connected
            or policy_id in self._served
            or self._is_established(policy_id)
        )

    def set_connected(self, peer: NodeId, is_connected: bool) -> None:
        """Counts a stream from `peer` that was opened or has ended; the peer is connected while it has one."""
        self._num_streams[peer] += 1 if is_connected else -1
        if self._num_streams[peer] > 0:
            self.connected.add(peer)
        else:
            del self._num_streams[peer]
            self.connected.discard(peer)

    def record_call(self, peer: NodeId, subnet: str = "") -> None:
        """Records a call of a peer that proved its key; a full table drops the oldest caller of the fullest subnet.

        Args:
            peer: the caller.
            subnet: subnet of the call; "" if the transport does not know it.
        """
        known = self.inbound.pop(peer, "")
        self.inbound[peer] = subnet or known
        if len(self.inbound) > MAX_INBOUND:
            fullest, _ = Counter(self.inbound.values()).most_common(1)[0]
            del self.inbound[next(caller for caller, known in self.inbound.items() if known == fullest)]

    def observe(self, adverts: Sequence[Advert]) -> None:
        """Updates the heads, relays and roles of peers from the adverts of the directory.

        A generator's advert names the version of its trainer that it serves, no evidence of that trainer's head.
        """
        self._served = frozenset(advert.head.policy_id for advert in adverts if advert.node_id in self.connected)
        offered = [each for each in adverts if each.relay_reservations and each.endpoints]
        addresses = [PeerAddress(node_id=each.node_id, endpoint=each.endpoints[0]) for each in offered]
        self.relays = {address.node_id: address for address in addresses if address.relay is None}
        for advert in adverts:
            if advert.node_id == self._node_id:
                continue
            self._trains[advert.node_id] = Role.TRAINER in advert.roles
            known = self.heads.get(advert.node_id)
            if advert.head.policy_id == advert.node_id and (known is None or advert.head.step > known.step):
                self.heads[advert.node_id] = advert.head

    def learn_head(self, group: RolloutGroup) -> None:
        """Updates the producer's own head from a signed group, before the next advert does.

        Versions of other lineages are claims: a generator cannot move its trainer's head to make others' groups look
        old.
        """
        if group.policy_id != self._node_id:
            self.in_use[group.policy_id] = None
        if not group.versions:
            return
        newest = group.versions[-1]
        known = self.heads.get(group.producer)
        if group.policy_id == group.producer and (known is None or newest.step > known.step):
            self.heads[group.producer] = newest
        delivered_step = max(newest.step, self.delivered_steps.get(group.producer, 0))
        self.delivered_steps[group.producer] = delivered_step

    def have_delivered(self, step: int) -> bool:
        """True if every connected peer that trains has sent a group of that step or a later one."""
        return all(
            self.delivered_steps.get(peer, -1) >= step for peer in self.connected if self._trains.get(peer, True)
        )
