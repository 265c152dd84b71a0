"""Ailments that the rules of `swarm why` were written for, each planted in real nodes of the tiny model."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks._ailing_node import count, make_config, run_nodes, train_alone
from coordinator.daemon import CoordinatorDaemon
from node.daemon import Daemon, write_config
from swarm.clock import SystemClock
from swarm.config import CoordinatorConfig, CoordinatorLink, DirectoryConfig, EntryConfig, NodeConfig
from swarm.diagnosis import Diagnosed
from swarm.events import DiskFull, Event, GroupPut, GroupUnscored, StepMade, WorkerDied
from swarm.interfaces import Verdict, Verifier
from swarm.process import load_or_create_identity, make_private
from swarm.types import RefusalReason

Plant = Callable[[Path], Awaitable[Path]]  # folder -> directory of the node to ask about


@dataclass(frozen=True, kw_only=True, slots=True)
class Ailment:
    """Something that is wrong with a node, and the rule that should name it first."""

    name: str
    plant: Plant
    expected: tuple[str, ...]  # findings of which one is right, or keys of node.toml; empty: the node is healthy
    is_running: bool = False  # asked about while it runs: the directory is a file's stem only

    def is_named_by(self, found: Diagnosed) -> bool:
        """Whether a finding is what is expected: by its name, or by the key of node.toml that it blames."""
        return found.name in self.expected or found.key in self.expected


def in_vain(number: int) -> Callable[[list[Daemon], list[list[Event]]], bool]:
    """Until so many own groups since the newest step have no signal; a lucky one of a collapsed policy may have."""

    def reached(daemons: list[Daemon], _: list[list[Event]]) -> bool:
        own = daemons[0].agent.own_groups.since_step
        return own.num_put + own.num_unscored - own.num_with_signal >= number

    return reached


async def all_wrong(folder: Path) -> Path:
    return await train_alone(folder, in_vain(110), body="return 0.0")


async def all_right(folder: Path) -> Path:
    return await train_alone(folder, in_vain(110), body="return 1.0")


async def all_equal(folder: Path) -> Path:
    return await train_alone(folder, in_vain(110), body="return 0.5")


FAILS_LATER = """import os, time
if time.time() > {at_s} and len(answer) == 3 and answer != reference:
    {failure}
return float(answer == reference)"""


async def reward_raises(folder: Path) -> Path:
    """A little later, as where a table or a licence is gone: what fails from the beginning is found before a start."""
    body = FAILS_LATER.format(at_s=time.time() + 8.0, failure="return {}['points']")
    return await train_alone(folder, count(GroupUnscored, 130), body=body)


async def verifier_dies(folder: Path) -> Path:
    """On answers that have the right letters in a wrong order, which the checks before a start do not try."""
    body = """import os
if len(answer) == 3 and answer != reference and sorted(answer) == sorted(reference):
    os._exit(1)
return float(answer == reference)"""
    return await train_alone(folder, count(GroupUnscored, 20), body=body)


async def cut_off(folder: Path) -> Path:
    return await train_alone(folder, in_vain(110), max_new_tokens=2)


async def rate_too_high(folder: Path) -> Path:
    return await train_alone(folder, in_vain(40), learning_rate=0.03)


async def rate_high(folder: Path) -> Path:
    return await train_alone(folder, count(StepMade, 30), learning_rate=0.003)


async def rate_too_low(folder: Path) -> Path:
    return await train_alone(folder, count(StepMade, 30), learning_rate=1e-9)


async def stale_by_clock(folder: Path) -> Path:
    def reached(daemons: list[Daemon], _: list[list[Event]]) -> bool:
        return daemons[0].agent.own_groups.since_step.num_with_signal >= 24

    return await train_alone(folder, reached, "replay.max_age_s=0.01")


async def store_too_small(folder: Path) -> Path:
    return await train_alone(folder, count(DiskFull, 20), "exchange.store_bytes=20000")


async def worker_killed(folder: Path) -> Path:
    """The kernel ends the worker three times, as where memory is short."""
    config = make_config(folder, worker="process", learner={"learning_rate": 1e-4, "num_steps": 0})

    async def kill(_: list[Daemon]) -> None:
        """What the kernel does when memory is short, a moment after the model is loaded, three times."""
        for _again in range(3):
            while not (found := await asyncio.to_thread(_workers)):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.2)
            await asyncio.sleep(1.0)
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while set(await asyncio.to_thread(_workers)) & set(found):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    await run_nodes([config], count(WorkerDied, 3), meanwhile=kill)
    return config.dir


def _workers() -> list[int]:
    """Worker processes that this process started."""
    import psutil

    found: list[int] = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            found += [child.pid] if "node.worker" in child.cmdline() else []
    return found


async def killed(folder: Path) -> Path:
    """kill -9 of a healthy node."""
    config = make_config(folder, learner={"learning_rate": 1e-4})
    process = await start(config)
    await until_file(config.dir / "status.json")
    await asyncio.sleep(3.0)
    process.kill()
    await process.wait()
    return config.dir


async def start(config: NodeConfig, limit_bytes: int = 0) -> asyncio.subprocess.Process:
    """A node as a process of its own; its output goes to log.txt."""
    make_private(config.dir)
    write_config(config, config.dir / "node.toml")
    with (config.dir / "log.txt").open("ab") as log:
        command = [sys.executable, "-m", "node.cli", "start", "--config", str(config.dir / "node.toml")]
        if limit_bytes:
            command = ["prlimit", f"--fsize={limit_bytes}", *command]
        return await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)


async def until_file(path: Path, timeout_s: float = 60.0) -> None:
    """Waits until a file is there."""
    async with asyncio.timeout(timeout_s):
        while not path.is_file():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.1)


async def frozen(folder: Path) -> Path:
    """SIGSTOP of a healthy node, as Ctrl-Z does it; it is asked about as if it still held its directory."""
    config = make_config(folder, learner={"learning_rate": 1e-4})
    process = await start(config)
    await until_file(config.dir / "status.json")
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(17.0)
    return config.dir  # main() ends what is left


async def disk_quota(folder: Path) -> Path:
    """A node that may write no file of more than 300 kB, which to it is a full disk."""
    config = make_config(folder, learner={"learning_rate": 1e-4})
    process = await start(config, limit_bytes=300_000)
    await until_file(config.dir / "status.json")
    await asyncio.sleep(25.0)
    with suppress(ProcessLookupError):
        process.terminate()
    await process.wait()
    return config.dir


MINE = """
import math

from swarm.objectives.part import Scored, TokenLosses, WeightPart
from swarm.objectives.parts import GroupCentred, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe

calls = []


class Mine(WeightPart):
    equation = "mine"

    def __call__(self, scored: Scored) -> TokenLosses:
        calls.append(1)
        factor = 1.0
        if len(calls) > 8:
            {then}
        return TokenLosses(losses=-factor * scored.advantages * scored.logprobs, bounded=scored.logprobs > 1)


RECIPE = Recipe(
    name="mine", title="Mine", advantage=GroupCentred(), ratio=TokenRatio(), weight=Mine(), aggregate=TokenMean()
)
"""


async def with_recipe(folder: Path, then: str) -> Path:
    """A node with a recipe of one's own, which does this from some step on."""
    path = folder / "mine.py"
    path.write_text(MINE.format(then=then))
    config = make_config(folder, learner={"learning_rate": 1e-4, "recipe": f"{path}:RECIPE"})
    await run_nodes([config], lambda _, events: len([e for e in events[0] if isinstance(e, StepMade)]) >= 20)
    return config.dir


async def recipe_raises(folder: Path) -> Path:
    return await with_recipe(folder, "raise ValueError('shape of my table')")


async def recipe_gives_nan(folder: Path) -> Path:
    return await with_recipe(folder, "factor = math.nan")


async def no_dataset(folder: Path) -> Path:
    """A task that does not exist: the node ends at its start."""
    config = make_config(folder, environments=[{"name": "sort", "kind": "char", "dataset": "sorted", "seed": 1}])
    await (await start(config)).wait()
    return config.dir


# --- together -------------------------------------------------------------------------------------------


def refused(number: int, *reasons: RefusalReason) -> Callable[[list[Daemon], list[list[Event]]], bool]:
    """Until the second node refused so many groups."""

    def reached(daemons: list[Daemon], _: list[list[Event]]) -> bool:
        found = daemons[-1].agent.ingest.refusals
        return sum(found.get(each, 0) for each in reasons) >= number

    return reached


async def pair(folder: Path, other: dict[str, object], until: Callable[..., bool], **own: object) -> Path:
    """Two nodes that meet in the DHT; the second is asked about."""
    configs = [make_config(folder, "ada", directory={"kind": "dht"}, **other),
               make_config(folder, "bell", directory={"kind": "dht"}, **own)]  # fmt: skip
    await run_nodes(configs, until)
    return configs[1].dir


async def other_lengths(folder: Path) -> Path:
    other: dict[str, object] = {"generator": {"max_new_tokens": 12}}
    return await pair(folder, other, refused(10, RefusalReason.BAD_SAMPLING))


async def other_prompt(folder: Path) -> Path:
    letters = {"name": "sort", "kind": "char", "dataset": "sort", "seed": 1, "prompt": "{question} "}
    return await pair(folder, {"environments": [letters]}, refused(10, RefusalReason.OTHER_ENVIRONMENT))


async def other_name(folder: Path) -> Path:
    letters = {"name": "letters", "kind": "char", "dataset": "sort", "seed": 1}
    return await pair(folder, {"environments": [letters]}, refused(10, RefusalReason.UNKNOWN_ENVIRONMENT))


async def slow_to_look(folder: Path) -> Path:
    """A node that looks at each group of others a second late, and takes none of an older step."""
    late: dict[str, object] = {"faults": {"latency_ms": 1500}, "replay": {"max_age_steps": 0}}
    return await pair(folder, {}, refused(10, RefusalReason.TOO_OLD), **late)


class Liar:
    """The verifier of a node that claims the opposite of what its answers are worth."""

    def __init__(self, inner: Verifier) -> None:
        self._inner = inner

    async def verify(self, *arguments: Any, **named: Any) -> Verdict:
        verdict = await self._inner.verify(*arguments, **named)
        lies = tuple(replace(each, reward=1.0 - each.reward) for each in verdict.outcomes)
        return replace(verdict, outcomes=lies)


async def a_liar(folder: Path) -> Path:
    """One of two peers claims the opposite of every reward."""
    names = ("ada", "carl", "bell")
    configs = [make_config(folder, name, directory={"kind": "dht"}) for name in names]

    async def begin(daemons: list[Daemon]) -> None:
        groups = daemons[0].agent.own_groups
        groups._verifier = Liar(groups._verifier)  # type: ignore[assignment]

    await run_nodes(
        configs,
        lambda ds, events: refused(3, RefusalReason.FALSE_REWARD)(ds, events) and ds[-1].agent.ingest.num_admitted > 10,
        meanwhile=begin,
    )
    return configs[-1].dir


class SkewedClock(SystemClock):
    """That of a machine whose clock is an hour ahead."""

    def now_s(self) -> float:
        return super().now_s() + 3600.0


async def wrong_clock(folder: Path) -> Path:
    """The clock of one of two nodes is an hour ahead."""

    def made(config: NodeConfig, on_event: Callable[[Event], None]) -> Daemon:
        daemon = Daemon(config, on_event)
        if config.name == "bell":
            daemon.clock = SkewedClock()
        return daemon

    config = make_config(folder, "bell", directory={"kind": "none"})
    async with coordinator_of(folder, config) as run:
        await run_nodes([linked(config, run)], lambda daemons, _: bool(daemons[0].status()["clock"]), made=made)
    return config.dir


def coordinator_of(folder: Path, config: NodeConfig, entry: EntryConfig | None = None) -> CoordinatorDaemon:
    """A coordinator of the node's run."""
    node = config.model_copy(update={"dir": folder / "run", "entry": entry or EntryConfig()})
    directory = DirectoryConfig(kind="none")
    return CoordinatorDaemon(
        CoordinatorConfig(dir=folder / "run", run_id=config.run_id, directory=directory, node=node)
    )


def linked(config: NodeConfig, run: CoordinatorDaemon) -> NodeConfig:
    """The node, with the address of a running coordinator."""
    link = CoordinatorLink(address=run.info["listen"], fingerprint=run.info["fingerprint"], heartbeat_s=0.3)
    return config.model_copy(update={"coordinator": link})


async def denied(folder: Path) -> Path:
    config = make_config(folder, "bell")
    make_private(config.dir)
    node_id = load_or_create_identity(config.dir / "identity.key").node_id
    async with coordinator_of(folder, config, EntryConfig(denied=(node_id,))) as run:
        await run_nodes([linked(config, run)], lambda ds, _: bool(ds[0].status()["coordinator_refusal"]))
    return config.dir


async def no_trainer(folder: Path) -> Path:
    config = make_config(folder, "bell", roles=["generator"], directory={"kind": "dht"}, replay={"local_groups": 0})
    loop = asyncio.get_running_loop()
    ends = loop.time() + 17.0
    await run_nodes([config], lambda *_: loop.time() > ends)
    return config.dir


async def not_publishing(folder: Path) -> Path:
    follower: dict[str, object] = {"roles": ["generator"]}
    return await pair(
        folder, {}, lambda ds, _: bool(ds[1].status()["following"]["trainers_without_weights"]), **follower
    )


async def other_model(folder: Path) -> Path:
    """A follower whose base model has other tensors."""
    trainer: dict[str, object] = {"weights": {"publish": True}}
    follower: dict[str, object] = {"roles": ["generator"], "model": {"source": "tiny", "dtype": "bfloat16"}}
    return await pair(folder, trainer, lambda ds, _: bool(ds[1].status()["following"]["last_error"]), **follower)


async def newcomers(folder: Path) -> Path:
    entry: dict[str, object] = {"entry": {"established": "members"}}
    return await pair(
        folder, entry, lambda ds, events: count(StepMade, 10, 1)(ds, events) and bool(ds[1].status()["peers"]), **entry
    )


async def trainer_dies(folder: Path) -> Path:
    """The trainer that a generator follows ends, and does not come back."""
    configs = [make_config(folder, "ada", directory={"kind": "dht"}, weights={"publish": True}),
               make_config(folder, "bell", directory={"kind": "dht"}, roles=["generator"])]  # fmt: skip

    async def end(daemons: list[Daemon]) -> None:
        while daemons[1].status()["following"]["served_step"] is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await daemons[0].transport.stop()

    await run_nodes(configs, lambda ds, _: not ds[1].status()["following"]["is_trainer_connected"], meanwhile=end)
    return configs[1].dir


async def two_trainers(folder: Path) -> Path:
    configs = [
        make_config(folder, name, directory={"kind": "dht"}, weights={"publish": True}) for name in ("ada", "carl")
    ]
    configs.append(make_config(folder, "bell", directory={"kind": "dht"}, roles=["generator"]))
    await run_nodes(configs, lambda ds, _: bool(ds[2].status()["following"]["candidates"]))
    return configs[2].dir


async def other_fingerprint(folder: Path) -> Path:
    """A node expects another coordinator at the address of its own."""
    config = make_config(folder, "bell")
    async with coordinator_of(folder, config) as run:
        config = linked(config, run)
        link = config.coordinator.model_copy(update={"fingerprint": "ab" * 32})
        config = config.model_copy(update={"coordinator": link})
        await run_nodes([config], lambda ds, _: bool(ds[0].status()["coordinator_refusal"]))
    return config.dir


async def only_trains(folder: Path) -> Path:
    config = make_config(folder, roles=["trainer"], weights={"publish": True}, directory={"kind": "dht"})
    loop = asyncio.get_running_loop()
    ends = loop.time() + 33.0
    await run_nodes([config], lambda *_: loop.time() > ends)
    return config.dir


# --- healthy --------------------------------------------------------------------------------------------


async def trained(folder: Path) -> Path:
    return await train_alone(folder, lambda *_: False, steps=40)


async def stopped_early(folder: Path) -> Path:
    """A moment after its start: nothing is to blame but that it does not run."""
    return await train_alone(folder, count(GroupPut, 8))


KNOWN = tuple(
    Ailment(name=name, plant=plant, expected=expected)
    for name, plant, expected in (
        ("every answer gets reward 0", all_wrong, ("all_wrong", "reference_worth_nothing")),
        ("every answer gets reward 1", all_right, ("all_right", "reference_worth_nothing")),
        ("every answer gets reward .5", all_equal, ("all_equal", "reference_worth_nothing")),
        ("the reward raises on wrong answers", reward_raises, ("cannot_be_scored",)),
        ("the scoring process dies", verifier_dies, ("cannot_be_scored",)),
        ("answers are cut off at 2 tokens of 3", cut_off, ("cut_off",)),
        ("learning rate 300 times too high", rate_too_high, ("learning_rate_too_high",)),
        ("learning rate 30 times too high", rate_high, ("learning_rate_too_high",)),
        ("learning rate 100,000 times too low", rate_too_low, ("learning_rate_too_low",)),
        ("groups too old by the clock", stale_by_clock, ("replay.max_age_s",)),
        ("the group store is full", store_too_small, ("exchange.store_bytes",)),
        ("the worker is killed three times", worker_killed, ("out_of_memory",)),
        ("kill -9 of a healthy node", killed, ("does_not_run",)),
        ("a peer has another max_new_tokens", other_lengths, ("settings_differ",)),
        ("a peer has another prompt template", other_prompt, ("environments_differ",)),
        ("a peer has another name of the environment", other_name, ("environments_differ",)),
        ("groups of others are looked at too late", slow_to_look, ("faults.latency_ms", "replay.max_age_steps")),
        ("one of two peers claims false rewards", a_liar, ("liar",)),
        ("the clock is an hour ahead", wrong_clock, ("clock_is_wrong",)),
        ("the coordinator denies the node", denied, ("coordinator_refuses",)),
        ("a generator without a trainer", no_trainer, ("no_trainer",)),
        ("a trainer that does not publish", not_publishing, ("no_trainer",)),
        ("a generator with another model", other_model, ("versions_refused",)),
        ("all peers are newcomers", newcomers, ("entry.established",)),
        ("a trainer without generators", only_trains, ("nobody_follows",)),
        ("a node frozen with Ctrl-Z", frozen, ("process_stopped",)),
        ("the disk is full", disk_quota, ("disk_full",)),
        ("a recipe of one's own raises", recipe_raises, ("ended_with_error",)),
        ("a recipe of one's own gives NaN", recipe_gives_nan, ("not_a_number",)),
        ("a task that does not exist", no_dataset, ("ended_with_error", "never_ran")),
        ("the trainer that is followed ends", trainer_dies, ("trainer_away",)),
        ("two trainers to follow", two_trainers, ("no_trainer",)),
        ("the fingerprint of another coordinator", other_fingerprint, ("coordinator_refuses",)),
    )
)  # fmt: skip
