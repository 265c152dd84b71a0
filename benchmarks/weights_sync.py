"""Bytes of one new policy version on the wire, everything included, on the way from a trainer to one generator.

    python -m benchmarks.weights_sync                 # lr 1e-6, 8 real steps of SmolLM2-135M (made once: minutes)
    python -m benchmarks.weights_sync --lr 1e-5 --steps 8

The versions are those of `benchmarks.weights`. Each is published with canaries as a node does it, announced on a watch
over TLS, fetched chunk by chunk, staged and verified. Bytes are what the kernel counted on both ends' sockets, headers
of packets and acknowledgements in, after the connection was made and the first version was there.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks._tcp import tcp_counts
from benchmarks._weights_run import versions
from swarm.clock import SystemClock
from swarm.config import ExchangeConfig
from swarm.errors import NotHeld
from swarm.exchange.grpc_transport import GrpcTransport
from swarm.flow import Signal
from swarm.identity import Identity
from swarm.interfaces import PeerAddress, PeerClient
from swarm.model.version_digest import PublishedTensors, weights_digest
from swarm.testing.builders import HoldsNothing
from swarm.types import (
    Credit,
    Digest,
    FloatArray,
    NodeId,
    PolicyVersion,
    SealedManifest,
)
from swarm.weights.apply import VerifiedVersion, stage
from swarm.weights.codec import full_bytes
from swarm.weights.manifest import Limits, Manifest, open_manifest, seal_body
from swarm.weights.publish import CANARY_TOKENS, Publisher
from swarm.weights.store import WeightStore
from swarm.weights.tensors import TorchWeights, specs_of

NUM_CANARIES = 4
STORE_BYTES = 4 << 30
CHUNK_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """One version on its way."""

    step: int
    payload_bytes: int  # of the patch that was fetched
    manifest_bytes: int  # all that was announced: the patch from the version before, and others
    wire_bytes: int
    full_bytes: int

    @property
    def ratio(self) -> float:
        """Full size over what was on the wire."""
        return self.full_bytes / self.wire_bytes


class Trainer(HoldsNothing):
    """The serving side: manifests as they are published, chunks from its weight store."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._sealed: list[SealedManifest] = []
        self._changed = Signal()

    def announce(self, manifests: Sequence[SealedManifest]) -> None:
        """To everybody who watches."""
        self._sealed += manifests
        self._changed.fire()

    async def watch(self, peer: NodeId, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        """Every manifest, then new ones."""
        number = 0
        while True:
            await self._changed.until(lambda: len(self._sealed) > number)  # noqa: B023
            number += 1
            yield self._sealed[number - 1]

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        """From the store."""
        data = await asyncio.to_thread(self._store.chunk, digest)
        if data is None:
            raise NotHeld(digest.hex())
        return data


async def measure(tensors: Sequence[PublishedTensors], directory: Path) -> list[Sync]:
    """Publishes and follows every version; the first one both sides have."""
    identity = Identity.create()
    store = WeightStore(directory / "trainer", STORE_BYTES)
    trainer = Trainer(store)
    canaries = [list(range(CANARY_TOKENS))] * NUM_CANARIES
    publisher = Publisher(store.put_chunk, canaries, _unknown_logprobs, anchor_every=10)
    server = GrpcTransport(identity, "bench", ExchangeConfig(), SystemClock())
    client = GrpcTransport(Identity.create(), "bench", ExchangeConfig(), SystemClock())
    (endpoint,) = await server.serve(trainer)
    peer = await client.connect(PeerAddress(node_id=identity.node_id, endpoint=endpoint), timeout_s=10.0)
    watching = aiter(peer.watch(identity.node_id, 0))
    syncs: list[Sync] = []
    held: VerifiedVersion | None = None
    try:
        for step, state in enumerate(tensors):
            version = PolicyVersion(policy_id=identity.node_id, step=step, digest=weights_digest(state))
            sealed = [seal_body(body, identity) for body in publisher.publish(version, TorchWeights(state))]
            before = tcp_counts()
            trainer.announce(sealed)
            received = [await anext(watching) for _ in sealed]
            if held is None:
                found = VerifiedVersion.of(TorchWeights(state), version)
            else:
                found = await _follow(peer, received, held)
            assert isinstance(found, VerifiedVersion), found
            after = tcp_counts()
            assert before is not None and after is not None, "byte counts need Linux"
            if held is not None:
                syncs.append(_sync_of(received, held, (after - before).wire_bytes, state))
            held = found
    finally:
        await peer.close()
        await client.stop()
        await server.stop()
    return syncs


async def _follow(peer: PeerClient, received: Sequence[SealedManifest | Credit], held: VerifiedVersion) -> object:
    """The version of the patch that starts from what is held, verified."""
    manifest = _patch(received, held)
    chunks = [await peer.fetch_chunk(digest, CHUNK_TIMEOUT_S) for digest in manifest.chunks]
    return await asyncio.to_thread(stage, manifest, chunks, held)


def _patch(received: Sequence[SealedManifest | Credit], held: VerifiedVersion) -> Manifest:
    for sealed in received:
        assert isinstance(sealed, SealedManifest)
        manifest = open_manifest(sealed, held.version.policy_id, Limits())
        if isinstance(manifest, Manifest) and manifest.base == held.version:
            return manifest
    raise AssertionError("no patch from the version before")


def _sync_of(
    received: Sequence[SealedManifest | Credit], held: VerifiedVersion, wire_bytes: int, state: PublishedTensors
) -> Sync:
    manifest = _patch(received, held)
    return Sync(
        step=manifest.version.step,
        payload_bytes=manifest.payload_bytes,
        manifest_bytes=sum(len(sealed.body) for sealed in received if isinstance(sealed, SealedManifest)),
        wire_bytes=wire_bytes,
        full_bytes=full_bytes(specs_of(TorchWeights(state))),
    )


def _unknown_logprobs(sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
    """As many bytes as real ones; no engine is here that would compare them."""
    return [np.full(len(ids), -1.0, np.float32) for ids in sequences]


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of the run")
    parser.add_argument("--steps", type=int, default=8, help="versions after the first")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    arguments = parser.parse_args()
    tensors = list(versions(arguments.lr, arguments.steps))
    with tempfile.TemporaryDirectory() as directory:
        syncs = asyncio.run(measure(tensors, Path(directory)))
    if arguments.json:
        print(json.dumps([asdict(sync) for sync in syncs]))
        return
    table = Table("step", "patch, bytes", "manifests, bytes", "on the wire, bytes", "full / wire")
    for sync in syncs:
        cells = (sync.payload_bytes, sync.manifest_bytes, sync.wire_bytes)
        table.add_row(str(sync.step), *(f"{cell:,}" for cell in cells), f"{sync.ratio:.0f} x")
    Console().print(table)
    mean = fmean(sync.wire_bytes for sync in syncs)
    print(f"mean {mean:,.0f} bytes a version, {syncs[0].full_bytes / mean:.0f} x fewer than in full")


if __name__ == "__main__":
    main()
