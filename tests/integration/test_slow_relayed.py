"""A neighbour that relays groups whose answers never end, over real sockets, in front of its own groups."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from attacked_node import AttackedNode
from waits import until

from swarm.clock import SystemClock
from swarm.config import EnvironmentConfig, SandboxConfig
from swarm.environments.load import build_environment
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.errors import NotHeld
from swarm.exchange.grpc_transport import GrpcTransport
from swarm.identity import Identity
from swarm.interfaces import PeerAddress, StreamItem
from swarm.loops.notices import Notice, Notices
from swarm.testing.builders import HoldsNothing, make_group, make_identity
from swarm.types import Cursor, Digest, NodeId, RefusalReason, SealedGroup, StreamFilter
from swarm.wire.envelopes import seal_group

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux only"),
]

RELAY = make_identity(2)
NUM_SLOW, NUM_OWN = 12, 6
RULE = """
def score(question, answer, reference):
    while answer == "77":
        pass
    return answer == reference
"""


class Relay(HoldsNothing):
    """Announces the groups of others, each of another key, and then sends its own; a peer that breaks no rule."""

    def __init__(self, announced: list[SealedGroup], own: list[SealedGroup]) -> None:
        self._announced, self._own = announced, own

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        for number, sealed in enumerate([*self._announced, *self._own]):
            if number >= cursor.sequence:
                yield StreamItem(
                    cursor=Cursor(epoch="e", sequence=number + 1),
                    digest=sealed.digest,
                    size_bytes=sealed.size_bytes,
                    sealed=sealed if sealed.producer == RELAY.node_id else None,
                    producer=sealed.producer,
                )
        await asyncio.Event().wait()

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        for sealed in self._announced:
            if sealed.digest == digest:
                return sealed
        raise NotHeld("not here")


class ScoringNode(AttackedNode):
    """A node whose verifier never ends on the answer 77."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "node")
        (directory / "rule.py").write_text(RULE)
        records = [{"question": f"{i}=", "answer": str(i % 10)} for i in range(400)]
        (directory / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
        params = {"path": str(directory / "records.jsonl")}
        dataset = f"{directory / 'rule.py'}:score"
        environment = EnvironmentConfig(name="digits", kind="function", dataset=dataset, params=params)
        task = build_environment(environment).task
        self.usable = [i for i in range(400) if not task(i).is_held_out]
        self.verifier = SandboxVerifier((environment,), SandboxConfig())

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        await self.verifier.close()

    def parts(self) -> dict[str, Any]:
        return {"verifier": self.verifier, "environments": frozenset({"digits"})}

    def group_of(self, identity: Identity, wrong: str) -> SealedGroup:
        task_id = self.usable.pop()
        texts = [str(task_id % 10), wrong] * 4
        group = make_group(identity.node_id, env="digits", task_id=task_id, texts=texts)
        return seal_group(group, identity)


async def refused_before_all_own(node: ScoringNode, announced: list[SealedGroup], own: list[SealedGroup]) -> int:
    """Announced groups that were refused before all of the relay's own were admitted."""
    transport = GrpcTransport(RELAY, node.config.run_id, node.config.exchange, SystemClock())
    (endpoint,) = await transport.serve(Relay(announced, own))
    try:
        node.stream_from(PeerAddress(node_id=RELAY.node_id, endpoint=endpoint))
        await until(lambda: node.agent.ingest.num_admitted == len(own))
        num_before = sum(node.refused.values())
        await node.judged(len(announced) + len(own))
        assert node.refused == {RefusalReason.VERIFIER_FAILED: len(announced)}
    finally:
        await transport.stop()
    return num_before


async def test_what_a_neighbour_made_does_not_wait_for_slow_groups_that_it_relays(tmp_path: Path) -> None:
    async with ScoringNode(tmp_path) as node:
        await node.verifier.limits_in_force()  # the imports are no part of it
        announced = [node.group_of(make_identity(100 + number), "77") for number in range(NUM_SLOW)]
        own = [node.group_of(RELAY, "??") for _ in range(NUM_OWN)]
        num_before = await refused_before_all_own(node, announced, own)
        assert num_before < NUM_SLOW, num_before
        stream: Any = node._streams[0]
        assert not len(stream._notices) and not stream._notices.num_under_way
        assert not len(node.agent.ingest.fetching)


async def test_honest_groups_that_a_neighbour_relays_do_not_wait_for_slow_ones_of_other_origins(tmp_path: Path) -> None:
    async with ScoringNode(tmp_path) as node:
        await node.verifier.limits_in_force()
        slow = [node.group_of(make_identity(100 + number % 4), "77") for number in range(NUM_SLOW)]
        honest = [node.group_of(make_identity(50), "??") for _ in range(NUM_OWN)]
        transport = GrpcTransport(RELAY, node.config.run_id, node.config.exchange, SystemClock())
        (endpoint,) = await transport.serve(Relay([*slow, *honest], []))
        try:
            node.stream_from(PeerAddress(node_id=RELAY.node_id, endpoint=endpoint))
            await until(lambda: node.agent.ingest.num_admitted == NUM_OWN)
            num_before = sum(node.refused.values())
        finally:
            await transport.stop()
        assert num_before < NUM_SLOW // 2, num_before


def test_a_notice_is_a_group_of_its_origin() -> None:
    notices, notice = Notices(RELAY.node_id, 2**20), Notice(bytes(32), 100, "a" * 64)
    notices.put(notice)
    assert notices.take() == notice and not notices.has_next()
