"""The weights that a node serves: manifests of its own and its followed lineage, chunks, and leave to its followers.

Invariant: a manifest is named to others only when every chunk of it is on this node's disk, and only a welcome peer
gets anything.
"""

import logging
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass

from swarm.errors import NotHeld, Unavailable
from swarm.flow import Signal
from swarm.interfaces import Offload
from swarm.types import Credit, Digest, NodeId, PolicyVersion, SealedManifest, short
from swarm.weight_sync.credit import CreditLedger, CreditLine
from swarm.weights.manifest import Manifest
from swarm.weights.store import WeightStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    number: int  # in order of arrival here
    step: int
    sealed: SealedManifest


class WeightServer:
    """The part of `ExchangeHandler` that is about weights.

    Args:
        node_id: our own lineage.
        store: None where this node neither publishes nor follows: it holds nothing.
        publishes: whether a lineage of our own is served; then its watchers get leave.
        leaves: what was given to whom.
        capacity: groups of our lineage that all followers together may have outstanding now.
        require_allowed: raises Unavailable for a peer that gets nothing now.
        record_version: told of each version that certainly existed.
        changed: fires when there may be more to say; fired here when a watch ends.
        offload: for the disk.
    """

    def __init__(
        self,
        *,
        node_id: NodeId,
        store: WeightStore | None,
        publishes: bool,
        credit_ledger: CreditLedger,
        capacity: Callable[[], int],
        require_allowed: Callable[[NodeId], None],
        record_version: Callable[[PolicyVersion], None],
        changed: Signal,
        offload: Offload,
    ) -> None:
        self._node_id = node_id
        self._store = store
        self._publishes = publishes and store is not None
        self._credit_ledger = credit_ledger
        self._capacity = capacity
        self._require_allowed = require_allowed
        self._record_version = record_version
        self._changed = changed
        self._offload = offload
        self._held: dict[NodeId, dict[Digest, _Held]] = {}  # by lineage and manifest, in order of arrival
        self._number = 0
        self.bytes_sent = 0  # of chunks, since the process started

    # --- told by the agent and the follower ----------------------------------------------------------

    async def restore(self, policy_id: NodeId) -> list[tuple[Manifest, SealedManifest]]:
        """After a restart: what lies on the disk in whole is held. Returns every manifest of the lineage."""
        if self._store is None:
            return []
        found = await self._offload(self._store.manifests, policy_id)
        for manifest, sealed in found:
            if not await self._offload(self._store.missing, manifest.chunks):
                self.offer(manifest, sealed)
        return found

    def offer(self, manifest: Manifest, sealed: SealedManifest) -> None:
        """A manifest and all of its chunks are on the disk."""
        lineage = self._held.setdefault(manifest.version.policy_id, {})
        if sealed.digest not in lineage:
            self._number += 1
            self._record_version(manifest.version)
            lineage[sealed.digest] = _Held(self._number, manifest.version.step, sealed)
            self._changed.fire()

    def withdraw(self, digests: Collection[Digest]) -> None:
        """These manifests are not served any more."""
        for lineage in self._held.values():
            for digest in digests:
                lineage.pop(digest, None)

    def held(self, policy_id: NodeId) -> dict[Digest, int]:
        """Manifests that are served of a lineage, and the step that each of them leads to."""
        return {digest: held.step for digest, held in self._held.get(policy_id, {}).items()}

    def head_step(self, policy_id: NodeId) -> int | None:
        """Newest step that is served of a lineage."""
        return max((held.step for held in self._held.get(policy_id, {}).values()), default=None)

    # --- asked by peers --------------------------------------------------------------------------------

    async def watch(self, peer: NodeId, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        """Held manifests of a lineage, oldest first, then each new one; leave for those who follow our own.

        Leave comes after the manifests that were held when it was given, so `head_step` is never behind them.

        Raises:
            NotHeld: nothing is held of that lineage.
            Unavailable: the peer is not welcome, or watches anew; also in the middle of a stream.
        """
        self._require_allowed(peer)
        is_own = policy_id == self._node_id and self._publishes
        if not is_own and not self._held.get(policy_id):
            raise NotHeld(f"nothing is held of lineage {short(policy_id)}")
        logger.debug("peer watches", extra={"peer": short(peer), "lineage": short(policy_id), "window": window})
        line = self._credit_ledger.open(peer, window if is_own else 0)
        try:
            async for item in self._watched(line, policy_id):
                yield item
        finally:
            self._credit_ledger.close(line)
            self._changed.fire()  # what it had outstanding is for others

    async def _watched(self, line: CreditLine, policy_id: str) -> AsyncIterator[SealedManifest | Credit]:
        number, said = 0, None
        while True:
            self._require_allowed(line.peer)
            if line.is_closed:
                raise Unavailable("this peer watches on another stream")
            news = self._after(policy_id, number)
            for held in news:
                number = held.number
                yield held.sealed
            if news:
                continue  # leave says that everything was listed: the cheapest way may come last
            credit = self._credit(line, policy_id)
            if credit is not None and credit != said:
                said = credit
                yield credit
                continue
            await self._changed.until(lambda: self._has_news(line, policy_id, number, said))  # noqa: B023

    def _after(self, policy_id: str, number: int) -> list[_Held]:
        """What came after, oldest first; only the next few, since what is held may change while they are sent."""
        return sorted((h for h in self._held.get(policy_id, {}).values() if h.number > number), key=_number_of)[:8]

    def _credit(self, line: CreditLine, policy_id: str) -> Credit | None:
        """The newest word to a follower; None where it gets no leave, or nothing was published yet."""
        head_step = self.head_step(policy_id)
        if not line.window or head_step is None:
            return None
        self._credit_ledger.grant(self._capacity())
        return Credit(head_step=head_step, granted=line.granted)

    def _has_news(self, line: CreditLine, policy_id: str, number: int, said: Credit | None) -> bool:
        if line.is_closed or any(held.number > number for held in self._held.get(policy_id, {}).values()):
            return True
        try:
            self._require_allowed(line.peer)
        except Unavailable:
            return True
        credit = self._credit(line, policy_id)
        return credit is not None and credit != said

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        """A held chunk. Raises NotHeld; Unavailable for a peer that is not welcome."""
        self._require_allowed(peer)
        data = None if self._store is None else await self._offload(self._store.chunk, digest)
        if data is None:
            raise NotHeld(f"chunk {short(digest)} is not held")
        self.bytes_sent += len(data)
        return data


def _number_of(held: _Held) -> int:
    return held.number
