"""The run's manifest over real sockets: an older one is refused, one that expired too, and the next key takes over."""

import errno
import json
import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app as coordinator_app
from coordinator.daemon import CoordinatorDaemon
from coordinator.manifest_signing import rotate_key, sign_next
from node.daemon import Daemon
from node.join import join_swarm
from node.manifest_refresh import ManifestRefresh
from swarm.clock import ManualClock, SystemClock
from swarm.config import (
    CoordinatorConfig,
    DirectoryConfig,
    EntryConfig,
    EnvironmentConfig,
    ModelConfig,
    NodeConfig,
    load_config,
)
from swarm.errors import ConfigError, StorageFull, Unauthenticated
from swarm.exchange.agent import Agent
from swarm.identity import DOMAIN_MANIFEST, Identity
from swarm.peers.address_book import KNOWN_PEERS, save_known_peers
from swarm.process import load_or_create_identity, lock_directory
from swarm.wire import held_manifest
from swarm.wire.credentials import DAY_S, Credential, seal_invitation
from swarm.wire.held_manifest import HELD, load_held
from swarm.wire.join_link import JoinLink
from swarm.wire.run_manifest import (
    SignedManifest,
    check_succession,
    manifest_of,
    open_manifest,
    sign_manifest,
    write_toml,
)

RUN = "rotation"
MEMBER, NEWCOMER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
QUIET: Any = {"start": False, "say": lambda text: None}


def config_in(directory: Path, *members: Identity, **changes: Any) -> CoordinatorConfig:
    entry = EntryConfig(kind="members", members=tuple(member.node_id for member in (MEMBER, *members)))
    node = NodeConfig(
        environments=(EnvironmentConfig(name="echo", kind="char", dataset="reverse"),),
        model=ModelConfig(source="tiny"),
        entry=entry,
    )
    values = {"dir": directory, "run_id": RUN, "directory": DirectoryConfig(kind="none"), "node": node, **changes}
    return CoordinatorConfig.model_validate(values)


@asynccontextmanager
async def coordinator(config: CoordinatorConfig, thief: SignedManifest | None = None) -> AsyncGenerator[str]:
    """The coordinator of a run on its usual port; `thief`: what somebody with its key serves instead."""
    async with CoordinatorDaemon(config) as daemon:
        if thief is not None:
            daemon._servicer.manifest = thief  # pyright: ignore[reportPrivateUsage]
        yield daemon.link


class Joined:
    """A node that joined by the link, without its loops."""

    def __init__(self, directory: Path, link: str, clock: Any = None) -> None:
        file = load_config(NodeConfig, directory / "node.toml")
        held = load_held(directory, RUN)
        assert held is not None
        self.directory = directory
        address = {"coordinator": file.coordinator.model_copy(update={"address": JoinLink.parse(link).addresses[0]})}
        self.config = held_manifest.with_held(file.model_copy(update=address), held)
        self.changes: list[SignedManifest] = []
        self.refresh = ManifestRefresh(
            self.config, Identity.create(), held, clock or SystemClock(), self.changes.append
        )

    @property
    def members(self) -> set[str]:
        held = load_held(self.directory, RUN)
        return set(held_manifest.with_held(self.config, held).entry.members)


async def test_a_node_follows_a_newer_list_of_members_and_serials_rise_with_changes_only(tmp_path: Path) -> None:
    async with coordinator(config_in(tmp_path / "run")) as link:
        await join_swarm(link, tmp_path / "node", [], **QUIET)
    async with coordinator(config_in(tmp_path / "run")) as link:
        node = Joined(tmp_path / "node", link)
        assert not await node.refresh.refresh()
    serial = node.refresh.held.manifest.serial
    async with coordinator(config_in(tmp_path / "run", NEWCOMER)) as link:
        assert await Joined(tmp_path / "node", link).refresh.refresh()
    assert node.members == {MEMBER.node_id, NEWCOMER.node_id}
    held = load_held(tmp_path / "node", RUN)
    assert held is not None and held.manifest.serial > serial


@pytest.mark.parametrize("own", ["everybody", "members"])
async def test_whose_groups_count_in_full_is_as_a_node_set_it_for_itself(own: str, tmp_path: Path) -> None:
    async with coordinator(config_in(tmp_path / "run")) as link:
        await join_swarm(link, tmp_path / "node", [f"entry.established={own}"], **QUIET)
    held = load_held(tmp_path / "node", RUN)
    config = held_manifest.with_held(load_config(NodeConfig, tmp_path / "node" / "node.toml"), held)
    assert held is not None and held.manifest.entry.established == "auto"
    assert config.entry.members == (MEMBER.node_id,)
    assert config.entry.established == own


async def test_a_node_that_set_nothing_follows_whose_groups_count_and_who_is_denied_no_more(tmp_path: Path) -> None:
    run, plain = tmp_path / "run", config_in(tmp_path / "run")
    entry = plain.node.entry.model_copy(update={"established": "everybody", "denied": (NEWCOMER.node_id,)})
    async with coordinator(plain) as link:
        await join_swarm(link, tmp_path / "node", [], **QUIET)
    config = load_config(NodeConfig, tmp_path / "node" / "node.toml")
    own, seen = config.entry, list[tuple[str, tuple[str, ...]]]()
    for node in (plain.node, plain.node.model_copy(update={"entry": entry}), plain.node):
        async with coordinator(config_in(run, node=node)):
            config = held_manifest.with_held(config, load_held(run, RUN), own)
        seen.append((config.entry.established, config.entry.denied))
    assert seen == [("auto", ()), ("everybody", (NEWCOMER.node_id,)), ("auto", ())]


async def test_an_older_manifest_of_the_same_key_is_refused(tmp_path: Path) -> None:
    """A member who was taken off the list has kept the manifest of before, and the key that signed it."""
    async with coordinator(config_in(tmp_path / "run", NEWCOMER)):
        old = load_held(tmp_path / "run", RUN)
    async with coordinator(config_in(tmp_path / "run")) as link:
        await join_swarm(link, tmp_path / "node", [], **QUIET)
        node = Joined(tmp_path / "node", link)
    async with coordinator(config_in(tmp_path / "run"), thief=old) as link:
        node = Joined(tmp_path / "node", link)
        with pytest.raises(Unauthenticated, match="was seen before"):
            await node.refresh.refresh()
        (tmp_path / "node" / "node.toml").unlink()
        with pytest.raises(ConfigError, match="was seen before"):
            await join_swarm(link, tmp_path / "node", [], **QUIET)
    assert NEWCOMER.node_id not in node.members


async def test_a_stolen_key_is_replaced_by_the_next_one(tmp_path: Path) -> None:
    """The thief signs the highest serial and names a next key of its own, before and after the rotation."""
    following, run = Identity.create(), tmp_path / "run"
    following.save(tmp_path / "next.key")
    config = config_in(run, next_key=following.node_id)
    async with coordinator(config) as link:
        await join_swarm(link, tmp_path / "node", [], **QUIET)
    shutil.copytree(run, tmp_path / "stolen")
    honest = load_held(run, RUN)
    assert honest is not None
    stolen = Identity.load(tmp_path / "stolen" / "identity.key")
    changes = {"serial": 2**53, "next_key": "ab" * 32, "entry": EntryConfig()}
    thief = sign_manifest(honest.manifest.model_copy(update=changes), stolen)
    for_the_thief = config.model_copy(update={"dir": tmp_path / "stolen"})
    async with coordinator(for_the_thief, thief) as link:
        node = Joined(tmp_path / "node", link)
        with pytest.raises(Unauthenticated, match="another next key"):
            await node.refresh.refresh()
        assert node.members == {MEMBER.node_id}

        write_toml(config.model_dump(mode="json"), tmp_path / "run.toml")
        arguments = ["rotate", str(tmp_path / "next.key"), "-c", str(tmp_path / "run.toml")]
        found = CliRunner().invoke(coordinator_app, arguments)
        assert found.exit_code == 0 and following.node_id in found.stdout, found.output
        async with coordinator(config_in(run, NEWCOMER)) as new_link:
            addresses = ",".join((JoinLink.parse(link).addresses[0], JoinLink.parse(new_link).addresses[0]))
            node = Joined(tmp_path / "node", new_link)
            node.refresh._config = node.config.model_copy(  # pyright: ignore[reportPrivateUsage]
                update={"coordinator": node.config.coordinator.model_copy(update={"address": addresses})}
            )
            assert await node.refresh.refresh()  # though the thief answers at the first address
            assert node.changes[-1].key == following.node_id
            assert (
                held_manifest.with_held(node.config, load_held(tmp_path / "node", RUN)).coordinator.fingerprint
                == following.node_id
            )
            assert node.members == {MEMBER.node_id, NEWCOMER.node_id}
            await join_swarm(new_link, tmp_path / "node", [], **QUIET)  # the new link is of the node that is there
        with pytest.raises(Unauthenticated):
            await Joined(tmp_path / "node", link).refresh.refresh()  # the thief alone
    assert node.members == {MEMBER.node_id, NEWCOMER.node_id}


async def test_a_manifest_that_expired_is_refused(tmp_path: Path) -> None:
    async with coordinator(config_in(tmp_path / "run", manifest_days=1.0)) as link:
        await join_swarm(link, tmp_path / "node", [], **QUIET)
    newer = config_in(tmp_path / "run", NEWCOMER, manifest_days=1.0)
    async with coordinator(newer) as link:
        node = Joined(tmp_path / "node", link, ManualClock(SystemClock().now_s() + 2 * DAY_S))
        with pytest.raises(ConfigError, match="days ago"):
            await node.refresh.refresh()


def test_a_manifest_is_signed_anew_when_half_its_time_is_over(tmp_path: Path) -> None:
    identity, config = Identity.create(), config_in(tmp_path, manifest_days=10.0)

    manifest = manifest_of(config.node, RUN, "", 1.0)
    signed = [sign_next(config, identity, manifest, 1e9 + day * DAY_S) for day in (0, 4, 6)]
    serials = [one.manifest.serial for one in signed]
    assert serials[0] == serials[1] < serials[2]
    assert [one.manifest.expires_at_s for one in signed] == [1e9 + day * DAY_S for day in (10, 10, 16)]
    back = sign_next(config.model_copy(update={"manifest_days": 5.0}), identity, manifest, 1e9)  # the clock went back
    assert back.manifest.serial >= serials[2]


def test_a_key_names_its_successor_once(tmp_path: Path) -> None:

    identity, first, other = (Identity.create() for _ in range(3))
    config = config_in(tmp_path, next_key=first.node_id)
    manifest = manifest_of(config.node, RUN, "", 1.0)
    identity.save(tmp_path / "identity.key")
    sign_next(config, identity, manifest, 1e9)
    for wrong in (other.node_id, "", identity.node_id):
        with pytest.raises(ConfigError, match="next_key"):
            sign_next(config.model_copy(update={"next_key": wrong}), identity, manifest, 1e9)
    other.save(tmp_path / "other.key")
    with pytest.raises(ConfigError, match="was not named"):
        rotate_key(config, tmp_path / "other.key")
    first.save(tmp_path / "first.key")
    running = lock_directory(tmp_path)
    with pytest.raises(ConfigError, match="a process runs there"):  # it would sign with the old key again
        rotate_key(config, tmp_path / "first.key")
    os.close(running)
    assert rotate_key(config, tmp_path / "first.key").node_id == first.node_id
    assert Identity.load(tmp_path / "identity.key").node_id == first.node_id
    assert sign_next(config_in(tmp_path), first, manifest, 1e9).manifest.serial == 10**9 + 1


def test_two_manifests_of_one_serial_are_never_both_taken(tmp_path: Path) -> None:

    identity = Identity.create()
    manifest = manifest_of(config_in(tmp_path).node, RUN, "", 1.0).model_copy(update={"serial": 7})
    held = sign_manifest(manifest, identity)
    check_succession(held, held)
    with pytest.raises(Unauthenticated, match="signs for two"):
        check_succession(held, sign_manifest(manifest.model_copy(update={"trainer": "ab" * 32}), identity))
    with pytest.raises(Unauthenticated, match="named nobody"):
        check_succession(held, sign_manifest(manifest.model_copy(update={"serial": 8}), Identity.create()))
    uncounted = replace(held, manifest=manifest.model_copy(update={"serial": 0}))  # of a release that did not count
    check_succession(uncounted, sign_manifest(manifest.model_copy(update={"serial": 0, "created_at_s": 2}), identity))


async def test_a_full_disk_leaves_the_manifest_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the loop that refreshes it sees an error that it counts with."""
    async with coordinator(config_in(tmp_path / "run")) as link:
        await join_swarm(link, tmp_path / "node", [], **QUIET)

    def full(path: Path, data: object, **_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with coordinator(config_in(tmp_path / "run", NEWCOMER)) as link:
        node = Joined(tmp_path / "node", link)
        monkeypatch.setattr(held_manifest, "write_json", full)
        with pytest.raises(StorageFull, match="No space left on device; make room"):
            await node.refresh.refresh()
    assert node.members == {MEMBER.node_id} and not node.changes


def test_a_manifest_of_a_release_that_counted_no_serials_opens_and_admits_everybody(tmp_path: Path) -> None:
    identity = Identity.create()
    data = manifest_of(config_in(tmp_path).node, RUN, "", 1.0).model_dump(mode="json")
    for later in ("serial", "expires_at_s", "next_key", "entry", "anchors"):
        del data[later]
    text = json.dumps(data).encode()
    signature = identity.sign(DOMAIN_MANIFEST, text)
    manifest = open_manifest(text, identity.public_key, signature, identity.node_id, RUN).manifest
    assert (manifest.serial, manifest.expires_at_s, manifest.next_key, manifest.entry.kind) == (0, 0.0, "", "open")


@pytest.mark.parametrize(
    "text", ["", "{}", "[" * 100_000, '{"manifest": 1, "public_key": "zz", "signature": ""}'], ids=range(4)
)
def test_a_damaged_manifest_stops_with_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / HELD).write_text(text)
    with pytest.raises(ConfigError, match=f"{HELD}: damaged"):
        load_held(tmp_path, RUN)


# --- a start after a while -------------------------------------------------------------------------


async def test_a_node_that_was_listed_meanwhile_starts_though_it_holds_the_list_of_before(tmp_path: Path) -> None:
    """It was told to ask the operator to list it; the operator did, and the same command must work now."""
    newcomer = load_or_create_identity(tmp_path / "node" / "identity.key")
    async with coordinator(config_in(tmp_path / "run")) as link:
        await join_swarm(link, tmp_path / "node", [], **QUIET)
    config = load_config(NodeConfig, tmp_path / "node" / "node.toml")
    with pytest.raises(ConfigError, match="ask its operator to list"):  # nobody answers: what is held counts
        await Daemon(config).__aenter__()
    async with coordinator(config_in(tmp_path / "run", newcomer)), Daemon(config) as node:
        assert node.entry.is_member(newcomer.node_id)


async def test_a_node_that_was_off_past_the_end_of_its_manifest_starts_with_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = load_or_create_identity(tmp_path / "node" / "identity.key")
    config_of_run = config_in(tmp_path / "run", member, manifest_days=1.0)
    async with coordinator(config_of_run) as link:
        await join_swarm(link, tmp_path / "node", [], **QUIET)
    config = load_config(NodeConfig, tmp_path / "node" / "node.toml")
    later = ManualClock(SystemClock().now_s() + 2 * DAY_S)
    monkeypatch.setattr("coordinator.daemon.SystemClock", lambda: later)
    monkeypatch.setattr("node.daemon.SystemClock", lambda: later)
    with pytest.raises(ConfigError, match="days ago"):
        await Daemon(config).__aenter__()
    async with coordinator(config_of_run), Daemon(config) as node:
        assert node.entry.is_member(member.node_id)


async def test_a_node_of_before_manifests_were_kept_follows_them_once_it_joins_again(tmp_path: Path) -> None:
    member = load_or_create_identity(tmp_path / "node" / "identity.key")
    async with coordinator(config_in(tmp_path / "run", member)) as link:
        await join_swarm(link, tmp_path / "node", [], **QUIET)
    (tmp_path / "node" / HELD).unlink()
    said: list[str] = []
    await join_swarm(link, tmp_path / "node", [], start=False, say=said.append)
    assert "not followed yet" in said[-1] and load_held(tmp_path / "node", RUN) is None
    async with coordinator(config_in(tmp_path / "run", member, NEWCOMER)) as link:
        await join_swarm(link, tmp_path / "node", [], start=False, say=said.append)
        assert NEWCOMER.node_id in Joined(tmp_path / "node", link).members and HELD in said[-1]


async def test_who_was_invited_is_known_before_the_groups_that_wait_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else, after a restart, waiting groups of invited nodes would be a newcomer's."""
    guest, directory = Identity.create(), tmp_path / "node"
    given = seal_invitation(MEMBER, RUN, guest.node_id, SystemClock().now_s() + DAY_S)
    member = load_or_create_identity(directory / "identity.key").node_id
    changes: dict[str, Any] = {
        "dir": directory,
        "run_id": RUN,
        "directory": DirectoryConfig(kind="none"),
        "entry": EntryConfig(kind="invited", members=(MEMBER.node_id, member)),
    }
    credential = Credential(invitation=given).to_bytes().hex()
    known: dict[str, object] = {
        "node_id": guest.node_id,
        "endpoint": "127.0.0.1:7",
        "since_s": 5.0,
        "credential": credential,
    }
    save_known_peers(directory / KNOWN_PEERS, [known])
    is_known: list[bool] = []

    async def restore(agent: Agent) -> None:
        is_known.append(agent.parties.is_established(guest.node_id))

    monkeypatch.setattr(Agent, "restore", restore)
    async with Daemon(config_in(tmp_path / "run").node.model_copy(update=changes)):
        assert is_known == [True]


async def test_a_run_that_lists_members_now_is_private_no_more(tmp_path: Path) -> None:
    """Its nodes count strangers as newcomers from then on, without a restart."""
    load_or_create_identity(tmp_path / "node" / "identity.key")
    run = config_in(tmp_path / "run")
    before, after = (
        run.node.model_copy(update={"entry": entry})
        for entry in (EntryConfig(), EntryConfig(members=(MEMBER.node_id,)))
    )
    async with coordinator(run.model_copy(update={"node": before})) as link:
        await join_swarm(link, tmp_path / "node", [], **QUIET)
    async with Daemon(load_config(NodeConfig, tmp_path / "node" / "node.toml")) as node:
        assert node.agent.parties.is_established(NEWCOMER.node_id)
        async with coordinator(run.model_copy(update={"node": after})):
            assert node._refresh is not None  # pyright: ignore[reportPrivateUsage]
            assert await node._refresh.refresh()  # pyright: ignore[reportPrivateUsage]
        assert not node.agent.parties.is_established(NEWCOMER.node_id)
        assert node.agent.parties.is_established(MEMBER.node_id)
