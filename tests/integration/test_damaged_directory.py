"""A node's directory, damaged in every way that a disk has: the node goes on, or ends with a sentence that says how."""

import asyncio
import errno
import os
import shutil
import sqlite3
import stat
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from waits import until

from node.daemon import Daemon, write_config
from swarm.config import (
    DirectoryConfig,
    EnvironmentConfig,
    EvaluationConfig,
    LearnerConfig,
    ModelConfig,
    NodeConfig,
    TelemetryConfig,
    load_config,
)
from swarm.errors import ConfigError
from swarm.events import DiskFull, StepMade, StoreDamaged, events_of
from swarm.learn import checkpoint as checkpoints
from swarm.peers.address_book import KNOWN_PEERS
from swarm.peers.reputation import REPUTATION
from swarm.telemetry import read_events

pytestmark = pytest.mark.asyncio(loop_scope="session")

FIRST, MORE = 6, 4  # steps of the fixture, and steps to go on with


def config_of(directory: Path) -> NodeConfig:
    return NodeConfig(
        dir=directory,
        run_id="disk",
        worker="inline",
        environments=(EnvironmentConfig(name="reverse", kind="char", dataset="reverse"),),
        model=ModelConfig(source="tiny", dtype="float32"),
        directory=DirectoryConfig(kind="none"),
        evaluation=EvaluationConfig(num_problems=2, every_steps=0),
        learner=LearnerConfig(num_steps=FIRST, at_end="serve", checkpoint_every=2),
        telemetry=TelemetryConfig(),
    )


@asynccontextmanager
async def running(config: NodeConfig) -> AsyncGenerator[tuple[Daemon, asyncio.Task[None]]]:
    """A node until the end of the block, which stops it as SIGTERM does."""
    async with Daemon(config) as daemon:
        task = asyncio.create_task(daemon.run())
        try:
            yield daemon, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a node that made some steps, and then died as kill -9 leaves it: its log is not written back."""
    directory = tmp_path_factory.mktemp("healthy") / "node"
    config = config_of(directory)
    async with running(config) as (daemon, task):
        await until(lambda: daemon.status()["is_finished"], beside=task)
        write_config(config, directory / "node.toml")
        (directory / "peers.json").write_text("[]")
        dead = directory.with_name("dead")
        await asyncio.to_thread(shutil.copytree, directory, dead)
    return dead


def flip(path: Path, at: float) -> None:
    """64 bytes at a share of the file."""
    data = bytearray(path.read_bytes())
    start = int(at * len(data))
    data[start : start + 64] = bytes(byte ^ 0xFF for byte in data[start : start + 64])
    path.write_bytes(data)


def checkpoint(directory: Path, newest: bool = True) -> Path:
    return sorted((directory / "checkpoints").iterdir())[-1 if newest else 0]


def flip_moments(path: Path) -> None:
    """A byte of the optimizer's state, and nothing else."""
    file = path / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = data[8:start].decode()
    name = header.index('"exp_avg_sq.')
    offset = int(header[header.index('"data_offsets":[', name) + 16 :].partition(",")[0])
    data[start + offset + 1] ^= 0x10
    file.write_bytes(data)


def write_back(directory: Path) -> None:
    """The log into the file, so that damage of the file is damage."""
    with sqlite3.connect(directory / "groups.sqlite") as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()


def rubbish_in_the_middle(directory: Path) -> None:
    write_back(directory)
    path = directory / "groups.sqlite"
    data = bytearray(path.read_bytes())
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 4 * 4096] = os.urandom(4 * 4096)
    path.write_bytes(data)


def cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])


def cut_configuration(directory: Path) -> None:
    """In the middle of a line; what is cut at the end of one is a shorter configuration."""
    path = directory / "node.toml"
    text = path.read_text()
    path.write_text(text[: text.rindex("=", 0, len(text) // 2)])


def cut_database(directory: Path) -> None:
    write_back(directory)
    cut(directory / "groups.sqlite", 0.5)


def overwrite_header(directory: Path) -> None:
    write_back(directory)
    path = directory / "groups.sqlite"
    path.write_bytes(b"\x55" * 100 + path.read_bytes()[100:])


def forget_key(directory: Path) -> None:
    (directory / "identity.key").unlink()


def nothing(directory: Path) -> None:
    """The disk fills up while the node runs."""


Damage = Callable[[Path], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    damage: Damage
    outcome: int | str  # from which step the node goes on; or a part of the sentence with which it ends
    logged: str = ""


def damaged_store(damage: Damage) -> Case:
    """The store is moved aside, and the node goes on from its checkpoint."""
    logged = "the group store is damaged and was moved aside"
    return Case(damage=damage, outcome=6, logged=logged)


CASES = {
    "checkpoint flipped": Case(
        damage=lambda d: flip(checkpoint(d) / "tensors.safetensors", 0.9),
        outcome=4,
        logged="a checkpoint is damaged",
    ),
    "optimizer state flipped": Case(damage=lambda d: flip_moments(checkpoint(d)), outcome=4, logged="exp_avg_sq"),
    "checkpoint truncated": Case(
        damage=lambda d: cut(checkpoint(d) / "tensors.safetensors", 0.5),
        outcome=4,
        logged="a checkpoint is damaged",
    ),
    "checkpoints deleted": Case(
        damage=lambda d: shutil.rmtree(d / "checkpoints"),
        outcome=r"checkpoints: gone, .* put it back, or move groups.sqlite away too",
    ),
    "all checkpoints flipped": Case(
        damage=lambda d: [flip(checkpoint(d, newest) / "tensors.safetensors", 0.5) for newest in (True, False)],
        outcome=r"checkpoints: no readable checkpoint .* put a copy of one back there",
        logged="a checkpoint is damaged",
    ),
    "groups.sqlite: rubbish pages": damaged_store(rubbish_in_the_middle),
    "groups.sqlite truncated": damaged_store(cut_database),
    "groups.sqlite: header overwritten": damaged_store(overwrite_header),
    "groups.sqlite deleted": Case(
        damage=lambda d: [path.unlink() for path in d.glob("groups.sqlite*")],
        outcome=6,
        logged="going on from the checkpoint alone",
    ),
    "WAL cut": Case(damage=lambda d: cut(d / "groups.sqlite-wal", 0.4), outcome=6),
    "key empty": Case(
        damage=lambda d: (d / "identity.key").write_bytes(b""),
        outcome=r"identity\.key: not a usable key .*expected",
    ),
    "key deleted": Case(
        damage=forget_key,
        outcome=r"checkpoint of policy \w+, not \w+",
    ),
    "node.toml cut": Case(damage=cut_configuration, outcome=r"node\.toml: not valid TOML"),
    "peers and status rubbish": Case(
        damage=lambda d: [
            (d / name).write_bytes(b"\x00{]") for name in ("peers.json", "status.json", KNOWN_PEERS, REPUTATION)
        ],
        outcome=6,
    ),
    "disk full at a checkpoint": Case(
        damage=nothing,
        outcome=6,
        logged="a checkpoint was not saved: make room on the disk",
    ),
}


async def start_again(directory: Path) -> list[int]:
    """The steps that a node makes from now on, until it has made all."""
    sets = [f"dir={directory}", f"learner.num_steps={FIRST + MORE}"]
    num_before = len(read_events(directory / "events.jsonl"))
    config = await asyncio.to_thread(load_config, NodeConfig, directory / "node.toml", sets)
    async with running(config) as (daemon, task):
        await until(lambda: daemon.status()["is_finished"], beside=task)
    events = read_events(directory / "events.jsonl")[num_before:]
    assert all(event.grad_norm == event.grad_norm for event in events_of(StepMade, events)), "learned from NaN"
    return [event.step for event in events_of(StepMade, events) if not event.was_skipped]


def fill_the_disk(patch: pytest.MonkeyPatch, num_full: int = 2) -> None:
    """The next saves find no room."""
    save = checkpoints.save_file

    def save_file(*arguments: object) -> None:
        nonlocal num_full
        if num_full:
            num_full -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*arguments)  # pyright: ignore[reportArgumentType]

    patch.setattr(checkpoints, "save_file", save_file)
    patch.setattr("swarm.loops.learn_loop.SAVE_RETRY_S", 0.1)


# It goes on where it was, and neither before nor after.
STEPS_FROM = {first: list(range(first + 1, FIRST + MORE + 1)) for first in (4, 6)}


@pytest.mark.parametrize("name", CASES)
async def test_it_goes_on_or_ends_with_a_sentence(
    healthy: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, directory = CASES[name], tmp_path / "node"
    await asyncio.to_thread(shutil.copytree, healthy, directory)
    await asyncio.to_thread(case.damage, directory)
    if name == "disk full at a checkpoint":
        fill_the_disk(monkeypatch)
    num_before = len(read_events(directory / "events.jsonl"))
    if isinstance(case.outcome, str):
        with pytest.raises(ConfigError, match=case.outcome):
            await start_again(directory)
        assert case.logged in caplog.text
        return
    assert await start_again(directory) == STEPS_FROM[case.outcome]
    assert case.logged in caplog.text + "".join(str(vars(record)) for record in caplog.records)
    events = read_events(directory / "events.jsonl")[num_before:]
    assert checkpoints.read_checkpoint(directory / "checkpoints").step == FIRST + MORE
    if "moved aside" in case.logged:
        (event,) = events_of(StoreDamaged, events)
        assert (directory / event.moved_to).exists()
    if "disk full" in name:
        assert events_of(DiskFull, events)


async def test_a_node_that_is_stopped_in_order_makes_no_step_again(tmp_path: Path) -> None:
    config = config_of(tmp_path / "node")
    learner = config.learner.model_copy(update={"num_steps": 0, "checkpoint_every": 1000})
    config = config.model_copy(update={"learner": learner})
    for least in (3, 6):
        async with running(config) as (daemon, task):
            await until(lambda least=least, daemon=daemon: daemon.status()["step"] >= least, beside=task)
        events = read_events(config.dir / "events.jsonl")
        made = [event.step for event in events_of(StepMade, events) if not event.was_skipped]
        assert made == list(range(1, len(made) + 1)), "each step once"
        assert checkpoints.read_checkpoint(config.dir / "checkpoints").step == made[-1]


async def test_no_other_user_of_the_machine_reads_what_a_node_keeps(tmp_path: Path) -> None:
    config = config_of(tmp_path / "node")
    config.dir.mkdir(mode=0o755)
    async with Daemon(config):
        assert stat.S_IMODE(config.dir.stat().st_mode) == 0o700


async def test_a_second_node_does_not_start_in_the_directory_of_another(tmp_path: Path) -> None:
    config = config_of(tmp_path / "node")
    async with Daemon(config):
        with pytest.raises(ConfigError, match="a process runs there already"):
            async with Daemon(config):
                pass
