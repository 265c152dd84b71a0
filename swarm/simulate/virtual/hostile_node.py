"""Hostile node of a virtual swarm: a valid identity that sends forged, stale and endless data.

Invariant: honest admission accepts nothing that this node made itself, so an honest node that learned from this data is
at fault.
"""

import asyncio
import hashlib
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Final

from swarm.errors import NotHeld
from swarm.identity import DOMAIN_GROUP, Identity
from swarm.interfaces import Discovery, StreamItem, Transport
from swarm.simulate.virtual.author import Author
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import make_advert, make_rollout
from swarm.types import (
    Advert,
    Credit,
    Cursor,
    Digest,
    NodeId,
    PolicyVersion,
    RolloutGroup,
    SealedGroup,
    SealedManifest,
    StreamFilter,
)
from swarm.weights.manifest import DOMAIN_WEIGHTS
from swarm.wire.envelopes import seal_group

SEND_EVERY_S: Final = 0.5
CLAIMED_STEP: Final = 1000  # the head that it announces
KINDS: Final = ("forged", "too_old", "copied", "false_reward", "corrupted", "stolen", "garbage", "too_large")


class HostileNode:
    """`ExchangeHandler` of an attacker that announces itself like an honest node."""

    def __init__(self, identity: Identity, author: Author, stores: Callable[[], Sequence[MemoryGroupStore]]) -> None:
        """Creates an attacker; `stores` returns stores of honest nodes, whose groups it copies and changes."""
        self._identity, self._author, self._stores = identity, author, stores
        self._rng = random.Random(f"hostile {identity.node_id}")
        self._number = 0

    async def run(self, transport: Transport, directory: Discovery) -> None:
        """Serves peers and announces the node until cancelled."""
        endpoints = await transport.serve(self)
        while True:
            await directory.announce(self._advert(endpoints))
            await asyncio.sleep(self._author.config.exchange.advert_every_s)

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        """Yields harmful groups without end, or notices of them, one every SEND_EVERY_S."""
        start = self._rng.randrange(len(KINDS))
        for kind in itertools.islice(itertools.cycle(KINDS), start, None):
            await asyncio.sleep(SEND_EVERY_S)
            self._number += 1
            sealed = await self._make(kind)
            yield StreamItem(
                cursor=Cursor(epoch="hostile", sequence=self._number),
                digest=sealed.digest,
                size_bytes=sealed.size_bytes,
                sealed=None if self._rng.random() < 0.2 else sealed,
            )

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        """Returns a harmful group in place of the requested one; raises NotHeld in three of ten calls."""
        if self._rng.random() < 0.3:
            raise NotHeld("not here")
        return await self._make(self._rng.choice(KINDS))

    async def watch(self, peer: NodeId, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        """Yields random bytes as manifests, signed by this node for any lineage, and huge credit, without end."""
        while True:
            await asyncio.sleep(SEND_EVERY_S)
            body = self._rng.randbytes(200)
            signature = self._identity.sign(DOMAIN_WEIGHTS, body)
            yield SealedManifest(body=body, public_key=self._identity.public_key, signature=signature)
            yield Credit(head_step=CLAIMED_STEP, granted=10**6)

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        """Returns random bytes in place of the requested chunk; raises NotHeld in three of ten calls."""
        if self._rng.random() < 0.3:
            raise NotHeld("not here")
        return self._rng.randbytes(200)

    async def _make(self, kind: str) -> SealedGroup:
        victim = await self._honest_group()
        if kind == "too_old":
            return seal_group(self._group(step=0, claimed_reward=0.0), self._identity)
        if kind == "false_reward" or victim is None:
            return seal_group(self._group(step=CLAIMED_STEP, claimed_reward=1.0), self._identity)
        if kind == "copied":
            return victim
        if kind == "corrupted":
            return _with_body(victim, victim.body[:-1] + bytes([victim.body[-1] ^ 1]))
        if kind == "forged":  # our content under the name and key of an honest node
            ours = seal_group(self._group(step=0, claimed_reward=0.0), self._identity)
            return replace(ours, producer=victim.producer, public_key=victim.public_key)
        if kind == "stolen":  # an honest node's content in its name, signed by us
            return replace(victim, public_key=self._identity.public_key, signature=self._sign(victim.digest))
        most = self._author.config.exchange.max_group_bytes
        body = bytes(most + 1) if kind == "too_large" else self._rng.randbytes(200)
        garbage = replace(_with_body(victim, body), is_compressed=False)
        return replace(
            garbage,
            producer=self._identity.node_id,
            public_key=self._identity.public_key,
            signature=self._sign(garbage.digest),
        )

    def _sign(self, digest: Digest) -> bytes:
        return self._identity.sign(DOMAIN_GROUP, b"\1" + digest)  # 1: an uncompressed body

    async def _honest_group(self) -> SealedGroup | None:
        store = self._rng.choice(list(self._stores()))
        entries = await store.since(Cursor(), limit=1, own_only=True)
        return entries[0][1] if entries else None

    def _group(self, step: int, claimed_reward: float) -> RolloutGroup:
        """A well-formed group of this node whose answers are all wrong."""
        author = self._author
        environment = author.environments[min(author.environments)]
        task_id = self._rng.randrange(1000)
        rollout = make_rollout(
            environment.reference(task_id)[::-1] + "#",
            policy_id=author.node_id,
            step=step,
            tokenizer=author.tokenizer,
            reward=claimed_reward,
            logprob=-0.5,
            sampling=author.sampling,
        )
        rollouts = (rollout,) * author.config.generator.group_size
        return author.group(environment.task(task_id), rollouts, verifier=environment.verifier)

    def _advert(self, endpoints: tuple[str, ...]) -> Advert:
        author = self._author
        return make_advert(
            author.node_id,
            run_id=author.config.run_id,
            endpoints=endpoints,
            roles=author.config.roles,
            tokenizer_digest=author.tokenizer.digest,
            head=PolicyVersion(policy_id=author.node_id, step=CLAIMED_STEP),
            num_groups=10**6,
            reward_mean=1.0,
            expires_at_s=author.clock.now_s() + 3 * author.config.exchange.advert_every_s,
        )


def _with_body(sealed: SealedGroup, body: bytes) -> SealedGroup:
    return replace(sealed, body=body, digest=hashlib.sha256(body).digest())
