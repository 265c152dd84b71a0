"""Consecutive published checkpoints of a real training run of SmolLM2-135M, made once and kept.

Invariant: every version is one that `PolicyLearner` published from rollouts of the version before it, scored by the
environment's verifier. Kept as changed positions and new values after the model's own weights, so that it takes
megabytes and does not depend on the codecs that are measured on it.
"""

import asyncio
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks._trained_policy import TrainedPolicy, draw_of
from swarm.config import EnvironmentConfig, LearnerConfig, ModelConfig, ReplayConfig
from swarm.environments.load import build_environments
from swarm.model.network import load_model
from swarm.model.source import default_cache_dir
from swarm.model.version_digest import PublishedTensors, published_state
from swarm.objectives.methods import load_recipe
from swarm.types import ScoredGroup

GROUPS_PER_STEP: Final = 3  # with signal
MAX_TRIES: Final = 6  # batches of questions for one step
MAX_NEW_TOKENS: Final = 6
MODEL: Final = ModelConfig(source="smollm2", dtype="bfloat16")
ENVIRONMENT: Final = EnvironmentConfig(
    name="sums",
    kind="reasoning_gym",
    dataset="chain_sum",
    params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    seed=1,
    prefill="Answer:",
)


def versions(learning_rate: float, num_steps: int) -> Iterator[PublishedTensors]:
    """The initial weights and those after each of `num_steps` steps, in order; trained where they are not kept yet."""
    folder = _folder(learning_rate)
    for step in range(1, num_steps + 1):
        if not _file(folder, step).is_file():
            _train(learning_rate, num_steps, folder)
            break
    tensors = {name: tensor.clone() for name, tensor in published_state(load_model(MODEL).network).items()}
    yield tensors
    for step in range(1, num_steps + 1):
        tensors = _after(tensors, _file(folder, step))
        yield tensors


def _folder(learning_rate: float) -> Path:
    return default_cache_dir() / "benchmarks" / "weights" / f"{learning_rate:.0e}"


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.npz"


def _after(before: PublishedTensors, path: Path) -> PublishedTensors:
    """The version of a file, given the one before it."""
    with np.load(path, allow_pickle=False) as changes:
        tensors = {name: tensor.clone() for name, tensor in before.items()}
        for name, tensor in tensors.items():
            flat = tensor.view(-1).view(torch.int16).numpy()
            flat[changes[f"{name}/at"]] = changes[f"{name}/new"]
    return tensors


def _keep(before: PublishedTensors, after: PublishedTensors, path: Path) -> None:
    changes: dict[str, np.ndarray] = {}
    for name, tensor in after.items():
        new = tensor.reshape(-1).view(torch.int16).numpy()
        at = np.flatnonzero(new != before[name].reshape(-1).view(torch.int16).numpy())
        changes[f"{name}/at"], changes[f"{name}/new"] = at.astype(np.uint32), new[at]
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}")
    with staging.open("wb") as file:
        np.savez(file, allow_pickle=False, **changes)
    staging.replace(path)


def _train(learning_rate: float, num_steps: int, folder: Path) -> None:
    """Makes and keeps every version of one run (blocking; sets torch to one thread)."""
    torch.set_num_threads(1)
    trained, engine = load_model(MODEL), load_model(MODEL)
    config = LearnerConfig(recipe="grpo", learning_rate=learning_rate)
    with tempfile.TemporaryDirectory() as scratch:
        policy = TrainedPolicy(
            hashlib.sha256(b"benchmarks.weights").hexdigest(),
            (trained.network, engine.network),
            trained.tokenizer,
            load_recipe(config.recipe),
            config,
            ReplayConfig(),
            Path(scratch) / "learner",
            environments=build_environments([ENVIRONMENT]),
            seed=1,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        for step in range(1, num_steps + 1):
            before = policy.learner.snapshot()[1]
            _step(policy, step)
            _keep(before, policy.learner.snapshot()[1], _file(folder, step))


def _step(policy: TrainedPolicy, number: int) -> None:
    """Generates until there are enough groups with signal, learns from them, and loads the new version."""
    groups: list[ScoredGroup] = []
    for attempt in range(MAX_TRIES):
        made = asyncio.run(policy.make(GROUPS_PER_STEP, f"{number}/{attempt}"))
        groups += [group for group in made if group.has_signal]
        if len(groups) >= GROUPS_PER_STEP:
            break
    report = policy.learner.step(draw_of(number, groups[:GROUPS_PER_STEP]))
    if report.was_skipped:
        raise RuntimeError(f"step {number} made no version")
    policy.follow()
