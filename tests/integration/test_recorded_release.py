"""A node goes on with the directories of older releases; tests/recorded says how a release is recorded."""

import asyncio
import json
import shutil
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from swarm.config import CoordinatorConfig, NodeConfig, load_config
from swarm.events import DrawsAbandoned, Event, GroupsDrawn, LoopFailed, NodeRestored, StepMade, events_of

FOLDER = Path(__file__).parents[1] / "recorded"
RECORDINGS = sorted(FOLDER.glob("*.tar.xz"))
sys.path.append(str(FOLDER))


def test_the_first_release_with_a_recorded_run_is_kept() -> None:
    assert FOLDER / "0.1.0.tar.xz" in RECORDINGS


def read_page(url: str) -> bytes:
    with urllib.request.urlopen(url) as page:
        return bytes(page.read())


def drawn(events: list[Event]) -> dict[int, list[str]]:
    """Digests of the groups of each draw."""
    return {event.draw_step: [use.digest for use in event.groups] for event in events_of(GroupsDrawn, events)}


def learned(events: list[Event]) -> list[tuple[int, int, int]]:
    """The figures that are equal on every machine for a step that is made again from the same draw."""
    return [(event.draw_step, event.num_tokens, len(event.ages_steps)) for event in events_of(StepMade, events)]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("archive", RECORDINGS, ids=lambda path: path.name.removesuffix(".tar.xz"))
async def test_a_run_of_an_older_release_goes_on_where_it_was(archive: Path, swarm: Any) -> None:
    from recorded_run import unpack

    unpack(archive, swarm.directory)
    old = swarm.directory = swarm.directory / "swarm"
    for path in old.glob("*/*.toml"):  # as the error asks where the value is another one than every node has now
        path.write_text(path.read_text().replace("rejoin_every_s = 5.0\n", ""))
    # As after a crash between two checkpoints: what was learned since is learned again, from the journal's draws.
    shutil.rmtree(old / "ada" / "checkpoints" / "checkpoint-00000008")
    first_run = json.loads((old / "ada" / "status.json").read_text())
    for name in ("ada", "bell"):
        (old / name / "status.json").unlink()
    (old / "coordinator" / "coordinator.json").unlink()

    info = await swarm.start_coordinator(load_config(CoordinatorConfig, old / "coordinator" / "coordinator.toml"))
    ledger = json.loads(await asyncio.to_thread(read_page, f"http://{info['http_listen']}/status.json"))
    assert {member["name"] for member in ledger["members"]} == {"ada", "bell", "curie", "dirac"}
    assert [(lineage["policy_id"], lineage["step"]) for lineage in ledger["lineages"]] == [(first_run["node_id"], 8)]

    trainer = load_config(NodeConfig, old / "ada" / "node.toml")
    learner = trainer.learner.model_copy(update={"num_steps": 12})
    ada = await swarm.node(trainer.model_copy(update={"learner": learner}), info=info)
    await swarm.node(load_config(NodeConfig, old / "bell" / "node.toml"), info=info)
    await swarm.until(lambda: ada.status()["step"] >= 12, "the trainer did not reach step 12")
    assert ada.status()["node_id"] == first_run["node_id"]

    ada.read_events()
    (restart,) = (at for at, event in enumerate(ada.events) if isinstance(event, NodeRestored) and event.num_draws)
    before, after = ada.events[:restart], ada.events[restart:]
    assert isinstance(ada.events[restart], NodeRestored) and ada.events[restart].num_draws == 8
    made = [event.step for event in events_of(StepMade, after) if not event.was_skipped]
    assert made == [7, 8, 9, 10, 11, 12]
    assert events_of(DrawsAbandoned, after) == [] and events_of(LoopFailed, after) == []

    old_draws, new_draws = drawn(before), drawn(after)
    assert [*old_draws] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [*new_draws][:4] == [9, 10, 11, 12], "7 and 8 are in the journal"
    assert learned(after)[:2] == learned(before)[6:], "another draw than the journal's"
    used = {digest for digests in old_draws.values() for digest in digests}
    assert used.isdisjoint(digest for digests in new_draws.values() for digest in digests), "a group learned twice"
