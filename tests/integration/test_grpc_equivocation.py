"""Two versions of one step over real sockets: the follower that sees both leaves, and shows others why."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
from waits import until

from swarm.config import NodeConfig, WeightsConfig
from swarm.exchange.agent import Agent
from swarm.identity import Identity
from swarm.interfaces import PeerAddress
from swarm.loops.fetch_weights import SourceWatcher
from swarm.loops.own_advert import own_advert
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import HoldsNothing, make_advert, make_identity
from swarm.testing.nodes import make_agent, make_context
from swarm.types import Credit, NodeId, PolicyVersion, Role, SealedManifest
from swarm.weight_sync.follower import FollowerState
from swarm.weights.manifest import seal_body, with_branch
from swarm.weights.publish import Publisher
from swarm.weights.store import WeightStore
from swarm.weights.tensors import HostTensor, TensorSpec, published_digest
from tests.worlds.grpc_world import transport_of

TRAINER, ALICE, BOB, CAROL = (make_identity(number) for number in range(1, 5))


class Shows(HoldsNothing):
    """A trainer or a follower of it, with one manifest to show."""

    def __init__(self, manifests: list[SealedManifest]) -> None:
        self.manifests = manifests

    async def watch(self, peer: NodeId, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        for sealed in self.manifests:
            yield sealed
        await asyncio.Event().wait()


def version_of(seed: int) -> list[SealedManifest]:
    """Signed manifests of step 1 in branch 7, with weights of that seed."""
    bits = np.random.default_rng(seed).integers(0x3C00, 0x3F00, 1000).astype("<u2")
    weights = {"w": HostTensor(spec=TensorSpec(name="w", dtype="bfloat16", shape=(1000,)), bits=bits)}
    version = PolicyVersion(policy_id=TRAINER.node_id, step=1, digest=published_digest(weights))
    bodies = Publisher(lambda digest, data: None).publish(version, weights)
    return [seal_body(with_branch(body, 7), TRAINER) for body in bodies]


async def serve(identity: Identity, handler: HoldsNothing | Agent) -> PeerAddress:
    answers = handler.streams if isinstance(handler, Agent) else handler
    (endpoint,) = await transport_of(identity, NodeConfig().run_id).serve(answers)
    return PeerAddress(node_id=identity.node_id, endpoint=endpoint)


async def follower(root: Path, identity: Identity) -> Agent:
    config = NodeConfig(dir=root / identity.node_id[:8], roles=(Role.GENERATOR,), weights=WeightsConfig(publish=False))
    context = make_context(config, identity)
    store = WeightStore(config.dir / "weights", config.weights.store_bytes)
    agent = make_agent(context, MemoryGroupStore(context.clock, 10**8), weights=store)
    assert agent.weight_follower is not None
    head = PolicyVersion(policy_id=TRAINER.node_id, step=1, digest=b"d" * 32)
    await agent.weight_follower.on_adverts([make_advert(TRAINER.node_id, head=head)])
    return agent


def watch(agent: Agent, identity: Identity, source: PeerAddress) -> "asyncio.Task[None]":
    assert agent.weight_follower is not None
    watcher = SourceWatcher(
        agent, agent.weight_follower, transport_of(identity, NodeConfig().run_id), source, random.Random(0)
    )
    return asyncio.create_task(watcher.run())


def has_ended(agent: Agent) -> bool:
    return agent.weight_follower is not None and agent.weight_follower.state is FollowerState.ENDED


async def test_who_sees_both_versions_leaves_and_shows_others_why(tmp_path: Path) -> None:
    """Alice is shown one version by the trainer and another by a follower; Carol watches Alice alone."""
    tasks = list[asyncio.Task[None]]()
    try:
        trainer = await serve(TRAINER, Shows(version_of(1)))
        bob = await serve(BOB, Shows(version_of(2)))
        alice, carol = await follower(tmp_path, ALICE), await follower(tmp_path, CAROL)
        num_seen = 0
        assert alice.weight_follower is not None
        on_manifest = alice.weight_follower.on_manifest

        async def count(peer: NodeId, sealed: SealedManifest) -> object:
            nonlocal num_seen
            news = await on_manifest(peer, sealed)
            num_seen += 1
            return news

        alice.weight_follower.on_manifest = count  # type: ignore[method-assign, assignment]
        tasks += [watch(alice, ALICE, source) for source in (trainer, bob)]
        await until(lambda: num_seen >= 2)
        assert has_ended(alice)
        tasks.append(watch(carol, CAROL, await serve(ALICE, alice)))
        await until(lambda: has_ended(carol))
        for agent in (alice, carol):
            assert own_advert(agent).equivocator == TRAINER.node_id[:16]
            assert not agent.reputation.is_allowed(TRAINER.node_id)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
