"""Ten more ailments and three healthy nodes, by an examiner who had not read the rules of `swarm why` or its page.

Written from the documentation and frozen before anything ran. What counts as right is judged as in
`_ailments_examiner.py`: by words of the sentence or the fix that is said first.
"""

import asyncio
import json
import resource
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks._ailing_node import LETTERS, QUICK, Until, count, make_config, run_nodes, write_letters, write_reward
from benchmarks._ailments_examiner import (
    COORDINATOR,
    Examined,
    after_s,
    never,
    pair,
    run_command,
    start_apart,
    step_of,
    until_true,
)
from node.daemon import Daemon
from node.train import TrainOptions, prepare
from swarm.events import StepMade
from swarm.process import load_or_create_identity, make_private

PATIENCE_S = 400.0  # of a machine that has other work
GRADED = "return sum(one == other for one, other in zip(answer, reference)) / max(len(answer), len(reference))"
REVERSE = {"name": "reverse", "kind": "char", "dataset": "reverse", "seed": 1}


async def train(
    folder: Path, until: Until, *overrides: str, data: Path | None = None, body: str = "", **options: Any
) -> Path:
    """A directory of `swarm train` on the tiny model, whose node ran until a condition or its own end."""
    quick = ("evaluation.num_problems=16", "evaluation.every_steps=10", "telemetry.log_level=ERROR")
    asked = TrainOptions(
        directory=folder / "node", model="tiny", data=data or write_letters(folder),
        reward=write_reward(folder, body) if body else "", steps=options.pop("steps", 0),
        overrides=(*quick, *overrides), **options,
    )  # fmt: skip
    config = await prepare(asked, lambda _: None)
    await run_nodes([config], until, PATIENCE_S)
    return config.dir


async def start_again(directory: Path) -> asyncio.subprocess.Process:
    """The node of a directory, as `swarm-node start` starts it."""
    command = (sys.executable, "-m", "node.cli", "start", "--config", str(directory / "node.toml"))
    quiet = asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)


# Data and reward


async def records_contradict(folder: Path) -> Path:
    """Two exports in one file: each question is there four times, each time with another right answer."""
    rows: list[dict[str, str]] = []
    for line in write_letters(folder, 60).read_text().splitlines():
        record = json.loads(line)
        right, word = record["answer"], record["question"][5:-1]
        for answer in (right, right[::-1], word, word[1:] + word[:1]):
            rows.append({"question": record["question"], "answer": answer})
    data = folder / "both.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return await train(folder, count(StepMade, 60), data=data, body=GRADED)


async def range_of_percent(folder: Path) -> Path:
    """--reward-range 0 100 was meant for percent, and the function returns shares from 0 to 1."""
    return await train(folder, count(StepMade, 45), body=GRADED, reward_range=(0.0, 100.0))


# Settings


async def far_too_hot(folder: Path) -> Path:
    """A temperature of 5, for more exploration."""
    return await train(folder, count(StepMade, 45), "generator.temperature=5.0", body=GRADED)


async def adapters_scaled_away(folder: Path) -> Path:
    """lora_alpha was taken for a share, or for the learning rate of the adapters."""
    return await train(folder, never, "model.lora_alpha=0.0001", body=GRADED, steps=45, lora_rank=8)


async def guard_stops_all(folder: Path) -> Path:
    """Whoever wants nothing off-policy at all sets the alarm far below what two ways to compute in bfloat16 differ."""
    config = make_config(
        folder,
        model={"source": "tiny", "dtype": "bfloat16"},
        guard={"loose_kl": 1e-10, "tight_kl": 1e-9, "alarm_kl": 1e-8, "freeze_steps": 100_000},
    )
    await run_nodes([config], count(StepMade, 40), PATIENCE_S)
    return config.dir


async def one_task_never_asked(folder: Path) -> Path:
    """Weights of two tasks where the second was meant as a half, and is a millionth of the first."""
    config = make_config(
        folder,
        environments=[LETTERS, REVERSE],
        generator={"env_weights": {"sort": 50_000.0, "reverse": 0.05}},
    )
    await run_nodes([config], count(StepMade, 45), PATIENCE_S)
    return config.dir


# Several nodes


async def trainer_is_paused(folder: Path) -> Path:
    """Somebody paused the trainer, and asks at the other machine why it generates nothing."""
    trainer = make_config(
        folder, "trainer", directory={"kind": "dht"}, roles=["trainer"], weights={"publish": True},
        replay={"local_groups": 2, "external_groups": 0},
    )  # fmt: skip
    follower = make_config(folder, "follower", directory={"kind": "dht"}, roles=["generator"])

    async def pause(_: list[Daemon]) -> None:
        await until_true(lambda: step_of(trainer.dir) >= 8, 240)
        process = await run_command("swarm", "pause", str(trainer.dir))
        await process.wait()
        await asyncio.sleep(75)  # how long somebody waits before asking

    await run_nodes([trainer, follower], lambda *_: True, PATIENCE_S, pause)
    return follower.dir


async def coordinator_is_gone(folder: Path) -> Path:
    """The machine of the coordinator is switched off; the only other node was on it. The node starts again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = folder / "run.toml"
    file.write_text(COORDINATOR.format(dir=folder / "run", port=port))
    coordinator = await run_command("swarm-coordinator", "start", "--config", str(file))
    node: asyncio.subprocess.Process | None = None
    try:
        await until_true((folder / "run").exists)
        await asyncio.sleep(10)
        asked = await run_command("swarm-coordinator", "link", "--dir", str(folder / "run"), is_read=True)
        link = (await asked.communicate())[0].decode().split()[-1]
        listen = ("--set", "exchange.listen=127.0.0.1:0")
        node = await run_command("swarm", "join", link, "--dir", str(folder / "node"), *listen)
        await until_true(lambda: step_of(folder / "node") >= 3, 240)
    finally:
        for process in (coordinator, node):
            if process is not None:
                process.terminate()
                await process.wait()
    await start_again(folder / "node")
    await asyncio.sleep(90)  # asked while it runs
    return folder / "node"


# Process, machine, misuse


async def out_of_descriptors(folder: Path) -> Path:
    """`ulimit -n` of the machine is below what the node has open: nothing can be opened any more."""
    config = make_config(folder)
    node = await start_apart(config)
    await until_true(lambda: step_of(config.dir) >= 6, 240)
    parent = psutil.Process(node.pid)
    for process in (parent, *parent.children(recursive=True)):
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (16, 16))
    with suppress(TimeoutError):
        await asyncio.wait_for(node.wait(), 60)
    return config.dir


async def key_misspelt_by_hand(folder: Path) -> Path:
    """node.toml was edited after ten steps, with a key that does not exist; the node does not start any more."""
    config = make_config(folder)
    await run_nodes([config], count(StepMade, 10), PATIENCE_S)
    path = config.dir / "node.toml"
    text = path.read_text()
    assert "learning_rate = " in text
    path.write_text(text.replace("learning_rate = ", "learningrate = "))
    node = await start_again(config.dir)
    with suppress(TimeoutError):
        await asyncio.wait_for(node.wait(), 90)
    return config.dir


# Healthy


async def talks_meanwhile(folder: Path) -> Path:
    """A node that is served over HTTP while it trains, with a bound on its disk, and that somebody asks something."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = make_config(folder, serve={"listen": f"127.0.0.1:{port}"}, disk={"max_bytes": 500_000_000})

    async def talk(_: list[Daemon]) -> None:
        await until_true(lambda: step_of(config.dir) >= 3, 240)
        key = (config.dir / "api.key").read_text().strip()
        body = json.dumps({"model": "node", "messages": [{"role": "user", "content": "sort:cab="}], "max_tokens": 8})
        for _number in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST /v1/chat/completions HTTP/1.0\r\nAuthorization: Bearer {key}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            await writer.drain()
            print("served:", (await reader.readline()).decode().strip(), file=sys.stderr)
            writer.close()

    await run_nodes([config], count(StepMade, 25), PATIENCE_S, talk)
    return config.dir


async def two_tasks_three_to_one(folder: Path) -> Path:
    """Two tasks, asked 3 to 1, with two threads, other work going first, and the best weights kept."""
    config = make_config(
        folder,
        environments=[LETTERS, REVERSE],
        generator={"env_weights": {"sort": 3.0, "reverse": 1.0}},
        evaluation={**QUICK, "keep_best": True},
        num_threads=2,
        niceness=10,
    )
    await run_nodes([config], count(StepMade, 30), PATIENCE_S)
    return config.dir


async def listed_and_limited(folder: Path) -> Path:
    """Two listed members of a private run; the one that is asked may upload 200 kB a second."""
    for name in ("other", "node"):
        make_private(folder / name)
    ids = [load_or_create_identity(folder / name / "identity.key").node_id for name in ("other", "node")]
    configs = pair(folder, {"exchange": {"max_upload_bytes_per_s": 200_000}}, entry={"kind": "members", "members": ids})
    await run_nodes(configs, after_s(40, count(StepMade, 20, node=1)), PATIENCE_S)
    return configs[1].dir


def examined(rows: Sequence[tuple[Any, ...]]) -> tuple[Examined, ...]:
    """Name, plant, whether it is asked as if it ran, words, cause, what a fair judge takes."""
    return tuple(
        Examined(name=name, plant=plant, is_running=runs, expected=words, judged=(cause, right))
        for name, plant, runs, words, cause, right in rows
    )


THIRD_EXAMINER = examined(
    (
        (
            "records contradict", records_contradict, True,
            ("contradict", "several answers", "several right answers", "several references", "different references",
             "different answers", "more than one right answer", "more than one answer", "other right answers"),
            "The same question is in the file with several right answers, so that no answer is right.",
            "says that records of the same question have different answers",
        ),
        (
            "range of percent", range_of_percent, True, ("reward_range", "reward-range"),
            "environments.reward_range is a hundred times what the function returns: right answers are worth .01.",
            "names reward_range, or says that even right answers are worth .01 of what the range allows",
        ),
        (
            "far too hot", far_too_hot, True, ("temperature",),
            "generator.temperature = 5 makes answers noise, although the model knows the task.",
            "names the temperature, and to lower it",
        ),
        (
            "adapters scaled away", adapters_scaled_away, False, ("lora_alpha",),
            "model.lora_alpha = 0.0001 scales what adapters add to nothing.",
            "names lora_alpha, and to raise it or leave it out",
        ),
        (
            "guard stops all", guard_stops_all, True,
            ("alarm_kl", "guard.alarm", "guard.tight", "guard.freeze", "threshold"),
            "guard.alarm_kl is below what engines differ by, so that the guard stops nearly every update.",
            "names the guard's threshold, and to raise it",
        ),
        (
            "one task never asked", one_task_never_asked, True,
            ("env_weights", "never asked", "hardly ever asked", "not asked", "hardly asked"),
            "generator.env_weights gives one of two tasks a millionth of the questions.",
            "names env_weights, or says that reverse is never asked",
        ),
        (
            "trainer is paused", trainer_is_paused, True,
            ("paus", "credit", "no new version", "no newer version", "makes no step", "stands still"),
            "The trainer that this node follows is paused, so it grants no credit.",
            "says that the trainer is paused or stands still or gives no credit, and to look there",
        ),
        (
            "coordinator is gone", coordinator_is_gone, False, ("coordinator", "bootstrap"),
            "Nobody answers at the coordinator's address, which is also the only bootstrap peer.",
            "names the coordinator (or the bootstrap address, which is its own) as what does not answer",
        ),
        (
            "out of descriptors", out_of_descriptors, False,
            ("open files", "descriptor", "ulimit", "nofile"),
            "The process may open no more files (ulimit -n).",
            "says that too many files are open, and to raise the limit",
        ),
        (
            "key misspelt by hand", key_misspelt_by_hand, False,
            ("learningrate", "unknown key", "node.toml is not", "node.toml cannot", "node.toml has"),
            "node.toml has a key that does not exist, learner.learningrate, and the node refuses to start.",
            "names the key, or says that node.toml is not valid",
        ),
    )
)  # fmt: skip

THIRD_HEALTHY = (
    Examined(name="fine: talks meanwhile", plant=talks_meanwhile, is_running=True),
    Examined(name="fine: two tasks, three to one", plant=two_tasks_three_to_one, is_running=True),
    Examined(name="fine: listed, upload limited", plant=listed_and_limited, is_running=True),
)
