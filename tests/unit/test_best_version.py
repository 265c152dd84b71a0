"""The best version of a training: which one is kept, over restarts and full disks, and how it is taken out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.errors import ConfigError
from swarm.learn.best_version import BEST, BestVersion
from swarm.learn.checkpoint import checkpoint_steps
from swarm.model.network import tiny_network
from swarm.model.version_digest import snapshot, weights_digest
from swarm.testing.trained_node import make_trained_node
from swarm.trained.model import load_trained
from swarm.types import PolicyVersion


def version(step: int, tensors: dict[str, torch.Tensor]) -> PolicyVersion:
    return PolicyVersion(policy_id="a" * 64, step=step, digest=weights_digest(tensors))


def test_the_first_of_the_best_is_kept_over_restarts(tmp_path: Path) -> None:
    tensors = snapshot(tiny_network())
    root = tmp_path / BEST
    for step, accuracy in ((0, 0.3), (20, 0.5), (40, 0.5), (60, 0.4)):
        assert BestVersion(root).offer(version(step, tensors), tensors, accuracy) == (step in (0, 20))
    assert checkpoint_steps(root) == [20]


def test_a_full_disk_leaves_the_best_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = snapshot(tiny_network())
    best = BestVersion(tmp_path)
    best.offer(version(20, tensors), tensors, 0.5)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("swarm.learn.checkpoint._write_files", full)
        with pytest.raises(OSError, match="No space left"):
            best.offer(version(40, tensors), tensors, 0.6)
    assert checkpoint_steps(tmp_path) == [20]
    assert best.offer(version(60, tensors), tensors, 0.55), "what was not kept is no bar for what comes later"


def test_what_is_taken_out_is_the_version_that_was_published(tmp_path: Path) -> None:
    directory = make_trained_node(tmp_path / "node").dir
    newest = load_trained(directory).version
    assert newest is not None
    other = {name: tensor + 0.01 for name, tensor in snapshot(load_trained(directory).network).items()}
    BestVersion(directory / BEST).offer(version(newest.step + 7, other), other, 0.9)
    for which in ("best", newest.step + 7):
        found = load_trained(directory, which)
        assert found.version is not None and found.version.digest == weights_digest(other) != newest.digest
    assert load_trained(directory).version == newest


def test_a_node_that_keeps_none_says_how_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keeps none; a node with evaluation\.keep_best = true does"):
        load_trained(make_trained_node(tmp_path / "node").dir, "best")
