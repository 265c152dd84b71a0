"""Consecutive published checkpoints of a real training run of SmolLM2-135M, made once and kept.

Invariant: every version is one that `PolicyLearner` published from rollouts of the version before it, scored by the
environment's verifier. Kept as changed positions and new values after the model's own weights, so that it takes
megabytes and does not depend on the codecs that are measured on it.
"""

import asyncio
import hashlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks._scored import scored_groups
from swarm.config import EnvironmentConfig, LearnerConfig, ModelConfig, ReplayConfig
from swarm.environments.curriculum import TaskMixture
from swarm.environments.load import build_environments
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.learn.learner import PolicyLearner
from swarm.model.network import load_model
from swarm.model.source import default_cache_dir
from swarm.model.version_digest import PublishedTensors, published_state
from swarm.objectives.methods import load_recipe
from swarm.testing.builders import InlineVerifier
from swarm.types import Draw, DrawnGroup, Sampling, ScoredGroup

logger = logging.getLogger(__name__)

GROUP_SIZE: Final = 8
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
    with tempfile.TemporaryDirectory() as scratch:
        run = _Run(learning_rate, Path(scratch))
        for step in range(1, num_steps + 1):
            before = run.learner.snapshot()[1]
            run.step(step)
            _keep(before, run.learner.snapshot()[1], _file(folder, step))


class _Run:
    """One learner and one generator that follows it, step by step."""

    def __init__(self, learning_rate: float, scratch: Path) -> None:
        trained, engine = load_model(MODEL), load_model(MODEL)
        self._tokenizer = trained.tokenizer
        self._name = hashlib.sha256(b"benchmarks.weights").hexdigest()
        environments = build_environments([ENVIRONMENT])
        self._verifier = InlineVerifier(environments)
        self._mixture = TaskMixture(environments, {ENVIRONMENT.name: 1.0}, 1)
        config = LearnerConfig(recipe="grpo", learning_rate=learning_rate)
        recipe = load_recipe(config.recipe)
        self.learner = PolicyLearner(
            trained.network, self._tokenizer, recipe, config, ReplayConfig(), self._name, scratch / "learner"
        )
        self._generator = TransformersGenerator(engine.network, self._tokenizer, self.learner.version, seed=1)

    def step(self, number: int) -> None:
        """Generates until there are enough groups with signal, learns from them, and loads the new version."""
        groups: list[ScoredGroup] = []
        for attempt in range(MAX_TRIES):
            groups += [group for group in self._generate(f"{number}/{attempt}") if group.has_signal]
            if len(groups) >= GROUPS_PER_STEP:
                break
        drawn = tuple(DrawnGroup(scored=group, age_steps=0, use=1) for group in groups[:GROUPS_PER_STEP])
        report = self.learner.step(Draw(step=number, groups=drawn, num_zero_variance=0))
        if report.was_skipped:
            raise RuntimeError(f"step {number} made no version")
        logger.info("step", extra={"step": number, "loss": report.loss, "grad_norm": report.grad_norm})
        self._generator.load(*self.learner.snapshot())

    def _generate(self, label: str) -> list[ScoredGroup]:
        return asyncio.run(
            scored_groups(
                self._generator,
                self._tokenizer,
                self._verifier,
                [self._mixture.next_task() for _ in range(GROUPS_PER_STEP)],
                GROUP_SIZE,
                Sampling(max_new_tokens=MAX_NEW_TOKENS),
                producer=self._name,
                label=label,
            )
        )
