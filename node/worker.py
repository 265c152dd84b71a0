"""Worker process of a node: model, generator and learner, driven through a `LocalExchange`.

Invariant: no network; the worker is connected to its agent only. It runs in its own process (`python -m node.worker`),
in several that share the learner (`learner.num_processes`), or inside the agent's (`worker = "inline"`).
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from node.ranks import EXIT_CONFIG, follow_leader, forget_rank, launch, num_ranks, own_rank
from swarm.config import NodeConfig, load_config
from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.loops import Worker, run_worker
from swarm.process import defer_gc, die_with, freeze_gc

logger = logging.getLogger("node.worker")  # its own process calls this module __main__

EXIT_TERMINATED = 128 + signal.SIGTERM  # not done: the agent starts another unless it ends itself
EXIT_FAILED = 1  # the agent starts another, unless the error on stdout is that of the worker before
_MOST_CHARACTERS = 1000  # of an error on stdout


async def work(config: NodeConfig, socket: Path) -> bool:
    """Connects to the agent and works; returns True once every step is made, False if terminated before."""
    from node.build import build_worker
    from swarm.clock import SystemClock
    from swarm.exchange.local_rpc import LocalClient
    from swarm.loops.report_activity import reporting

    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if not task.cancelling():  # a Ctrl-C comes here, and to the agent, which then sends a SIGTERM
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    client = LocalClient(socket)
    worker: Worker | None = None
    try:
        node_id = Identity.load(config.dir / "identity.key").node_id
        async with reporting(client, SystemClock()) as on_progress:
            worker = await asyncio.to_thread(build_worker, config, node_id, client, loop=loop, on_progress=on_progress)
            freeze_gc()
            await run_worker(worker)
        return True
    except asyncio.CancelledError:
        logger.info("worker stopped")
        return False
    finally:
        if worker is not None:
            await asyncio.to_thread(worker.close)
        await client.close()


def main() -> None:
    """Entry point of the worker process; started by the agent, not by people."""
    defer_gc()
    from swarm.telemetry import WarningLog, setup_logging

    parser = argparse.ArgumentParser(description="The training and generating process of a node.")
    parser.add_argument("--config", type=Path, required=True, help="resolved node configuration (TOML)")
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket of the agent")
    parser.add_argument("--parent", type=int, required=True, help="process id of the agent")
    arguments = parser.parse_args()
    die_with(arguments.parent)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the agent gets it, too, and ends this process
    config = load_config(NodeConfig, arguments.config)
    setup_logging(config.telemetry.log_level, config.telemetry.log_format, config.shown_name)
    rank = own_rank()
    if rank is None:
        forget_rank()
        if num_ranks(config) > 1:
            ranks = ["--config", str(arguments.config), "--socket", str(arguments.socket), "--parent", str(os.getpid())]
            sys.exit(launch(num_ranks(config), ["-m", "node.worker", *ranks]))
    warnings = WarningLog(config.dir)
    code = exit_code(config, arguments.socket, rank)
    warnings.close()
    if rank is not None and code not in (0, EXIT_TERMINATED):
        os._exit(code)  # at once, so that the others are ended: torch's own end of a group may wait for them
    sys.exit(code)


def exit_code(config: NodeConfig, socket: Path, rank: int | None) -> int:
    """Runs the worker to its end; returns the exit code of the process, which the agent acts on."""
    try:
        if rank:
            follow_leader(config)
            return 0
        return 0 if asyncio.run(work(config, socket)) else EXIT_TERMINATED
    except Exception as error:
        cause = only_cause(error)
        if isinstance(cause, ConfigError):
            print(cause, flush=True)
            return EXIT_CONFIG
        logger.exception("worker failed")
        if not (isinstance(cause, OSError | MemoryError) or "out of memory" in str(cause)):  # which pass by themselves
            print(" ".join(errors_in_words(error).split())[:_MOST_CHARACTERS], flush=True)
        return EXIT_FAILED


def only_cause(error: BaseException) -> BaseException:
    """The single error inside nested groups; the innermost group if it holds several errors."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def errors_in_words(error: BaseException) -> str:
    """Every error inside nested groups with its kind, equal ones once. Example: `OSError: disk; ValueError: 3`."""
    return "; ".join(dict.fromkeys(f"{type(each).__name__}: {each}" for each in _each_of(error)))


def _each_of(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _each_of(inner)
    else:
        yield error


if __name__ == "__main__":
    sys.exit(main())
