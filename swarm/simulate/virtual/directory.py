"""In-memory directory with the contract of the DHT directory: signed adverts that expire.

Invariant: an advert is sealed and opened before it is stored, as on its way through a network.
"""

from collections.abc import Callable

from swarm.clock import Clock
from swarm.errors import Unavailable
from swarm.identity import Identity, Verify, verify
from swarm.peers.dht_records import check_own
from swarm.types import Advert, NodeId
from swarm.wire.adverts import MAX_ADVERT_TTL_S, open_advert, seal_advert

CanSee = Callable[[NodeId, NodeId], bool]
"""True where the first node can read an advert of the second one (false across a partition)."""


class MemoryDirectory:
    """The adverts of every node of a virtual swarm, shared by the nodes' views.

    Example:
        directory = MemoryDirectory(clock, can_see=lambda reader, author: not network.is_cut(reader, author))
        discovery = directory.view(identity, "run", clock)
    """

    def __init__(
        self,
        clock: Clock,
        can_see: CanSee | None = None,
        is_parted: Callable[[], bool] = lambda: True,
        verify: Verify = verify,
    ) -> None:
        """Creates an empty directory. Without `can_see`, or while not `is_parted()`, every node sees every advert.

        `clock` is right: an advert is deleted MAX_ADVERT_TTL_S after its end, since a reader's clock may be late.
        """
        self._clock = clock
        self.verify = verify
        self.can_see = can_see
        self.is_parted = is_parted
        self.adverts: dict[tuple[str, NodeId], Advert] = {}
        self.inspect: Callable[[Advert, int], None] | None = None  # called with each advert and its size in bytes
        self.note_lookup: Callable[[int], None] | None = None  # called with the total bytes of the adverts of a look-up
        self.sizes: dict[NodeId, int] = {}  # bytes of adverts

    def put(self, run_id: str, advert: Advert) -> None:
        """Stores an opened advert in place of the node's last one; adverts stay ordered by run and node id."""
        key, is_new = (run_id, advert.node_id), (run_id, advert.node_id) not in self.adverts
        self.adverts[key] = advert
        if is_new:
            self.adverts = dict(sorted(self.adverts.items()))

    def found(self, run_id: str, now_s: float) -> list[Advert]:
        """Adverts of the run that have not expired at `now_s`, the reader's wall clock."""
        long_ago_s = self._clock.now_s() - MAX_ADVERT_TTL_S
        for key in [key for key, advert in self.adverts.items() if advert.expires_at_s < long_ago_s]:
            del self.adverts[key]
        return [advert for (run, _), advert in self.adverts.items() if advert.expires_at_s > now_s and run == run_id]

    def view(self, identity: Identity, run_id: str, clock: Clock) -> "MemoryView":
        """The directory as the node of `identity` sees it, with the node's clock."""
        return MemoryView(self, identity, run_id, clock)


class MemoryView:
    """`swarm.interfaces.Discovery` of one node over a shared MemoryDirectory."""

    def __init__(self, directory: MemoryDirectory, identity: Identity, run_id: str, clock: Clock) -> None:
        self._directory = directory
        self._identity = identity
        self._run_id = run_id
        self._clock = clock
        self._is_stopped = False

    async def announce(self, advert: Advert) -> None:
        """Publishes this node's advert, replacing the last. Raises Unavailable after `stop`."""
        self._check_running()
        now_s = self._clock.now_s()
        check_own(advert, self._identity.node_id, self._run_id, now_s)
        sealed = seal_advert(advert, self._identity)
        opened = open_advert(sealed, now_s, self._directory.verify)
        assert opened is not None, f"own advert does not open: {advert}"
        self._directory.put(self._run_id, opened)
        self._directory.sizes[advert.node_id] = len(sealed)
        if self._directory.inspect is not None:
            self._directory.inspect(opened, len(sealed))

    async def lookup(self) -> list[Advert]:
        """Unexpired adverts of the run that this node can see, ordered by node id. Raises Unavailable after `stop`."""
        self._check_running()
        me, directory = self._identity.node_id, self._directory
        found = directory.found(self._run_id, self._clock.now_s())
        if directory.note_lookup is not None:
            directory.note_lookup(sum(directory.sizes.get(advert.node_id, 0) for advert in found))
        can_see = directory.can_see
        if can_see is None or not directory.is_parted():
            return found
        return [advert for advert in found if advert.node_id == me or can_see(me, advert.node_id)]

    async def maintain(self) -> None:
        """Repairs nothing. Raises Unavailable after `stop`."""
        self._check_running()

    async def stop(self) -> None:
        """Ends the use of the directory; the advert stays until it expires, as in the DHT."""
        self._is_stopped = True

    def _check_running(self) -> None:
        if self._is_stopped:
            raise Unavailable("the directory was stopped")
