"""Further nodes of a training on this machine: processes that share rollouts with the first node, or generate for it.

Invariant: no node outlives the training, however it ends; each is an ordinary node in `<dir>/nodes/NUMBER`.

    python -m node.local_nodes --parent PID --config FILE      # started for each node
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from node.daemon import Daemon, run_daemon
from swarm.config import NODE_FILE, NodeConfig, apply_overrides, load_config, parse_config
from swarm.errors import SwarmError
from swarm.process import comes, die_with, work_of
from swarm.telemetry import setup_logging
from swarm.types import JsonDict
from swarm.wire.run_manifest import write_toml

NODES: Final = "nodes"  # folder of the training's directory
LOG: Final = "log.txt"  # of each


@dataclass(frozen=True, kw_only=True)
class LocalNodes:
    """Nodes beside the first one of a training.

    Example:
        others = LocalNodes(config=config, num_trainers=1, num_generators=2)
        async with Daemon(config) as daemon, others.beside(daemon): ...
    """

    config: NodeConfig  # of the first
    num_trainers: int
    num_generators: int
    say: Callable[[str], None] = print

    @asynccontextmanager
    async def beside(self, daemon: Daemon) -> AsyncGenerator[None]:
        """Context in which the nodes run, connected to the running first node; at its end they save and are stopped."""
        count = self.num_trainers + self.num_generators
        watching: list[asyncio.Task[None]] = []
        processes: list[asyncio.subprocess.Process] = []
        try:
            for number in range(2, count + 2):
                is_trainer = number < self.num_trainers + 2
                path = await asyncio.to_thread(self._write, number, is_trainer, daemon)
                processes.append(await _start(path))
                watching.append(asyncio.create_task(self._watch(processes[-1], number, path.parent)))
            if count:
                trainers = f"{self.num_trainers} more that train" if self.num_trainers else ""
                generators = f"{self.num_generators} that only generate" if self.num_generators else ""
                words = ", ".join(filter(None, (trainers, generators)))
                self.say(f"nodes      {words}: {self.config.dir / NODES}/NUMBER, each with a {LOG}")
            yield
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*map(_stop, processes))

    def _write(self, number: int, is_trainer: bool, daemon: Daemon) -> Path:
        """Writes the configuration of one node (blocking); returns its path."""
        first, directory = self.config, self.config.dir / NODES / str(number)
        data: JsonDict = first.model_dump(mode="json") | {
            "dir": str(directory),
            "name": f"{first.name[:36]}-{number}",
            "seed": first.seed + number - 1,
        }
        changes = [f"directory.bootstrap={json.dumps(daemon.maddrs)}", 'telemetry.metrics_listen=""', 'serve.listen=""']
        changes += ["learner.num_steps=0"]  # they go on as long as the first
        for key in ("listen", "advertise"):  # on a port of its own
            host, _, port = getattr(first.exchange, key).rpartition(":")
            changes += [f'exchange.{key}="{host}:0"'] if port else []
        if not is_trainer:
            changes += ['roles=["generator"]', "weights.publish=false", f'follow.policy="{daemon.agent.node_id}"']
            changes += ['warm_up.answers=""']
        elif first.weights.publish:
            changes += ["weights.publish=false"]  # who generates follows the first
        apply_overrides(NodeConfig, data, changes)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / NODE_FILE
        write_toml(parse_config(NodeConfig, data, f"node {number}").model_dump(mode="json"), path)
        return path

    async def _watch(self, process: asyncio.subprocess.Process, number: int, directory: Path) -> None:
        code = await process.wait()
        log = await asyncio.to_thread((directory / LOG).read_text, errors="replace")
        newest = log.strip().splitlines()[-1:] or ["nothing"]
        self.say(f"node {number} ended, and the others go on without it: exit code {code}, {directory / LOG} ends with "
                 f"{newest[0][:200]!r}")  # fmt: skip


async def _start(path: Path) -> asyncio.subprocess.Process:
    arguments = ("-m", "node.local_nodes", "--parent", str(os.getpid()), "--config", str(path))
    with (path.parent / LOG).open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    if not await comes(process.wait(), partial(work_of, process.pid)):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def main() -> None:
    """Runs one further node until the training stops it, or the training's process ends."""
    parser = argparse.ArgumentParser(description="One more node of a training on this machine.")
    parser.add_argument("--parent", type=int, required=True, help="process that ends it, however that ends")
    parser.add_argument("--config", type=Path, required=True)
    arguments = parser.parse_args()
    die_with(arguments.parent)
    try:
        config = load_config(NodeConfig, arguments.config)
        setup_logging("INFO", "console", config.shown_name)
        asyncio.run(run_daemon(config))
    except SwarmError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
