"""Ten ailments and ten healthy nodes, written down by an examiner who had not read the rules of `swarm why`.

The list was frozen before anything ran. Which rule should answer is left open: right is a first finding whose sentence
or fix has one of the words that name the planted cause.
"""

import asyncio
import json
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks._ailing_node import QUICK, Until, count, make_config, run_nodes, train_alone, write_letters
from benchmarks._ailments_known import Ailment, in_vain
from node.daemon import Daemon, write_config
from node.train import TrainOptions, prepare
from swarm.config import NodeConfig
from swarm.diagnosis import Diagnosed
from swarm.events import Event, StepMade

Clause = tuple[str, str]  # what a knowledgeable person would call the cause; which answer counts as right


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined(Ailment):
    """An ailment whose `expected` are words, one of which stands in what is said first; none: the node is healthy."""

    expected: tuple[str, ...] = ()
    judged: Clause = ("", "")

    def is_named_by(self, found: Diagnosed) -> bool:
        """Whether the sentence or the fix has one of the words; the name and the key of a rule do not count."""
        texts = [getattr(found, field.name) for field in fields(found) if field.name not in ("name", "key", "docs")]
        told = " ".join(text for text in texts if isinstance(text, str)).lower()
        return any(word in told for word in self.expected)


def never(_: list[Daemon], __: list[list[Event]]) -> bool:
    """Until the nodes end by themselves."""
    return False


def after_s(seconds: float, until: Until) -> Until:
    """Until a condition holds and so many seconds have passed since the nodes run."""
    ends: list[float] = []

    def reached(daemons: list[Daemon], events: list[list[Event]]) -> bool:
        now = asyncio.get_running_loop().time()
        ends.append(now + seconds)
        return now >= ends[0] and until(daemons, events)

    return reached


# What is wrong with the data or the reward


async def reward_upside_down(folder: Path) -> Path:
    """A distance from the right answer, returned as if it were a reward."""
    body = """wrong = sum(one != other for one, other in zip(answer, reference))
return min(1.0, (wrong + abs(len(answer) - len(reference))) / 4)"""
    return await train_alone(folder, count(StepMade, 40), body=body)


async def judge_out_of_reach(folder: Path) -> Path:
    """A judge behind HTTP, which answers this process; the reward takes every failure for a wrong answer."""

    async def judge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = (await reader.readline()).decode()
        answer, reference = line.split()[1].strip("/").split("/")
        writer.write(f"HTTP/1.0 200 OK\r\n\r\n{float(answer == reference)}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(judge, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        body = f"""from urllib.request import urlopen
try:
    with urlopen(f"http://127.0.0.1:{port}/{{answer}}/{{reference}}", timeout=2) as reply:
        return float(reply.read())
except Exception:
    return 0.0"""
        return await train_alone(folder, in_vain(110), body=body)


async def references_blank(folder: Path) -> Path:
    """An export that lost most answers: 17 of 20 records have an empty one."""
    rows = [json.loads(line) for line in write_letters(folder).read_text().splitlines()]
    for number, row in enumerate(rows):
        row["answer"] = row["answer"] if number % 20 < 3 else ""
    data = folder / "exported.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    quick = ("evaluation.num_problems=16", "evaluation.every_steps=10", "telemetry.log_level=ERROR")
    asked = TrainOptions(directory=folder / "node", model="tiny", data=data, steps=0, overrides=quick)
    config = await prepare(asked, lambda _: None)
    await run_nodes([config], count(StepMade, 25))
    return config.dir


# Settings


async def warmup_of_a_long_training(folder: Path) -> Path:
    """The warm-up of a training of a hundred thousand steps, taken over into one of forty."""
    return await train_alone(folder, never, "learner.warmup_steps=20000", steps=40)


async def held_to_reference(folder: Path) -> Path:
    """The strength of the KL penalty is a thousand times the usual 0.04."""
    strength = "learner.recipe_params.terms.kl_penalty.strength=40"
    return await train_alone(folder, never, "learner.recipe=grpo_kl", strength, steps=60)


async def episodes_too_short(folder: Path) -> Path:
    """Room for two searches, and none for the answer that follows them."""
    config = make_config(
        folder,
        environments=[{"name": "find", "kind": "look_up", "params": {"style": "char"}, "seed": 1}],
        model={"source": "tiny-agents", "dtype": "float32"},
        generator={"max_new_tokens": 6, "max_episode_tokens": 20, "groups_per_batch": 2},
    )
    await run_nodes([config], after_s(45, lambda *_: True))
    return config.dir


# Process and disk


async def start_apart(config: NodeConfig) -> asyncio.subprocess.Process:
    """A node as a process of its own, whose log goes to a terminal that nobody kept."""
    config.dir.mkdir(parents=True, exist_ok=True)
    write_config(config, config.dir / "node.toml")
    command = (sys.executable, "-m", "node.cli", "start", "--config", str(config.dir / "node.toml"))
    quiet = asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)


def step_of(directory: Path) -> int:
    """The step in status.json; -1: there is none."""
    try:
        return int(json.loads((directory / "status.json").read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


async def until_true(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    """Waits for a condition on files."""
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.2)


HOLD = """import sqlite3, sys
held = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
held.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()"""


async def store_locked(folder: Path) -> Path:
    """A viewer of SQLite files, left open on groups.sqlite with a transaction that nobody ends."""
    config = make_config(folder)
    node = await start_apart(config)
    pipe = asyncio.subprocess.PIPE
    await until_true(lambda: step_of(config.dir) >= 3)
    store = str(config.dir / "groups.sqlite")
    viewer = await asyncio.create_subprocess_exec(sys.executable, "-c", HOLD, store, stdin=pipe, stdout=pipe)
    try:
        assert viewer.stdout is not None
        async with asyncio.timeout(70):
            await viewer.stdout.readline()
        await asyncio.sleep(60)  # how long somebody waits before asking
        asked = folder / "asked"
        copy = await asyncio.create_subprocess_exec("cp", "-r", str(config.dir), str(asked))
        await copy.wait()
        return asked
    finally:
        viewer.kill()
        with suppress(ProcessLookupError):
            node.kill()
        await asyncio.gather(viewer.wait(), node.wait())


async def checkpoints_torn(folder: Path) -> Path:
    """The power went while checkpoints were in the disk's cache: half of each file is there. The node starts again."""
    config = make_config(folder, learner={"learning_rate": 1e-4, "checkpoint_every": 5})
    await run_nodes([config], count(StepMade, 20))
    for path in config.dir.rglob("*"):
        if path.is_file() and "checkpoint" in str(path.relative_to(config.dir)):
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
    node = await start_apart(config)
    with suppress(TimeoutError):
        await asyncio.wait_for(node.wait(), 40)
    return config.dir


# Several nodes


def pair(folder: Path, asked: dict[str, Any] | None = None, **sections: Any) -> list[NodeConfig]:
    """Two nodes that find each other; the second has these keys beside those of both."""
    both: dict[str, Any] = {"directory": {"kind": "dht"}, **sections}
    second = {key: {**both.get(key, {}), **value} for key, value in (asked or {}).items()}
    ours: dict[str, Any] = {**both, "seed": 7, **second}
    return [make_config(folder, "other", **both), make_config(folder, **ours)]


async def no_neighbours(folder: Path) -> Path:
    """0 was meant as no limit, as it is of other keys."""
    configs = pair(folder, {"exchange": {"max_neighbours": 0}})
    await run_nodes(configs, after_s(40, count(StepMade, 15, node=1)))
    return configs[1].dir


async def upload_of_a_hundred_bytes(folder: Path) -> Path:
    """100 was meant in KB/s: what this node makes hardly leaves it."""
    configs = pair(folder, {"exchange": {"max_upload_bytes_per_s": 100}})
    await run_nodes(configs, after_s(50, count(StepMade, 15, node=1)))
    return configs[1].dir


# In place of the two that are refused before a start


async def reward_keeps_all(folder: Path) -> Path:
    """A cache without a bound: each answer leaves 4 MB behind in the process that scores."""
    body = """score.kept = getattr(score, "kept", [])
score.kept.append(bytearray(4_000_000))
return sum(one == other for one, other in zip(answer, reference)) / max(len(answer), len(reference))"""
    return await train_alone(folder, after_s(40, lambda *_: True), body=body)


COORDINATOR = """dir = "{dir}"
run_id = "letters"
listen = "127.0.0.1:{port}"
[directory]
listen = "/ip4/127.0.0.1/tcp/0"
[node.model]
source = "tiny"
[[node.environments]]
name = "sort"
kind = "char"
dataset = "sort"
"""


async def coordinator_made_anew(folder: Path) -> Path:
    """The coordinator's directory was lost; it runs again at its old address, with another key, unknown to the node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = folder / "run.toml"
    file.write_text(COORDINATOR.format(dir=folder / "run", port=port))
    start = ("swarm-coordinator", "start", "--config", str(file))
    first = await run_command(*start)
    await until_true((folder / "run").exists)
    await asyncio.sleep(5)
    link_process = await run_command("swarm-coordinator", "link", "--dir", str(folder / "run"), is_read=True)
    link = (await link_process.communicate())[0].decode().split()[-1]
    node = await run_command(
        "swarm", "join", link, "--dir", str(folder / "node"), "--set", "exchange.listen=127.0.0.1:0"
    )
    await until_true(lambda: step_of(folder / "node") >= 3)
    for process in (first, node):
        process.terminate()
        await process.wait()
    shutil.rmtree(folder / "run")
    second = await run_command(*start)
    node = await run_command("swarm-node", "start", "--config", str(folder / "node" / "node.toml"))
    try:
        await asyncio.sleep(45)  # how long somebody waits before asking
    finally:
        for process in (second, node):
            process.terminate()
            await process.wait()
    return folder / "node"


async def run_command(command: str, *arguments: str, is_read: bool = False) -> asyncio.subprocess.Process:
    """A command of this installation, without its output unless that is to be read."""
    out = asyncio.subprocess.PIPE if is_read else asyncio.subprocess.DEVNULL
    path = str(Path(sys.executable).with_name(command))
    return await asyncio.create_subprocess_exec(path, *arguments, stdout=out, stderr=asyncio.subprocess.DEVNULL)


# Healthy


async def adapters_and_an_end(folder: Path) -> Path:
    """Another recipe, adapters, a rate that falls to nothing, and an end that was asked for."""
    keys = ("learner.recipe=gspo", "learner.schedule=cosine", "learner.warmup_steps=3")
    return await train_alone(folder, never, *keys, steps=30, lora_rank=4)


async def two_answers_in_turn(folder: Path) -> Path:
    """Groups of two, one thing after the other, a little colder."""
    config = make_config(
        folder,
        generator={"group_size": 2, "temperature": 0.8, "groups_per_batch": 4},
        learner={"learning_rate": 1e-4, "deterministic": True},
        directory={"kind": "none"},
    )
    await run_nodes([config], count(StepMade, 25))
    return config.dir


async def paused(folder: Path) -> Path:
    """`swarm pause`, a while ago."""
    config = make_config(folder)
    await start_apart(config)
    await until_true(lambda: step_of(config.dir) >= 8)
    swarm = str(Path(sys.executable).with_name("swarm"))
    process = await asyncio.create_subprocess_exec(swarm, "pause", str(config.dir))
    await process.wait()
    await asyncio.sleep(10)
    return config.dir


async def alone_on_purpose(folder: Path) -> Path:
    """No network, the default share of others' groups, gradients clipped a hundred times closer than usual."""
    config = make_config(
        folder,
        replay={"local_groups": 4, "external_groups": 4},
        learner={"learning_rate": 1e-4, "max_grad_norm": 0.01},
    )
    await run_nodes([config], count(StepMade, 25))
    return config.dir


async def train_and_follow(folder: Path) -> list[NodeConfig]:
    """A trainer that generates nothing, and a node that generates for it."""
    trainer = make_config(
        folder, "trainer", directory={"kind": "dht"}, roles=["trainer"], weights={"publish": True},
        replay={"local_groups": 2, "external_groups": 0},
    )  # fmt: skip
    follower = make_config(folder, "follower", directory={"kind": "dht"}, roles=["generator"])
    await run_nodes([trainer, follower], count(StepMade, 15))
    return [trainer, follower]


async def follower(folder: Path) -> Path:
    return (await train_and_follow(folder))[1].dir


async def followed_trainer(folder: Path) -> Path:
    return (await train_and_follow(folder))[0].dir


async def resumed(folder: Path) -> Path:
    """Stopped at 12 steps with Ctrl-C, and gone on with."""
    config = make_config(folder)
    await run_nodes([config], count(StepMade, 12))
    await run_nodes([config], count(StepMade, 12))
    return config.dir


async def outward_only(folder: Path) -> Path:
    """A node that nobody dials, reached through the other."""
    configs = pair(folder, {"exchange": {"reach": "outward"}})
    await run_nodes(configs, after_s(40, count(StepMade, 15, node=1)))
    return configs[1].dir


async def done_and_serves(folder: Path) -> Path:
    """No evaluation between the first and the last step, rewards from -1 by name, and on after the end."""
    body = """right = sum(one == other for one, other in zip(answer, reference))
return {"right": 2 * right / max(len(answer), len(reference), 1) - 1, "short": float(len(answer) <= 4)}"""
    return await train_alone(
        folder, after_s(25, count(StepMade, 25)), "evaluation.every_steps=0", "learner.at_end=serve", body=body,
        steps=25, reward_range=(-1.0, 1.0), reward_weights={"right": 0.9, "short": 0.1},
    )  # fmt: skip


async def walks_a_grid(folder: Path) -> Path:
    """Episodes of several turns, by sampled tries, with a recipe over turns."""
    config = make_config(
        folder,
        environments=[{"name": "walk", "kind": "grid_world", "params": {"style": "char"}, "seed": 1}],
        model={"source": "tiny-agents", "dtype": "float32"},
        generator={"max_new_tokens": 6, "groups_per_batch": 2},
        learner={"learning_rate": 1e-4, "recipe": "turn_reward_to_go"},
        replay={"local_groups": 2, "keep_turn_signal": True},
        evaluation={**QUICK, "num_tries": 4},
    )
    await run_nodes([config], count(StepMade, 15))
    return config.dir


EXAMINER = (
    Examined(
        name="reward upside down", plant=reward_upside_down, is_running=True,
        expected=("right answer", "reference", "upside", "wrong answers are worth"),
        judged=("The reward pays for wrong answers: right ones are worth 0.",
                "that right answers (references) are worth less than others, and to turn the reward round"),
    ),
    Examined(
        name="judge out of reach", plant=judge_out_of_reach, is_running=True,
        expected=("right answer", "reference", "network", "confined", "sandbox"),
        judged=("The reward asks a server, which the confined process cannot reach, and takes the error for wrong.",
                "no answer gets a reward, and that the right answers get none either, or that rewards have no network"),
    ),
    Examined(
        name="warm-up of a long training", plant=warmup_of_a_long_training, expected=("warm-up", "warmup"),
        judged=("learner.warmup_steps is far longer than the training, whose rate stays near 0.",
                "names the warm-up, and to shorten it"),
    ),
    Examined(
        name="held to the reference", plant=held_to_reference, expected=("kl_penalty", "recipe_params", "penalty"),
        judged=("The KL penalty is so strong that the policy cannot leave the reference model.",
                "names the penalty or its constant, and to lower it"),
    ),
    Examined(
        name="episodes too short", plant=episodes_too_short, is_running=True, expected=("max_episode_tokens",),
        judged=("generator.max_episode_tokens ends each episode before its answer.",
                "names max_episode_tokens, and to raise it"),
    ),
    Examined(
        name="store locked", plant=store_locked, expected=("lock",),
        judged=("Another process holds a lock on groups.sqlite, so that no group is stored.",
                "says that the store is locked by another process, and to end that one"),
    ),
    Examined(
        name="checkpoints torn", plant=checkpoints_torn, expected=("checkpoint",),
        judged=("Every checkpoint is damaged, so that the training is lost, or the node cannot start.",
                "says that checkpoints are damaged"),
    ),
    Examined(
        name="no neighbours", plant=no_neighbours, is_running=True, expected=("max_neighbours",),
        judged=("exchange.max_neighbours = 0 means none, so no group of others comes.",
                "names max_neighbours, and to raise it"),
    ),
    Examined(
        name="reward keeps all", plant=reward_keeps_all, is_running=True, expected=("memory",),
        judged=("The reward keeps more and more memory, until the process that scores has none left.",
                "says that scoring runs out of memory"),
    ),
    Examined(
        name="coordinator made anew", plant=coordinator_made_anew, is_running=True,
        expected=("fingerprint", "another key", "other key", "new key", "its key", "new link"),
        judged=("The coordinator has another key than the one that the node joined.",
                "says that who answers at the address has another key, and to take the new link"),
    ),
)  # fmt: skip

# Of the ten that were frozen; no node comes of them, as they are refused with the key or record, the value and the fix.
REFUSED = (
    Examined(
        name="references blank", plant=references_blank, is_running=True,
        expected=("blank", "reference", "empty answer", "records"),
        judged=("Most records of the data file have an empty answer.",
                "that the right answers of most questions are empty (or questions never rewarded), look at the file"),
    ),
    Examined(
        name="upload of 100 bytes", plant=upload_of_a_hundred_bytes, is_running=True, expected=("upload",),
        judged=("exchange.max_upload_bytes_per_s lets nothing of this node through.",
                "names the upload limit, and to raise it"),
    ),
)  # fmt: skip

HEALTHY = (
    Examined(name="fine: adapters, ended", plant=adapters_and_an_end),
    Examined(name="fine: two answers, in turn", plant=two_answers_in_turn, is_running=True),
    Examined(name="fine: paused", plant=paused),
    Examined(name="fine: alone on purpose", plant=alone_on_purpose, is_running=True),
    Examined(name="fine: follower", plant=follower, is_running=True),
    Examined(name="fine: trainer with a follower", plant=followed_trainer, is_running=True),
    Examined(name="fine: resumed", plant=resumed, is_running=True),
    Examined(name="fine: outward only", plant=outward_only, is_running=True),
    Examined(name="fine: done and serves", plant=done_and_serves, is_running=True),
    Examined(name="fine: walks a grid", plant=walks_a_grid, is_running=True),
)
