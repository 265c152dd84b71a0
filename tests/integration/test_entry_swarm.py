"""A vouched run as processes: a member and whom it invited learn from each other, a stranger learns from nobody."""

import asyncio
import time
from typing import Any

import pytest

from node.credential import INVITATION
from swarm.config import EntryConfig
from swarm.events import GroupsDrawn, events_of
from swarm.process import load_or_create_identity
from swarm.simulate.local.processes import Process
from swarm.wire.credentials import invite

pytestmark = pytest.mark.asyncio(loop_scope="session")


def num_external(process: Process) -> int:
    process.read_events()
    draws = events_of(GroupsDrawn, process.events)
    return sum(not group.is_own_policy for draw in draws for group in draw.groups)


async def test_a_stranger_with_a_configuration_of_its_own_reaches_nobody_in_a_vouched_run(swarm: Any) -> None:
    configs = swarm.configs(3)
    for config in configs:
        config.dir.mkdir(parents=True, exist_ok=True)
    member, guest, _ = (load_or_create_identity(config.dir / "identity.key") for config in configs)
    entry = EntryConfig(kind="invited", members=(member.node_id,))
    honest = [config.model_copy(update={"entry": entry}) for config in configs[:2]]
    text = invite(member, honest[1].run_id, guest.node_id, 1.0, time.time())
    (honest[1].dir / INVITATION).write_text(text)
    info = await swarm.coordinator(honest[0])
    ada, bob, stranger = await asyncio.gather(
        swarm.node(honest[0], info=info),
        swarm.node(honest[1], info=info),
        swarm.node(configs[2], info=info),  # it lets everybody in, and nobody lets it in
    )
    await swarm.until(
        lambda: bool(num_external(ada) and num_external(bob)), "ada and bob did not learn from each other"
    )
    await swarm.until(lambda: ada.status()["num_entry_refused"] > 0, "the stranger was never refused at ada")
    assert num_external(stranger) == 0
    assert stranger.status()["peers"] == []
    assert stranger.status()["is_coordinator_reachable"] is False
    await swarm.until(
        lambda: ada.status()["peers"] == [guest.node_id] and bob.status()["peers"] == [member.node_id],
        "the statuses of ada and bob never named the other alone",
    )
