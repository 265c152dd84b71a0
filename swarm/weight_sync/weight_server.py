"""Weight server: manifests and chunks of our own and the followed lineage, and credit for our own followers.

Invariant: a manifest is served only when all its chunks are on this node's disk, and only to allowed peers; a proof of
equivocation needs no chunks. At most CHUNKS_TOTAL chunks are sent at once, and CHUNKS_WAITING calls wait for a slot.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, cast

from swarm.errors import NotHeld, Unavailable
from swarm.fairness import FairTable
from swarm.flow import BoundedTable
from swarm.node_context import NodeContext
from swarm.peers.reputation import Reputation
from swarm.trust_policy import CHUNKS_PER_PEER
from swarm.types import Credit, Digest, NodeId, PolicyVersion, SealedManifest, short
from swarm.weight_sync.credit import CreditLedger, CreditLine
from swarm.weight_sync.equivocation import MAX_PROOFS, EquivocationProof
from swarm.weights.manifest import Manifest
from swarm.weights.store import WeightStore
from swarm.wire.grpc_errors import Context

logger = logging.getLogger(__name__)

CHUNKS_TOTAL: Final = 32  # of 1 MiB, about three times that with gRPC's copies
CHUNKS_WAITING: Final = 512
CHUNK_STALL_S: Final = 10.0  # 100 kB/s per chunk; slower peers are cut only while others wait
_LISTED_AT_ONCE: Final = 8  # manifests, since the list may change while they are sent


@dataclass(frozen=True, slots=True)
class _Held:
    number: int  # in order of arrival here
    step: int
    sealed: SealedManifest


@dataclass(eq=False, repr=False)
class WeightServer:
    """Implementation of the weights part of `ExchangeHandler`: `watch` and `chunk`."""

    _context: NodeContext  # `changed` fires when there may be more to send, and here when a stream ends
    _store: WeightStore | None  # None where this node neither publishes nor follows
    _credit_ledger: CreditLedger  # credit of the followers of our own lineage
    _capacity: Callable[[], int]  # groups of our lineage that all followers together may have outstanding now
    _reputation: Reputation  # decides which peers are served
    _record_version: Callable[[PolicyVersion], None]  # records each version that certainly existed

    def __post_init__(self) -> None:
        self._node_id, self._changed = self._context.node_id, self._context.changed
        self._offload = self._context.offload
        self._publishes = self._context.config.weights.publish and self._store is not None
        self._held: dict[NodeId, dict[Digest, _Held]] = {}  # by lineage and manifest, in order of arrival
        self._number = 0
        self._granted_at = -1  # value of `changed.num_fired` at the last grant
        self.bytes_sent = 0  # of chunks, since the process started
        self.proofs = BoundedTable[NodeId, EquivocationProof](MAX_PROOFS)  # against owners of lineages

    # --- served versions, set by the publisher and the follower of this node ---------------------------

    async def restore(self, policy_id: NodeId) -> list[tuple[Manifest, SealedManifest]]:
        """Serves the manifests of a lineage that are complete on the disk; returns all of its manifests on the disk."""
        if self._store is None:
            return []
        manifests = await self._offload(self._store.manifests, policy_id)
        for manifest, sealed in manifests:
            if not await self._offload(self._store.missing, manifest.chunks):
                self.offer(manifest, sealed)
        return manifests

    def offer(self, manifest: Manifest, sealed: SealedManifest) -> None:
        """Starts to serve a manifest whose chunks are all on the disk."""
        lineage = self._held.setdefault(manifest.version.policy_id, {})
        if sealed.digest not in lineage:
            self._number += 1
            self._record_version(manifest.version)
            lineage[sealed.digest] = _Held(self._number, manifest.version.step, sealed)
            self._changed.fire()

    def prove(self, proof: EquivocationProof) -> None:
        """Serves the proof against an owner instead of its lineage."""
        self._held.pop(proof.policy_id, None)
        self.proofs[proof.policy_id] = proof
        self._changed.fire()

    def withdraw(self, digests: Collection[Digest]) -> None:
        """Stops serving these manifests."""
        for lineage in self._held.values():
            for digest in digests:
                lineage.pop(digest, None)

    def held(self, policy_id: NodeId) -> dict[Digest, int]:
        """Digests of the served manifests of a lineage, with their steps."""
        return {digest: held.step for digest, held in self._held.get(policy_id, {}).items()}

    def head_step(self, policy_id: NodeId) -> int | None:
        """Newest served step of a lineage; None if none is served."""
        return max((held.step for held in self._held.get(policy_id, {}).values()), default=None)

    # --- calls of peers --------------------------------------------------------------------------------

    async def watch(self, peer: NodeId, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        """Streams the manifests of a lineage, oldest first, then each new one; of our own lineage also credit.

        If the owner equivocated, streams only the two manifests that prove it. Credit comes after the manifests held
        when it was granted, so its `head_step` is never older than those manifests.

        Raises:
            NotHeld: no manifest of the lineage is served, and we do not publish it.
            Unavailable: the peer is not allowed, opened a newer stream, or the owner equivocates; also in the middle of
                a stream.
        """
        self._reputation.require_allowed(peer)
        proof = self.proofs.get(policy_id)
        if proof is not None:
            for sealed in proof.manifests:
                yield sealed
            return
        is_own = policy_id == self._node_id and self._publishes
        if not is_own and not self._held.get(policy_id):
            raise NotHeld(f"nothing is held of lineage {short(policy_id)}")
        logger.debug("peer watches", extra={"peer": short(peer), "lineage": short(policy_id), "window": window})
        line = self._credit_ledger.open(peer, window if is_own else 0)
        try:
            async for item in self._stream(line, policy_id):
                yield item
        finally:
            self._credit_ledger.close(line)
            self._changed.fire()  # its outstanding grants are free for others

    async def _stream(self, line: CreditLine, policy_id: str) -> AsyncIterator[SealedManifest | Credit]:
        number, sent = 0, None
        while True:
            self._reputation.require_allowed(line.peer)
            if line.is_closed:
                raise Unavailable("this peer has opened a newer stream")
            if policy_id in self.proofs:
                raise Unavailable("its owner signed two versions of a step; watch again for the proof")
            lineage = self._held.get(policy_id, {}).values()
            news = sorted((held for held in lineage if held.number > number), key=lambda held: held.number)
            for held in news[:_LISTED_AT_ONCE]:
                number = held.number
                yield held.sealed
            if news:
                continue  # credit marks the end of the list, whose cheapest patch may come last
            credit = self._grant(line, policy_id)
            if credit is not None and credit != sent:
                sent = credit
                yield credit
                continue
            await self._changed.until(lambda: self._has_news(line, policy_id, number, sent))  # noqa: B023

    def _grant(self, line: CreditLine, policy_id: str, *, is_asked_again: bool = False) -> Credit | None:
        """The newest credit of a follower; None if its window is 0, or nothing was published yet.

        Args:
            is_asked_again: True to grant only once for each change, since a change wakes every follower.
        """
        head_step = self.head_step(policy_id)
        if not line.window or head_step is None:
            return None
        if not is_asked_again or self._granted_at != self._changed.num_fired:
            self._granted_at = self._changed.num_fired
            self._credit_ledger.grant(self._capacity())
        return Credit(head_step=head_step, granted=line.num_granted)

    def _has_news(self, line: CreditLine, policy_id: str, number: int, sent: Credit | None) -> bool:
        if line.is_closed or policy_id in self.proofs or not self._reputation.is_allowed(line.peer):
            return True
        if any(held.number > number for held in self._held.get(policy_id, {}).values()):
            return True
        credit = self._grant(line, policy_id, is_asked_again=True)
        return credit is not None and credit != sent

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        """A held chunk. Raises NotHeld if it is not held, Unavailable if the peer is not allowed."""
        self._reputation.require_allowed(peer)
        data = None if self._store is None else await self._offload(self._store.chunk, digest)
        if data is None:
            raise NotHeld(f"chunk {short(digest)} is not held")
        self.bytes_sent += len(data)
        return data


@dataclass(eq=False, slots=True)
class ChunkCall:
    """A call for a chunk that waits for a slot or holds one."""

    peer: NodeId
    task: "asyncio.Task[Any]"
    turn: "asyncio.Future[None]"  # done once it has a slot, or is refused
    stalled: asyncio.TimerHandle | None = None
    is_late: bool = False
    is_cut: bool = False

    def cut(self) -> None:
        """Cancels the call."""
        self.is_cut = True
        self.task.cancel()


class ChunkSlots:
    """Slots for the chunks that a server has in memory at once, held until the last byte was sent.

    A peer has at most CHUNKS_PER_PEER calls, waiting ones included. A free slot goes to the waiting peer with the
    fewest slots, in turn. A peer that has not read its chunk within the stall timeout loses the slot if calls wait.
    """

    def __init__(self, stall_timeout_s: float = CHUNK_STALL_S) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._held: dict[ChunkCall, None] = {}  # oldest first
        self._num_held: Counter[NodeId] = Counter()
        self._waiting = FairTable[NodeId, ChunkCall]()

    async def acquire(self, peer: NodeId, context: Context) -> ChunkCall:
        """Waits for a slot; the call keeps the slot until it ends.

        Raises:
            Unavailable: the peer has CHUNKS_PER_PEER calls, none of them late; CHUNKS_WAITING calls wait and no other
                peer has two more waiting than this one; or this call, while it waits, is dropped for a peer that has
                fewer calls waiting.
        """
        if self._num_held[peer] + len(self._waiting.of(peer)) >= CHUNKS_PER_PEER and not self._cut_one_of(peer):
            raise Unavailable(f"{CHUNKS_PER_PEER} chunks of this peer are under way; ask for fewer at a time")
        if len(self._waiting) >= CHUNKS_WAITING:
            self._turn_one_away(peer)
        task = asyncio.current_task()
        assert task is not None
        call = ChunkCall(peer, task, asyncio.get_running_loop().create_future())
        self._waiting.add(peer, call)
        self._assign_slots()
        try:
            await call.turn
        except BaseException:
            self._end(call)
            raise
        # A unary answer is written after its handler has returned, so the slot is kept until the call has ended.
        cast(Any, context).add_done_callback(lambda _: self._end(call))
        return call

    async def held_up(self, call: ChunkCall, waiting: Awaitable[None]) -> None:
        """Awaits a delay on our side; the stall timeout of the call's peer starts again afterwards."""
        assert call.stalled is not None
        call.stalled.cancel()
        await waiting
        if call in self._held:
            call.stalled = asyncio.get_running_loop().call_later(self._stall_timeout_s, self._mark_late, call)

    def _turn_one_away(self, peer: NodeId) -> None:
        most = self._waiting.longest(beside=peer)
        if most is None:
            raise Unavailable(f"{CHUNKS_WAITING} calls wait for chunks; try another source")
        call = self._waiting.newest(most)
        self._waiting.remove(most, call)
        if not call.turn.done():
            call.turn.set_exception(Unavailable("others wait for fewer chunks; ask again, or another source"))

    def _assign_slots(self) -> None:
        while self._waiting and len(self._held) < CHUNKS_TOTAL:
            peer = min(self._waiting.parties, key=self._num_held.__getitem__)  # of equals the one that waits longest
            call = self._waiting.pop_oldest(peer)
            self._held[call] = None
            self._num_held[peer] += 1
            call.stalled = asyncio.get_running_loop().call_later(self._stall_timeout_s, self._mark_late, call)
            if not call.turn.done():  # it may have been cancelled
                call.turn.set_result(None)
        for late in [call for call in self._held if call.is_late][: len(self._waiting)]:
            if not late.is_cut:
                late.cut()

    def _cut_one_of(self, peer: NodeId) -> bool:
        """Cuts the oldest late call of a peer, whose connection may be broken; returns False if the peer has none."""
        late = next((call for call in self._held if call.peer == peer and call.is_late and not call.is_cut), None)
        if late is not None:
            late.cut()
        return late is not None

    def _mark_late(self, call: ChunkCall) -> None:
        call.is_late = True
        self._assign_slots()

    def _end(self, call: ChunkCall) -> None:
        """Frees the slot or the place of a call that ended."""
        if call in self._held:
            assert call.stalled is not None
            call.stalled.cancel()
            del self._held[call]
            self._num_held[call.peer] -= 1
            if not self._num_held[call.peer]:
                del self._num_held[call.peer]
            self._assign_slots()
        else:
            self._waiting.remove(call.peer, call)
