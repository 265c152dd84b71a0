"""Real nodes of the tiny model in one process, which run until something is true."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.models.llama import modeling_llama

from node.daemon import Daemon, write_config
from node.train import TrainOptions, prepare
from swarm.config import NodeConfig
from swarm.diagnosis import Diagnosed, Gravity, diagnose, read_snapshot
from swarm.errors import ConfigError
from swarm.events import Event

Until = Callable[[list[Daemon], list[list[Event]]], bool]
LETTERS = {"name": "sort", "kind": "char", "dataset": "sort", "seed": 1}
QUICK: dict[str, Any] = {"every_steps": 10, "num_problems": 16}

_ = modeling_llama  # loaded here, and not by the threads of several nodes at once


def write_letters(folder: Path, count: int = 300, length: int = 3) -> Path:
    """Questions whose answer is their letters in order, which the tiny model half knows."""
    source = random.Random(0)
    words = ["".join(source.choice("abcdefgh") for _ in range(length)) for _ in range(count)]
    rows = [{"question": f"sort:{word}=", "answer": "".join(sorted(word))} for word in words]
    path = folder / "letters.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_reward(folder: Path, body: str) -> str:
    """A reward function of these lines."""
    path = folder / "reward.py"
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path.write_text(f"def score(question, answer, reference):\n{lines}")
    return f"{path}:score"


async def train_alone(folder: Path, until: Until, *overrides: str, body: str = "", **options: Any) -> Path:
    """A directory of `swarm train`, on the tiny model, stopped as Ctrl-C stops it."""
    data = write_letters(folder, options.pop("count", 300))
    quick = ("evaluation.num_problems=16", "evaluation.every_steps=10", "telemetry.log_level=ERROR")
    reward = write_reward(folder, body) if body else ""
    asked = TrainOptions(
        directory=folder / "node", model="tiny", data=data, reward=reward, steps=options.pop("steps", 0),
        overrides=(*quick, *overrides), **options,
    )  # fmt: skip
    config = await prepare(asked, lambda _: None)
    await run_nodes([config], until)
    return config.dir


def make_config(folder: Path, name: str = "node", **sections: Any) -> NodeConfig:
    """A node of the tiny model on one character task, with its directory below `folder`."""
    data: dict[str, Any] = {
        "dir": str(folder / name),
        "name": name,
        "run_id": "ailments",
        "worker": "inline",
        "environments": [LETTERS],
        "model": {"source": "tiny", "dtype": "float32"},
        "generator": {"max_new_tokens": 9, "groups_per_batch": 2},
        "replay": {"local_groups": 2, "external_groups": 2},
        "learner": {"learning_rate": 1e-4},
        "evaluation": QUICK,
        "exchange": {"lookup_every_s": 0.3, "advert_every_s": 5.0},
        "directory": {"kind": "none"},
        "coordinator": {"heartbeat_s": 0.3},
    }
    for key, value in sections.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) and key in data else value
    return NodeConfig.model_validate(data)


async def run_nodes(
    configs: Sequence[NodeConfig],
    until: Until,
    timeout_s: float = 150.0,
    meanwhile: Callable[[list[Daemon]], Awaitable[None]] | None = None,
    made: Callable[[NodeConfig, Callable[[Event], None]], Daemon] = Daemon,
) -> None:
    """Runs nodes together, each with the first as bootstrap peer, until a condition, and stops them.

    Raises:
        TimeoutError: the condition did not come true.
    """
    daemons: list[Daemon] = []
    events: list[list[Event]] = [[] for _ in configs]
    running: list[asyncio.Task[None]] = []
    try:
        for number, config in enumerate(configs):
            if daemons and config.directory.kind == "dht" and not config.directory.bootstrap:
                known = tuple(daemons[0].status()["dht"])
                config = config.model_copy(
                    update={"directory": config.directory.model_copy(update={"bootstrap": known})}
                )
            config.dir.mkdir(parents=True, exist_ok=True)
            write_config(config, config.dir / "node.toml")
            daemon = made(config, events[number].append)
            try:
                await daemon.__aenter__()
            except ConfigError as error:  # it is asked about all the same
                print(f"a node did not start: {error}")
                return
            daemons.append(daemon)
            running.append(asyncio.create_task(daemon.run()))
        async with asyncio.timeout(timeout_s):
            if meanwhile is not None:
                await meanwhile(daemons)
            while not until(daemons, events) and not all(task.done() for task in running):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.2)  # one more status.json, which is written every second
    finally:
        for task in running:
            task.cancel()
        for ended in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(ended, Exception) and not isinstance(ended, ConfigError):
                print(f"a node ended: {type(ended).__name__}: {ended}")
        for daemon in reversed(daemons):
            await daemon.__aexit__(None, None, None)


def count(kind: type[Event], number: int, node: int = 0) -> Until:
    """Until one node has written so many events of a kind."""
    return lambda _, events: sum(isinstance(event, kind) for event in events[node]) >= number


def pair(folder: Path, asked: dict[str, Any] | None = None, **sections: Any) -> list[NodeConfig]:
    """Two nodes that find each other; the second has these keys beside those of both."""
    both: dict[str, Any] = {"directory": {"kind": "dht"}, **sections}
    second = {key: {**both.get(key, {}), **value} for key, value in (asked or {}).items()}
    ours: dict[str, Any] = {**both, "seed": 7, **second}
    return [make_config(folder, "other", **both), make_config(folder, **ours)]


def ask(directory: Path, *, runs: bool) -> list[Diagnosed]:
    """Findings about a node that was stopped so that its files stand still, notes left out; as if it ran, or not."""
    snapshot = read_snapshot(directory, time.time())
    if runs:
        snapshot = replace(snapshot, runs=True, now_s=snapshot.value("at_s", snapshot.now_s))
    return [each for each in diagnose(snapshot) if each.gravity is not Gravity.NOTE]
