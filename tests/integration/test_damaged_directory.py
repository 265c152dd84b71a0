"""A node's directory, damaged in every way that a disk has: the node goes on, or ends with a sentence that says how.

Each damage is done a second time with its defence taken out by a mutation that has a name, and then does its harm.
"""

import asyncio
import errno
import json
import os
import re
import shutil
import sqlite3
import stat
import tomllib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors.torch import load_file
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
from swarm.errors import ConfigError, SwarmError
from swarm.events import DiskFull, StepMade, StoreDamaged, events_of
from swarm.exchange.draw_journal import DrawJournal
from swarm.exchange.group_database import GroupDatabase
from swarm.identity import Identity
from swarm.interfaces import Learner
from swarm.learn import checkpoint as checkpoints
from swarm.loops.worker import Worker
from swarm.peers.address_book import KNOWN_PEERS
from swarm.peers.reputation import REPUTATION
from swarm.telemetry import read_events
from swarm.types import Draw

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
Mutation = Callable[[pytest.MonkeyPatch, Path], None]  # of a node's directory


def without_digests(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """What the files of a checkpoint hold is taken as it is."""

    def read_files(folder: Path) -> checkpoints.Checkpoint:
        state = json.loads((folder / "state.json").read_text())
        tensors = load_file(folder / "tensors.safetensors")
        return checkpoints.Checkpoint(step=state["step"], tensors=tensors, state=state)

    patch.setattr(checkpoints, "_read_files", read_files)


def without_the_one_before(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """The newest checkpoint is the only one."""
    newest = checkpoints.newest_first
    patch.setattr("swarm.learn.learner.read_checkpoint", lambda root: checkpoints._read_files(newest(root)[0]))


def without_the_note_of_checkpoints(patch: pytest.MonkeyPatch, directory: Path) -> None:
    patch.setattr(DrawJournal, "_refuse_to_go_back", lambda *_: None)


def without_quarantine(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Nobody looks at the pages, and no error of SQLite means damage."""
    scalar = GroupDatabase._scalar
    patch.setattr(
        GroupDatabase, "_scalar", lambda self, query, *rest: "ok" if "quick" in query else scalar(self, query, *rest)
    )
    patch.setattr("swarm.exchange.group_file.is_damage", lambda error: False)
    patch.setattr("swarm.exchange.group_store.is_damage", lambda error: False)


def the_journal_must_reach_the_checkpoint(patch: pytest.MonkeyPatch, directory: Path) -> None:
    redraw = DrawJournal.redraw

    async def strict(self: DrawJournal, from_step: int) -> list[Draw]:
        if from_step > self._next:
            raise LookupError(f"draw {from_step}")
        return await redraw(self, from_step)

    patch.setattr(DrawJournal, "redraw", strict)


def without_a_look_at_the_key(patch: pytest.MonkeyPatch, directory: Path) -> None:
    patch.setattr(Identity, "load", lambda path: Identity.from_seed(path.read_bytes()))


def without_the_owner_of_a_checkpoint(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """A checkpoint belongs to whoever finds it."""
    read = checkpoints.read_checkpoint

    def read_as_own(root: Path) -> checkpoints.Checkpoint:
        found = read(root)
        found.state["policy_id"] = Identity.load(directory / "identity.key").node_id
        return found

    patch.setattr("swarm.learn.learner.read_checkpoint", read_as_own)


def without_sentences_of_toml(patch: pytest.MonkeyPatch, directory: Path) -> None:
    patch.setattr(tomllib, "TOMLDecodeError", KeyError)


def files_beside_are_trusted(patch: pytest.MonkeyPatch, directory: Path) -> None:
    patch.setattr("swarm.peers.address_book._read", lambda path: json.loads(path.read_bytes()))


def a_full_disk_is_a_fault(patch: pytest.MonkeyPatch, directory: Path) -> None:
    async def save(worker: Worker, learner: Learner) -> None:
        await worker.offload(learner.save)

    patch.setattr("swarm.loops.learn_loop._save", save)


@dataclass(frozen=True, kw_only=True)
class Case:
    damage: Damage
    mutation: Mutation
    outcome: int | str  # from which step the node goes on; or a part of the sentence with which it ends
    logged: str = ""


def damaged_store(damage: Damage) -> Case:
    """The store is moved aside, and the node goes on from its checkpoint."""
    logged = "the group store is damaged and was moved aside"
    return Case(damage=damage, mutation=without_quarantine, outcome=6, logged=logged)


CASES = {
    "checkpoint flipped": Case(
        damage=lambda d: flip(checkpoint(d) / "tensors.safetensors", 0.9),
        mutation=without_digests,
        outcome=4,
        logged="a checkpoint is damaged",
    ),
    "optimizer state flipped": Case(
        damage=lambda d: flip_moments(checkpoint(d)), mutation=without_digests, outcome=4, logged="exp_avg_sq"
    ),
    "checkpoint truncated": Case(
        damage=lambda d: cut(checkpoint(d) / "tensors.safetensors", 0.5),
        mutation=without_the_one_before,
        outcome=4,
        logged="a checkpoint is damaged",
    ),
    "checkpoints deleted": Case(
        damage=lambda d: shutil.rmtree(d / "checkpoints"),
        mutation=without_the_note_of_checkpoints,
        outcome=r"checkpoints: gone, .* put it back, or move groups.sqlite away too",
    ),
    "all checkpoints flipped": Case(
        damage=lambda d: [flip(checkpoint(d, newest) / "tensors.safetensors", 0.5) for newest in (True, False)],
        mutation=without_digests,
        outcome=r"checkpoints: no readable checkpoint .* put a copy of one back there",
        logged="a checkpoint is damaged",
    ),
    "groups.sqlite: rubbish pages": damaged_store(rubbish_in_the_middle),
    "groups.sqlite truncated": damaged_store(cut_database),
    "groups.sqlite: header overwritten": damaged_store(overwrite_header),
    "groups.sqlite deleted": Case(
        damage=lambda d: [path.unlink() for path in d.glob("groups.sqlite*")],
        mutation=the_journal_must_reach_the_checkpoint,
        outcome=6,
        logged="going on from the checkpoint alone",
    ),
    "WAL cut": Case(
        damage=lambda d: cut(d / "groups.sqlite-wal", 0.4), mutation=the_journal_must_reach_the_checkpoint, outcome=6
    ),
    "key empty": Case(
        damage=lambda d: (d / "identity.key").write_bytes(b""),
        mutation=without_a_look_at_the_key,
        outcome=r"identity\.key: not a usable key .*expected",
    ),
    "key deleted": Case(
        damage=forget_key,
        mutation=without_the_owner_of_a_checkpoint,
        outcome=r"checkpoint of policy \w+, not \w+",
    ),
    "node.toml cut": Case(
        damage=cut_configuration, mutation=without_sentences_of_toml, outcome=r"node\.toml: not valid TOML"
    ),
    "peers and status rubbish": Case(
        damage=lambda d: [
            (d / name).write_bytes(b"\x00{]") for name in ("peers.json", "status.json", KNOWN_PEERS, REPUTATION)
        ],
        mutation=files_beside_are_trusted,
        outcome=6,
    ),
    "disk full at a checkpoint": Case(
        damage=nothing,
        mutation=a_full_disk_is_a_fault,
        outcome=6,
        logged="a checkpoint was not saved: make room on the disk",
    ),
}


async def start_again(directory: Path, is_stuck: Callable[[], bool]) -> list[int]:
    """The steps that a node makes from now on, until it has made all or learns nothing any more."""
    sets = [f"dir={directory}", f"learner.num_steps={FIRST + MORE}"]
    num_before = len(read_events(directory / "events.jsonl"))
    config = await asyncio.to_thread(load_config, NodeConfig, directory / "node.toml", sets)
    async with running(config) as (daemon, task):
        await until(lambda: daemon.status()["is_finished"] or is_stuck(), beside=task)
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


@asynccontextmanager
async def damaged(
    healthy: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[Case, Path]]:
    """A copy of the healthy directory, damaged."""
    case, directory = CASES[name], tmp_path / "node"
    await asyncio.to_thread(shutil.copytree, healthy, directory)
    await asyncio.to_thread(case.damage, directory)
    if name == "disk full at a checkpoint":
        fill_the_disk(monkeypatch)
    yield case, directory


# It goes on where it was, and neither before nor after.
STEPS_FROM = {first: list(range(first + 1, FIRST + MORE + 1)) for first in (4, 6)}


@pytest.mark.parametrize("name", CASES)
async def test_it_goes_on_or_ends_with_a_sentence(
    healthy: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with damaged(healthy, tmp_path, name, monkeypatch) as (case, directory):
        num_before = len(read_events(directory / "events.jsonl"))
        if isinstance(case.outcome, str):
            with pytest.raises(ConfigError, match=case.outcome):
                await start_again(directory, lambda: False)
            assert case.logged in caplog.text
            return
        assert await start_again(directory, lambda: False) == STEPS_FROM[case.outcome]
    assert case.logged in caplog.text + "".join(str(vars(record)) for record in caplog.records)
    events = read_events(directory / "events.jsonl")[num_before:]
    assert checkpoints.read_checkpoint(directory / "checkpoints").step == FIRST + MORE
    if "moved aside" in case.logged:
        (event,) = events_of(StoreDamaged, events)
        assert (directory / event.moved_to).exists()
    if "disk full" in name:
        assert events_of(DiskFull, events)


@pytest.mark.parametrize("name", CASES, ids=[f"{name}: {case.mutation.__name__}" for name, case in CASES.items()])
async def test_mutation_with_its_defence_taken_out_it_does_neither(
    healthy: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with an error that names no fix, or goes on from something else in silence."""
    async with damaged(healthy, tmp_path, name, monkeypatch) as (case, directory):
        case.mutation(monkeypatch, directory)
        made: list[int] | None = None
        sentence = ""
        try:
            made = await start_again(directory, lambda: "step skipped" in caplog.text)
        except ConfigError as error:
            sentence = str(error)
        except Exception as error:  # whatever it is, it names no fix
            assert not isinstance(error, SwarmError), error
    if isinstance(case.outcome, str):
        assert not re.search(case.outcome, sentence)
    else:
        assert made != STEPS_FROM[case.outcome]


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


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation"])
async def test_no_other_user_of_the_machine_reads_what_a_node_keeps(
    is_defended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation is directories_as_they_are: nobody closes them."""
    if not is_defended:
        monkeypatch.setattr("node.daemon.make_private", lambda directory: None)
    config = config_of(tmp_path / "node")
    config.dir.mkdir(mode=0o755)
    async with Daemon(config):
        assert (stat.S_IMODE(config.dir.stat().st_mode) == 0o700) is is_defended


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation"])
async def test_a_second_node_does_not_start_in_the_directory_of_another(
    is_defended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation is without_lock: two nodes write one store and one checkpoint."""
    if not is_defended:
        monkeypatch.setattr("swarm.process.fcntl.flock", lambda *_: None)
    config = config_of(tmp_path / "node")
    async with Daemon(config):
        with pytest.raises(ConfigError, match="a process runs there already") if is_defended else nullcontext():
            async with Daemon(config):
                assert not is_defended
