"""The commands of entry: a member invites by id, the invited one joins with the text, each refusal names the fix."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app as coordinator_app
from coordinator.daemon import CoordinatorDaemon
from node.cli import app as node_app
from node.credential import INVITATION, OwnCredential
from node.join import _describe_entry, join_swarm  # pyright: ignore[reportPrivateUsage]
from swarm.clock import SystemClock
from swarm.config import (
    CoordinatorConfig,
    CoordinatorLink,
    DirectoryConfig,
    EntryConfig,
    EnvironmentConfig,
    ModelConfig,
    NodeConfig,
)
from swarm.config import load_config as load
from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.peers.entry import EntryRule
from swarm.wire.credentials import invite
from swarm.wire.run_manifest import write_toml

RUN = "commands"
QUIET: Any = {"start": False, "say": lambda text: None}


def run(app: Any, *arguments: object) -> str:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "1000"})
    assert found.exit_code == 0, found.output
    return found.stdout.strip()


def fails(app: Any, *arguments: object) -> str:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "1000"})
    assert found.exit_code == 2, found.output
    return found.stderr.strip()


def config_in(directory: Path, entry: EntryConfig) -> CoordinatorConfig:
    node = NodeConfig(
        environments=(EnvironmentConfig(name="echo", kind="char", dataset="reverse"),),
        model=ModelConfig(source="tiny"),
        entry=entry,
    )
    return CoordinatorConfig(dir=directory, run_id=RUN, directory=DirectoryConfig(kind="none"), node=node)


def credential_of(config: NodeConfig, daemon: CoordinatorDaemon) -> OwnCredential:
    rule = EntryRule(config.entry, config.run_id, SystemClock(), daemon.info["fingerprint"])
    return OwnCredential(config, Identity.load(config.dir / "identity.key").node_id, rule, SystemClock())


@pytest.mark.parametrize("voucher", ["member", "coordinator"])
async def test_a_node_that_was_invited_by_command_may_enter(tmp_path: Path, voucher: str) -> None:
    ada, bob = tmp_path / "ada", tmp_path / "bob"
    member, newcomer = run(node_app, "id", "--dir", ada), run(node_app, "id", "--dir", bob)
    assert run(node_app, "id", "--dir", ada) == member
    config = config_in(tmp_path / "run", EntryConfig(kind="invited", members=(member,)))
    async with CoordinatorDaemon(config) as daemon:
        said: list[str] = []
        await join_swarm(daemon.link, ada, [], start=False, say=said.append)
        assert "this node is a member of the run" in said
        await join_swarm(daemon.link, bob, [], start=False, say=said.append)
        assert f"ask a member for: swarm-node invite {newcomer}" in said[-2]
        joined = load(NodeConfig, bob / "node.toml")
        assert joined.niceness == 10, "whoever works at the machine goes first"
        with pytest.raises(ConfigError, match=f"swarm-node invite {newcomer}, then join with --invitation"):
            await credential_of(joined, daemon).prepare()
        if voucher == "member":
            text = run(node_app, "invite", newcomer, "--config", ada / "node.toml", "--days", 2)
        else:
            path = tmp_path / "coordinator.toml"
            write_toml(config.model_dump(mode="json"), path)
            text = run(coordinator_app, "invite", newcomer, "--config", path)
        await join_swarm(daemon.link, bob, [], invitation=text, **QUIET)
        own = credential_of(joined, daemon)
        await own.prepare()
        daemon.entry.require(newcomer, own.shown())
        assert daemon.entry.is_member(newcomer) is (voucher == "coordinator")


async def test_an_invitation_of_another_node_is_refused_when_it_is_given(tmp_path: Path) -> None:
    ada, bob = tmp_path / "ada", tmp_path / "bob"
    member = run(node_app, "id", "--dir", ada)
    config = config_in(tmp_path / "run", EntryConfig(kind="invited", members=(member,)))
    async with CoordinatorDaemon(config) as daemon:
        await join_swarm(daemon.link, ada, [], **QUIET)
        text = run(node_app, "invite", "ab" * 32, "--config", ada / "node.toml")
        for wrong in (text, text[:-9], "hello"):
            with pytest.raises(ConfigError, match="invitation"):
                await join_swarm(daemon.link, bob, [], invitation=wrong, **QUIET)
        assert not (bob / INVITATION).exists() and not (bob / "node.toml").exists()


def test_only_members_invite_and_only_node_ids_are_invited(tmp_path: Path) -> None:
    own = run(node_app, "id", "--dir", tmp_path)
    path = tmp_path / "node.toml"
    path.write_text(f'dir = "{tmp_path}"\n')
    assert f"does not list this node, {own}" in fails(node_app, "invite", "ab" * 32, "--config", path)
    path.write_text(f'dir = "{tmp_path}"\n[entry]\nkind = "invited"\nmembers = ["{own}"]\n')
    assert "is no node id" in fails(node_app, "invite", "ada", "--config", path)
    assert run(node_app, "invite", "AB" * 32, "--config", path).startswith("invitation:")


@pytest.mark.parametrize("entry", [{"kind": "members"}, {"members": ["xyz"]}, {"kind": "closed"}, {"work_bits": 0}])
def test_an_entry_that_admits_nobody_or_names_no_key_is_refused(entry: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    write_toml({"entry": entry}, path)
    with pytest.raises(ConfigError, match=r"entry"):
        load(NodeConfig, path)


@pytest.mark.parametrize(
    ("entry", "address", "invited", "said"),
    [
        (EntryConfig(), "10.0.0.1:7800", False, "this run admits every node"),
        (EntryConfig(), "8.8.8.8:7800", False, "an eighth of each step; to count in full ask for an invitation"),
        (EntryConfig(), "8.8.8.8:7800", True, "this run admits every node; this one shows its invitation"),
        (EntryConfig(established="everybody"), "8.8.8.8:7800", False, "this run admits every node"),
        (EntryConfig(members=("ab" * 32,)), "8.8.8.8:7800", False, "this node is a member of the run"),
    ],
)
def test_who_joins_a_public_run_learns_how_far_its_groups_count(
    entry: EntryConfig, address: str, invited: bool, said: str, tmp_path: Path
) -> None:
    link = CoordinatorLink(address=address, fingerprint="cd" * 32)
    if invited:
        given = invite(Identity.create(), RUN, "ab" * 32, 1.0, SystemClock().now_s())
        (tmp_path / INVITATION).write_text(given)
    text = _describe_entry(NodeConfig(dir=tmp_path, run_id=RUN, entry=entry, coordinator=link), "ab" * 32)
    assert text == said if "eighth" not in said else said in text and "swarm-node invite" in text


@pytest.mark.parametrize(
    ("own", "entry", "is_warned"),
    [
        ("8.8.8.8", EntryConfig(), True),
        ("10.0.0.1", EntryConfig(), False),
        ("8.8.8.8", EntryConfig(members=("ab" * 32,)), False),
        ("8.8.8.8", EntryConfig(established="everybody"), False),
    ],
)
async def test_a_public_run_without_members_is_warned_of(
    own: str,
    entry: EntryConfig,
    is_warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("swarm.addresses.own_address", lambda: own)
    config = config_in(tmp_path, entry).model_copy(update={"listen": "0.0.0.0:0"})
    async with CoordinatorDaemon(config):
        assert ("nobody's groups count in full" in caplog.text) is is_warned
