"""A checkpoint is complete or absent, and none is lost while another is written."""

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.errors import ConfigError, NonFiniteStep
from swarm.learn import checkpoint as module
from swarm.learn.checkpoint import Checkpoint, checkpoint_steps, read_checkpoint, write_checkpoint

RMTREE = shutil.rmtree


@pytest.fixture(autouse=True)
def not_really(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of checkpoints; a disk that syncs each of them takes its time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # pyright: ignore[reportUnknownLambdaType]


def saved(step: int, next_draw: int) -> Checkpoint:
    return Checkpoint(step=step, tensors={"weight": torch.full((3,), float(next_draw))}, state={"next_draw": next_draw})


def number_of(root: Path) -> float:
    """The number that the newest readable checkpoint has, in tensors and state alike."""
    found = read_checkpoint(root)
    assert found.tensors["weight"].tolist() == [found.state["next_draw"]] * 3
    return found.state["next_draw"]


class Crash(Exception):
    """The process ended there."""


class Crashing:
    """Counts what is done to the disk, and ends the process in the middle of operation `at`."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def wrap(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def crashing(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                if work is RMTREE:  # half of it is gone
                    (args[0] / "tensors.safetensors").unlink(missing_ok=True)
                raise Crash
            return work(*args, **kwargs)

        return crashing


def write_until(at: int, root: Path, what: Checkpoint) -> bool:
    """True if the checkpoint was written before the crash in operation `at`."""
    crashing = Crashing(at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "save_file", crashing.wrap(module.save_file))
        patch.setattr(os, "fsync", crashing.wrap(os.fsync))
        patch.setattr(shutil, "rmtree", crashing.wrap(shutil.rmtree))
        for name in ("mkdir", "rename", "write_text"):
            patch.setattr(Path, name, crashing.wrap(getattr(Path, name)))
        try:
            write_checkpoint(root, what)
        except Crash:
            return False
        return True


@pytest.mark.parametrize("step", [6, 5], ids=["next step", "same step"])
def test_a_crash_at_any_point_of_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, step: int) -> None:
    """Old: steps 4 and 5. New: `step`, twice where the first one ended with a crash."""
    for at in range(1, 100):
        root = tmp_path / str(at)
        write_checkpoint(root, saved(4, 40))
        write_checkpoint(root, saved(5, 50))
        is_written = write_until(at, root, saved(step, 60))
        assert number_of(root) in ({60} if is_written else {50, 60}), at
        for path in root.glob("checkpoint-*"):
            assert {each.name for each in path.iterdir()} == {"tensors.safetensors", "state.json"}, at
        write_checkpoint(root, saved(step, 70))
        assert number_of(root) == 70, at
        assert len(list(root.iterdir())) == 2, "the newest two, and nothing that the crash left"
        if is_written:
            assert at > 10
            return
    raise AssertionError("it never came to an end")


def test_two_crashes_while_the_same_step_is_saved_again_leave_one_of_the_three(tmp_path: Path) -> None:
    for first in range(1, 16):
        for second in range(1, 16):
            root = tmp_path / f"{first}-{second}"
            write_checkpoint(root, saved(5, 50))
            write_until(first, root, saved(5, 60))
            write_until(second, root, saved(5, 70))
            assert number_of(root) in {50, 60, 70}, (first, second)


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    rename = Path.rename

    def syncing(path: Path) -> None:
        seen.append(f"sync {path.name}")

    def renaming(path: Path, target: Path) -> Path:
        seen.append(f"rename to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(module, "sync_path", syncing)
    monkeypatch.setattr(Path, "rename", renaming)
    write_checkpoint(tmp_path / "checkpoints", saved(1, 1))
    assert seen == [
        "sync tensors.safetensors",
        "sync state.json",
        "sync .checkpoint-00000001.part",
        "rename to checkpoint-00000001",
        "sync checkpoints",
    ]


# --- damage --------------------------------------------------------------------------------------


def moments(step: int) -> Checkpoint:
    """A checkpoint with weights and the optimizer's state, as a learner writes it."""
    tensors = {f"{kind}.layer": torch.full((64,), float(step)) for kind in ("master", "exp_avg", "exp_avg_sq")} | {
        "step.layer": torch.tensor(float(step))
    }
    return Checkpoint(step=step, tensors=tensors, state={"next_draw": step + 1, "memory": {"mean": 0.5}})


def flip(path: Path, offset: int) -> None:
    """One bit of a byte, counted from the end where it is negative."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def damage(name: str, folder: Path) -> None:
    tensors, state = folder / "tensors.safetensors", folder / "state.json"
    match name:
        case "tensor":
            flip(tensors, -3)
        case "dtype in the header":
            tensors.write_bytes(tensors.read_bytes().replace(b'"F32"', b'"I32"', 1))
        case "name in the header":
            tensors.write_bytes(tensors.read_bytes().replace(b"exp_avg.layer", b"exp_awg.layer"))
        case "tensors cut":
            tensors.write_bytes(tensors.read_bytes()[:-100])
        case "tensors empty":
            tensors.write_bytes(b"")
        case "tensors gone":
            tensors.unlink()
        case "number in the state":
            state.write_text(state.read_text().replace('"next_draw": 3', '"next_draw": 7'))
        case "memory in the state":
            state.write_text(state.read_text().replace("0.5", "0.7"))
        case "checksum in the state":
            state.write_text(state.read_text().replace('"checksum"', '"checksun"'))
        case "state cut":
            state.write_bytes(state.read_bytes()[:40])
        case "state of another kind":
            state.write_text("[1, 2]")
        case _:
            raise AssertionError(name)


DAMAGES = [
    "tensor",
    "dtype in the header",
    "name in the header",
    "tensors cut",
    "tensors empty",
    "tensors gone",
    "number in the state",
    "memory in the state",
    "checksum in the state",
    "state cut",
    "state of another kind",
]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_never_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    write_checkpoint(tmp_path, moments(1))
    damage(name, write_checkpoint(tmp_path, moments(2)))
    with caplog.at_level(logging.WARNING):
        assert read_checkpoint(tmp_path).step == 1
    (record,) = caplog.records
    assert "the one before it is taken" in record.message
    assert vars(record)["checkpoint"] == str(tmp_path / "checkpoint-00000002")
    shutil.rmtree(tmp_path / "checkpoint-00000001")
    with pytest.raises(ConfigError, match=r"checkpoint-00000002.*put a copy of one back there"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["master", "exp_avg", "exp_avg_sq", "step"])
def test_every_tensor_has_a_digest(tmp_path: Path, kind: str) -> None:
    write_checkpoint(tmp_path, moments(1))
    path = write_checkpoint(tmp_path, moments(2)) / "tensors.safetensors"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8:start])[f"{kind}.layer"]["data_offsets"]
    for offset in {begin, end - 1}:
        flip(path, start + offset)
        assert read_checkpoint(tmp_path).step == 1
        flip(path, start + offset)
    assert read_checkpoint(tmp_path).step == 2


def test_a_checkpoint_without_digests_is_of_an_older_release(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, moments(1)) / "state.json"
    state = json.loads(path.read_text())
    del state["tensors"], state["checksum"]
    path.write_text(json.dumps(state))
    assert read_checkpoint(tmp_path).state["next_draw"] == 2


def test_a_save_deletes_what_was_not_gone_on_from(tmp_path: Path) -> None:
    for step in (50, 100):
        write_checkpoint(tmp_path, moments(step))
    damage("tensors cut", tmp_path / "checkpoint-00000100")
    assert read_checkpoint(tmp_path).step == 50
    write_checkpoint(tmp_path, moments(60))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000050", "checkpoint-00000060"]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("what", ["save_file", "sync_path"])
@pytest.mark.parametrize("step", [2, 1], ids=["next step", "same step"])
def test_what_the_disk_does_not_take_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, error: int, step: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    write_checkpoint(tmp_path, moments(1))
    with monkeypatch.context() as patch:
        patch.setattr(module, what, refuse)
        with pytest.raises(OSError, match=os.strerror(error)):
            write_checkpoint(tmp_path, moments(step))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001"]
    assert read_checkpoint(tmp_path).step == 1
    write_checkpoint(tmp_path, moments(step))
    assert read_checkpoint(tmp_path).step == step


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_neither_saved_nor_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """Red without the defence: digests say only that it is what was written."""
    broken = moments(2)
    broken.tensors["master.layer"][7] = value
    write_checkpoint(tmp_path, moments(1))
    with pytest.raises(NonFiniteStep, match=r"step 2: master\.layer holds numbers that are not finite"):
        write_checkpoint(tmp_path, broken)
    assert checkpoint_steps(tmp_path) == [1]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_first_not_finite", lambda _: "")  # pyright: ignore[reportUnknownLambdaType]
        write_checkpoint(tmp_path, broken)  # as an older release did
        assert read_checkpoint(tmp_path).step == 2
    assert read_checkpoint(tmp_path).step == 1
    shutil.rmtree(tmp_path / "checkpoint-00000001")
    with pytest.raises(ConfigError, match=r"master\.layer holds numbers that are not finite.*put a copy of one back"):
        read_checkpoint(tmp_path)
