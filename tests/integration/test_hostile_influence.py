"""Free keys whose groups are right, fresh and many, over real sockets: they have an eighth of what a node learns from.

That such groups come from no policy is not found out: what is bounded is their share.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from attacked_node import VICTIM, AttackedNode, Sender
from waits import until

from swarm.config import ReplayConfig, WeightsConfig
from swarm.identity import Identity
from swarm.interfaces import PeerAddress
from swarm.testing.builders import make_group, make_identity
from swarm.trust_policy import SHARE
from swarm.types import Credit, NodeId, PolicyVersion, RefusalReason, Role, RolloutGroup, VersionSpan
from swarm.weights.publish import Publisher
from swarm.weights.store import WeightStore
from swarm.weights.tensors import HostTensor, TensorSpec, published_digest
from swarm.wire.envelopes import seal_group

HONEST = [make_identity(number) for number in (2, 3)]
HOSTILE = [make_identity(number) for number in range(10, 16)]
REPLAY = ReplayConfig(local_groups=1, external_groups=4)
NUM_DRAWS = 16


def part_of(hostile: list[Identity], drawn: Counter[NodeId]) -> float:
    return sum(drawn[each.node_id] for each in hostile) / (NUM_DRAWS * REPLAY.external_groups)


def invented(identity: Identity, number: int) -> RolloutGroup:
    """Four right and four wrong answers, as a script writes them."""
    rng = random.Random(f"{identity.node_id} {number}")
    return make_group(identity.node_id, task_id=rng.randrange(10**6), logprob=-rng.random())


def without_logprobs(group: RolloutGroup) -> RolloutGroup:
    traces = [replace(each.trace, logprobs=None) for each in group.rollouts if each.trace is not None]
    return replace(
        group, rollouts=tuple(replace(r, trace=trace) for r, trace in zip(group.rollouts, traces, strict=True))
    )


async def test_six_free_keys_beside_two_members_have_an_eighth_of_the_draws(tmp_path: Path) -> None:
    """Invented groups."""
    async with AttackedNode(tmp_path, members=(VICTIM, *HONEST), replay=REPLAY) as node:
        num_sent = 0
        for identity in (*HONEST, *HOSTILE):
            sender = await node.follow(identity)
            for number in range(32 if identity in HONEST else 12):
                sender.send(invented(identity, number))
                num_sent += 1
        await node.judged(num_sent)
        assert not node.refused
        drawn = await node.drawn(NUM_DRAWS)
        assert 0 < part_of(HOSTILE, drawn) <= 1 / SHARE
        assert part_of(HONEST, drawn) >= 0.8, "nothing of what members bring is lost"


async def test_a_member_that_leaves_out_log_probs_has_what_a_stranger_has(tmp_path: Path) -> None:
    """Nothing is measured of such a group, so it evades the guard."""
    async with AttackedNode(tmp_path, members=(VICTIM, *HONEST), replay=REPLAY) as node:
        turned, honest = await node.follow(HONEST[0]), await node.follow(HONEST[1])
        for number in range(32):
            turned.send(without_logprobs(invented(turned.identity, number)))
            honest.send(invented(honest.identity, number))
        await node.judged(64)
        assert not node.refused
        share = part_of([turned.identity], await node.drawn(NUM_DRAWS))
        assert 0 < share <= 1 / SHARE


# --- followers of a trainer ----------------------------------------------------------------------------------


class AttackedTrainer(AttackedNode):
    """Generates nothing: whoever follows its weights, and has credit for it, makes the groups of its lineage."""

    def __init__(self, directory: Path, members: tuple[Identity, ...]) -> None:
        replay = ReplayConfig(local_groups=4, external_groups=0)
        weights = WeightsConfig(publish=True)
        super().__init__(directory, members, roles=(Role.TRAINER,), replay=replay, weights=weights)
        self._weights = {
            "w": HostTensor(
                spec=TensorSpec(name="w", dtype="bfloat16", shape=(64,)), bits=np.full(64, 0x3C00, np.dtype("<u2"))
            )
        }

    def parts(self) -> dict[str, Any]:
        self.weight_store = WeightStore(self.config.dir / "weights", self.config.weights.store_bytes)
        return {"weights": self.weight_store}

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(policy_id=VICTIM.node_id, step=0, digest=published_digest(self._weights))

    async def __aenter__(self) -> "AttackedTrainer":
        await super().__aenter__()
        (self.endpoint,) = await self.transport.serve(self.agent.streams)
        manifests = Publisher(self.weight_store.put_chunk).publish(self.version, self._weights)
        await self.agent.local.publish(self.version, manifests)
        return self

    async def is_followed_by(
        self, identity: Identity, seconds: float, most: int = 1_000_000, *, has_logprobs: bool = True
    ) -> "asyncio.Task[None]":
        """A follower that delivers as much as it has credit for, so many seconds after it was granted, and `most`."""
        sender = await self.follow(identity)
        client = await self._transport(identity).connect(
            PeerAddress(node_id=VICTIM.node_id, endpoint=self.endpoint), 5.0
        )
        watch = client.watch(VICTIM.node_id, 8)
        return asyncio.create_task(self._deliver(sender, watch, seconds, most, has_logprobs))

    async def draws_beside(self, followers: "Sequence[asyncio.Task[None]]") -> Counter[NodeId]:
        """Groups of each producer in twelve draws; the followers end then."""
        drawn = Counter[NodeId]()
        for _ in range(12):
            draw = await self.next_draw()
            drawn.update(each.scored.group.producer for each in draw.groups)
        for task in followers:
            task.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        return drawn

    async def _deliver(
        self, sender: Sender, news: AsyncIterator[Any], seconds: float, most: int, has_logprobs: bool
    ) -> None:
        num_sent = 0
        async for item in news:
            if isinstance(item, Credit):
                await asyncio.sleep(seconds)
                for num_sent in range(num_sent + 1, min(item.granted, most) + 1):  # noqa: B020
                    group = self._by_follower(sender.identity, num_sent)
                    sender.send(group if has_logprobs else without_logprobs(group))

    def _by_follower(self, identity: Identity, number: int) -> RolloutGroup:
        group = invented(identity, number)
        span = (VersionSpan(start=0, version=self.version),)
        traces = [replace(each.trace, spans=span) for each in group.rollouts if each.trace is not None]
        rollouts = tuple(replace(r, trace=trace) for r, trace in zip(group.rollouts, traces, strict=True))
        return replace(group, policy_id=VICTIM.node_id, rollouts=rollouts)


async def test_free_keys_that_follow_a_trainer_have_an_eighth_of_its_groups(tmp_path: Path) -> None:
    """They take credit, and deliver faster than the members."""
    async with AttackedTrainer(tmp_path, members=(VICTIM, *HONEST)) as node:
        followers = [await node.is_followed_by(identity, 0.1) for identity in HONEST]
        followers += [await node.is_followed_by(identity, 0.0) for identity in HOSTILE]
        drawn = await node.draws_beside(followers)
        num_hostile = sum(drawn[each.node_id] for each in HOSTILE)
        assert num_hostile <= drawn.total() / SHARE + 1, drawn


async def test_in_a_private_run_free_keys_without_log_probs_have_an_eighth_of_the_groups_of_a_trainer(
    tmp_path: Path,
) -> None:
    """They take credit, and deliver faster than two honest followers; everybody is established."""
    async with AttackedTrainer(tmp_path, members=()) as node:
        followers = [await node.is_followed_by(identity, 0.1) for identity in HONEST]
        followers += [await node.is_followed_by(identity, 0.0, has_logprobs=False) for identity in HOSTILE]
        drawn = await node.draws_beside(followers)
        num_hostile = sum(drawn[each.node_id] for each in HOSTILE)
        assert 0 < num_hostile <= drawn.total() / SHARE + 1, drawn


async def test_a_stranger_ends_nobodys_trust_with_an_old_group_of_its(tmp_path: Path) -> None:
    """A member made it in another run; each copy settled one of its grants as refused."""
    async with AttackedTrainer(tmp_path, members=(VICTIM, *HONEST)) as node:
        follower = await node.is_followed_by(HONEST[0], 0.0, most=7)
        await node.judged(7)
        line = node.agent.credit_ledger._lines[HONEST[0].node_id]
        await until(lambda: line.num_outstanding == 8)
        stranger = await node.follow(HOSTILE[0])
        old = seal_group(replace(invented(HONEST[0], 0), run_id="another"), HONEST[0])
        for _ in range(5):
            stranger.send_sealed(old)
        await node.judged(12)
        assert node.refused == {RefusalReason.WRONG_RUN: 5}
        assert line.num_delivered == 7 and line.record.max_outstanding == 8, line
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
