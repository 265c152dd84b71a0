"""Disk budget: one bound of a node's directory, split over everything that is written there.

Invariant: parts of a fixed size (checkpoints, the best version, an engine's copy, logs) come first, the stores of
groups and weights have the rest, and a node whose parts cannot work with that does not start.
"""

from dataclasses import dataclass
from typing import Final

from node.run_estimate import (
    CHECKPOINT_BYTES,
    LIKE_LLAMA,
    estimate_memory,
    lengths_of,
    read_shape,
    version_bytes,
)
from swarm.config import LearnerConfig, NodeConfig
from swarm.config.byte_sizes import byte_words
from swarm.errors import ConfigError
from swarm.process import available_bytes, num_usable_cores
from swarm.telemetry.event_log import KEPT_OLD_FILES, MAX_FILE_BYTES
from swarm.types import Role
from swarm.weights.publish import DELTA_AT_MOST

LEAST_GROUPS_BYTES: Final = 64 * 2**20  # of the group store: some steps' groups
SMALL_FILES_BYTES: Final = 32 * 2**20  # status, peers, shown episodes and updates, and the group store's own log


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskBudget:
    """Most bytes of each part of a node's directory."""

    checkpoints: int  # those kept, and one while it is written
    best: int  # the version kept by evaluation.keep_best, and the one that takes its place
    engine: int  # weights on their way to an engine of its own process
    logs: int  # events and small files
    groups: int
    weights: int
    kept_checkpoints: int

    @property
    def total(self) -> int:
        """Most bytes of all parts."""
        return self.checkpoints + self.best + self.engine + self.logs + self.groups + self.weights

    @property
    def words(self) -> str:
        """List of the parts and their sizes, for people."""
        parts = {
            f"checkpoints, {self.kept_checkpoints} and one that is written": self.checkpoints,
            "the best version": self.best,
            "engine": self.engine,
            "weights": self.weights,
            "groups": self.groups,
            "events and small files": self.logs,
        }
        return ", ".join(f"{name} {byte_words(size)}" for name, size in parts.items() if size)


def disk_budget(config: NodeConfig) -> DiskBudget | None:
    """The parts, within `disk.max_bytes` if that is set (blocking: reads the model's config.json).

    Returns:
        None if the size of this architecture is not known and no bound is set.

    Raises:
        ConfigError: the bound cannot hold one checkpoint beside the one that is written, leaves too little for the
            stores, or is set for an architecture of unknown size; or the model cannot be read.
    """
    most, shape = config.disk.max_bytes, read_shape(config.model)
    if shape is None and most:
        raise ConfigError(
            f"disk.max_bytes: the size of {config.model.source!r} is not known ({', '.join(LIKE_LLAMA)} are); set "
            "exchange.store_bytes and weights.store_bytes instead"
        )
    if shape is None:
        return None
    trains, generates = Role.TRAINER in config.roles, Role.GENERATOR in config.roles
    checkpoint = CHECKPOINT_BYTES * shape.num_trained(config.model) if trains else 0
    version = version_bytes(config, shape)
    holds_weights = config.weights.publish or (generates and not trains)
    least_weights = int((1 + DELTA_AT_MOST) * version) + 1 if holds_weights else 0
    kept = config.disk.kept_checkpoints
    fixed = {
        "best": 2 * version if trains and config.evaluation.keep_best else 0,
        "engine": 2 * version if config.engine.kind == "vllm" else 0,
        "logs": (1 + KEPT_OLD_FILES) * MAX_FILE_BYTES + SMALL_FILES_BYTES,
    }
    groups = _file_bytes(config.exchange.store_bytes)
    weights = config.weights.store_bytes if holds_weights else 0
    if most:
        least_groups = _file_bytes(LEAST_GROUPS_BYTES)
        others = sum(fixed.values()) + least_groups + least_weights
        kept = max((n for n in range(1, kept + 1) if (n + 1) * checkpoint + others <= most), default=0)
        if not kept:
            raise ConfigError(_too_little(most, checkpoint, others))
        left = most - sum(fixed.values()) - (kept + 1) * checkpoint
        groups = min(groups, (left - least_weights) // (2 if holds_weights else 1))
        groups = max(groups, least_groups)
        weights = min(weights, left - groups)
    return DiskBudget(
        checkpoints=(kept + 1) * checkpoint, groups=groups, weights=weights, kept_checkpoints=kept, **fixed
    )


def disk_line(config: NodeConfig) -> str:
    """One-line summary of a node's disk budget and its parts (blocking). Raises ConfigError like `disk_budget`."""
    budget = disk_budget(config)
    if budget is None:
        return "disk: not estimated for this architecture"
    bound = f" of disk.max_bytes {byte_words(config.disk.max_bytes)}" if config.disk.max_bytes else ""
    return f"disk: at most {byte_words(budget.total)}{bound} ({budget.words})"


def within_budget(config: NodeConfig) -> NodeConfig:
    """The configuration with the budgets that `disk.max_bytes` leaves. Raises ConfigError as `disk_budget`."""
    budget = disk_budget(config) if config.disk.max_bytes else None
    if budget is None:
        return config
    exchange = config.exchange.model_copy(update={"store_bytes": 5 * budget.groups // 6})
    weights = config.weights.model_copy(update={"store_bytes": budget.weights or config.weights.store_bytes})
    disk = config.disk.model_copy(update={"kept_checkpoints": budget.kept_checkpoints})
    return config.model_copy(update={"exchange": exchange, "weights": weights, "disk": disk})


def _file_bytes(store_bytes: int) -> int:
    """Bytes of the group store's file if its bodies take `store_bytes`: a sixth of it is other data and free space."""
    return -(-6 * store_bytes // 5)


def _too_little(most: int, checkpoint: int, others: int) -> str:
    needed = 2 * checkpoint + others
    why = (
        f"a checkpoint of {byte_words(checkpoint)}, once more while the next one is written, and " if checkpoint else ""
    )
    fix = ", or train adapters (model.lora_rank), whose checkpoints are small" if checkpoint > others else ""
    return (
        f"disk.max_bytes: {byte_words(most)} is too little for {why}{byte_words(others)} of other files; set "
        f"{needed} ({byte_words(needed)}) or more{fix}"
    )


def recipe_words(learner: LearnerConfig) -> str:
    """Recipe, learning rate and number of steps of a coming training, for people."""
    schedule = "" if learner.schedule == "constant" else f" ({learner.schedule})"
    steps = f"{learner.num_steps} steps" if learner.num_steps else "until Ctrl-C"
    return f"{learner.recipe}, learning rate {learner.learning_rate:g}{schedule}, {steps}"


def takes_line(config: NodeConfig) -> str:
    """Line on a node's use of the machine: threads, memory, disk, upload (blocking). Raises ConfigError.

    Args:
        config: configuration with the compute dtype that `auto` means here, on which memory depends
            (`device_checks.with_choice`).
    """
    return f"takes      {_cpu(config)}; {_memory(config)}; {_disk(config)}; {_upload(config)}"


def _cpu(config: NodeConfig) -> str:
    work = {Role.TRAINER: "to learn", Role.GENERATOR: "to generate"}
    does = [words for role, words in work.items() if role in config.roles]
    threads = "thread" if config.num_threads == 1 else "threads"
    nice = f", nice {config.niceness}" if config.niceness else ""
    room = f"(of {num_usable_cores()} cores{nice})"
    return f"{config.num_threads} {threads} {' and as many '.join(does) or 'to serve'} {room}"


def _memory(config: NodeConfig) -> str:
    shape = read_shape(config.model)
    if shape is None:
        return "memory not estimated for this architecture"
    lengths = lengths_of(config, prompt=0, has_turns=config.may_have_turns)
    memory = estimate_memory(config, shape, lengths)
    available = available_bytes()
    short = f" (only {byte_words(available)} available: swarm doctor)" if available < memory.peak else ""
    return f"memory about {byte_words(memory.peak)} at most, beside prompts{short}"


def _disk(config: NodeConfig) -> str:
    budget = disk_budget(config)
    if budget is None:
        return "disk not estimated for this architecture"
    return f"disk at most {byte_words(budget.total)} in {config.dir}"


def _upload(config: NodeConfig) -> str:
    if config.is_alone:
        return "no network"
    rate = config.exchange.max_upload_bytes_per_s
    return f"upload at most {byte_words(rate)}/s" if rate else "upload without limit"
