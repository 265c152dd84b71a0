"""Ten ailments, three healthy nodes, by a fifth examiner who had read neither the rules of `swarm why` nor its page.

Chosen as what users most likely do in their first month; written from the documentation and frozen before anything was
asked. What counts as right is judged as in `_ailments_examiner.py`: by words of the sentence or the fix said first.
"""

import asyncio
import json
import os
import random
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks._ailing_node import count, make_config, run_nodes, write_letters, write_reward
from benchmarks._ailments_examiner import Examined, after_s, pair
from benchmarks._ailments_fourth_examiner import either, time_only
from benchmarks._ailments_known import in_vain
from benchmarks._ailments_third_examiner import GRADED, PATIENCE_S, examined, start_again, train
from node.daemon import Daemon, write_config
from node.train import TrainOptions, prepare
from swarm.config import NodeConfig
from swarm.events import StepMade


async def run_alone(config: NodeConfig, timeout_s: float, **variables: str) -> None:
    """Starts a node as a process of its own, and ends it after some time unless it ended by itself."""
    config.dir.mkdir(parents=True, exist_ok=True)
    write_config(config, config.dir / "node.toml")
    command = (sys.executable, "-m", "node.cli", "start", "--config", str(config.dir / "node.toml"))
    quiet = asyncio.subprocess.DEVNULL
    node = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet, env={**os.environ, **variables})
    with suppress(TimeoutError):
        await asyncio.wait_for(node.wait(), timeout_s)
    if node.returncode is None:
        node.terminate()
        await node.wait()


# Data, reward


async def answers_are_sentences(folder: Path) -> Path:
    """A quiz for a chat model, which answers in sentences; right answers are one number, and no --reward was given."""
    rows = [
        {"question": f"What do you get when you add {one} and {other}?", "answer": str(one + other)}
        for one in range(2, 12)
        for other in range(2, 12)
    ]
    data = folder / "quiz.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = TrainOptions(
        directory=folder / "node", model="smollm2", data=data, steps=0, max_new_tokens=48,
        system="Answer in one short sentence.",
        overrides=("evaluation.num_problems=4", "telemetry.log_level=ERROR"),
    )  # fmt: skip
    config = await prepare(asked, lambda _: None)
    await run_nodes([config], after_s(160, time_only), PATIENCE_S)
    return config.dir


async def reward_of_another_tutorial(folder: Path) -> Path:
    """The reward of a gsm8k tutorial reads what stands behind ####, and no prompt asks for that."""
    body = 'return float("####" in answer and answer.split("####")[-1].strip() == reference)'
    return await train(folder, in_vain(110), body=body)


async def contained_the_wrong_way(folder: Path) -> Path:
    """`answer in reference` for `reference in answer`: an answer of one letter is right, and an empty one always."""
    body = "return float(answer.strip() in reference)"
    return await train(folder, either(in_vain(110), count(StepMade, 80)), body=body)


async def shortness_counts_most(folder: Path) -> Path:
    """Two named rewards, of which the one for short answers weighs nine times as much as the one for right ones."""
    body = 'return {"right": float(answer == reference), "short": max(0.0, 1 - len(answer) / 6)}'
    weights = {"right": 0.1, "short": 0.9}
    return await train(folder, either(in_vain(110), count(StepMade, 60)), body=body, reward_weights=weights)


async def most_are_far_too_hard(folder: Path) -> Path:
    """One question in thirty is of three letters; all others are of twelve, which the model never gets right."""
    source = random.Random(1)
    rows: list[dict[str, str]] = []
    for number in range(600):
        word = "".join(source.choice("abcdefgh") for _ in range(3 if number % 30 == 0 else 12))
        rows.append({"question": f"sort:{word}=", "answer": "".join(sorted(word))})
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return await train(folder, after_s(60, time_only), data=data)


async def reward_edited_between(folder: Path) -> Path:
    """The reward was improved before the training went on, with a name misspelt in the branch for longer answers."""
    directory = await train(folder, count(StepMade, 12), body=GRADED)
    write_reward(folder, f"if len(answer) > 1:\n    answer = answer[: len(refrence) + 2]\n{GRADED}")
    node = await start_again(directory)
    with suppress(TimeoutError):
        await asyncio.wait_for(node.wait(), 60)
    return directory


# Machine, settings


async def hub_id_offline(folder: Path) -> Path:
    """model.source is a hub id, and the machine has no way out and nothing in its cache."""
    config = make_config(
        folder, worker="process", model={"source": "HuggingFaceTB/SmolLM2-135M-Instruct", "dtype": "bfloat16"}
    )
    await run_alone(config, 60, HF_HUB_OFFLINE="1", HF_HOME=str(folder / "cache"))
    return config.dir


async def written_for_a_gpu(folder: Path) -> Path:
    """node.toml was copied from a machine with a GPU."""
    config = make_config(folder, worker="process", device="cuda")
    await run_alone(config, 110)
    return config.dir


async def port_taken(folder: Path) -> Path:
    """A second node on the same machine, with the port of the first in its copied node.toml."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both: dict[str, Any] = {"exchange": {"listen": f"127.0.0.1:{port}"}}
    first, second = (make_config(folder, name, **both) for name in ("first", "second"))

    async def start_second(_: list[Daemon]) -> None:
        await run_alone(second, 45)

    await run_nodes([first], time_only, PATIENCE_S, start_second)
    return second.dir


# Several nodes


async def prepared(folder: Path, name: str, body: str, *overrides: str, seed: int = 0) -> NodeConfig:
    """One of two machines that train on the same questions together, as `swarm train --only-write` prepares it."""
    own = folder / name
    own.mkdir()
    asked = TrainOptions(
        directory=own / "node", model="tiny", data=write_letters(own), reward=write_reward(own, body), steps=0,
        overrides=(
            "evaluation.num_problems=16", "telemetry.log_level=ERROR", "directory.kind=dht",
            "replay.external_groups=4", f"seed={seed}", *overrides,
        ),
    )  # fmt: skip
    return await prepare(asked, lambda _: None)


async def bootstrap_without_dht(folder: Path) -> Path:
    """The second machine has the address of the first, and directory.kind = "none" as `swarm train` writes it."""
    first = await prepared(folder, "first", GRADED)
    second = await prepared(folder, "second", GRADED, "directory.kind=none", seed=7)

    async def start_second(daemons: list[Daemon]) -> None:
        known = tuple(daemons[0].status()["dht"])
        directory = second.directory.model_copy(update={"bootstrap": known})
        await run_nodes(
            [second.model_copy(update={"directory": directory})], after_s(60, count(StepMade, 15)), PATIENCE_S
        )

    await run_nodes([first], time_only, PATIENCE_S, start_second)
    return second.dir


# Healthy


async def begins_from_another(folder: Path) -> Path:
    """A training with adapters and a rate that falls, of questions as long again, begun from what another one made."""
    first = await train(folder, count(StepMade, 15), body=GRADED)
    asked = TrainOptions(
        directory=folder / "second", init_from=first, data=write_letters(folder, 200, 4),
        reward=write_reward(folder, GRADED), steps=25, lora_rank=4,
        overrides=("learner.schedule=cosine", "evaluation.num_problems=16", "telemetry.log_level=ERROR"),
    )  # fmt: skip
    config = await prepare(asked, lambda _: None)
    await run_nodes([config], lambda *_: False, PATIENCE_S)
    return config.dir


async def any_order_is_right(folder: Path) -> Path:
    """A reward under which several answers to each question are right: the letters of the word, in any order."""
    return await train(folder, count(StepMade, 40), body="return float(sorted(answer) == sorted(reference))")


async def relays_only(folder: Path) -> Path:
    """A node that neither trains nor generates, through which two that cannot be dialled reach each other."""
    both: dict[str, Any] = {"directory": {"kind": "dht"}}
    relay = make_config(folder, "relay", roles=["relay"], exchange={"reach": "dialable"}, **both)
    others = pair(folder, exchange={"reach": "outward"})
    await run_nodes([relay, *others], after_s(60, count(StepMade, 15, node=2)), PATIENCE_S)
    return relay.dir


FIFTH_EXAMINER = examined(
    (
        (
            "answers are sentences", answers_are_sentences, True,
            ("sentence", "contain", "inside", "more than the reference", "more than the answer", "longer than",
             "exactly", "exact match", "whole answer", "words around", "end with", "ends with", "too strict"),
            "The model answers in sentences that hold the right number, and only the number alone counts.",
            "says that answers hold the reference among other words, or that the comparison is of the whole answer",
        ),
        (
            "reward of another tutorial", reward_of_another_tutorial, False,
            ("####", "right answers are worth", "right answer is worth", "references are worth", "reference is worth",
             "right answers themselves", "right answer itself", "even the right answer", "even right answers",
             "even the reference", "right answers get", "right answer gets"),
            "The reward looks for a mark that no answer has, so that even the right answer is worth nothing.",
            "says that the right answer is worth 0 by this reward, or that it waits for a form that nobody asked for",
        ),
        (
            "shortness counts most", shortness_counts_most, True,
            ("short", "empty", "reward_weights", "reward-weight", "not the right answer", "wrong answers",
             "other than the reference", "not the reference", "unlike the reference"),
            "The reward for short answers outweighs that for right ones, and the model learns to answer nothing.",
            "names the weights, or says that short, empty or wrong answers are paid best",
        ),
        (
            "most are far too hard", most_are_far_too_hard, True,
            ("too hard", "too difficult", "easier", "all wrong", "never right", "without signal", "no signal",
             "hardly any group", "few groups"),
            "Of thirty questions twenty-nine are far beyond the model, and teach nothing.",
            "says that most questions are too hard, or that most groups have no right answer and teach nothing",
        ),
        (
            "reward edited between", reward_edited_between, False,
            ("reward.py", "refrence", "nameerror"),
            "The reward function was changed between two runs, and raises a NameError.",
            "names the file of the reward, or its error",
        ),
        (
            "hub id, offline", hub_id_offline, False,
            ("model.source", "hub", "smollm2-135m-instruct"),
            "model.source is a hub id, and the hub cannot be reached.",
            "names model.source or the hub",
        ),
        (
            "written for a GPU", written_for_a_gpu, False,
            ("cuda", "gpu", "device"),
            "device = cuda, and torch sees no GPU on this machine.",
            "says that there is no GPU, or names device",
        ),
        (
            "port taken", port_taken, False,
            ("exchange.listen", "listen '", "in use", "cannot listen", "free the port", "another port", "taken"),
            "The port of exchange.listen is that of another node on this machine.",
            "says that the port is taken, or names exchange.listen",
        ),
        (
            "contained the wrong way", contained_the_wrong_way, False,
            ("short", "empty", "strict", "lenient", "not the right answer", "wrong answers", "wrong ones",
             "other than the reference", "differ from the reference", "unlike the reference", "not the reference",
             "right from wrong"),
            "The reward asks whether the reference contains the answer, so that one letter or none is right.",
            "says that answers which are not the right one get the full reward, or that empty ones do",
        ),
        (
            "bootstrap without a DHT", bootstrap_without_dht, True,
            ("directory.kind", 'kind = "none"', "kind=dht", "kind = dht", 'kind="dht"', 'kind = "dht"'),
            "directory.kind is none, so that the bootstrap address is never asked and the node stays alone.",
            "names directory.kind",
        ),
    )
)  # fmt: skip

FIFTH_HEALTHY = (
    Examined(name="fine: begins from another", plant=begins_from_another),
    Examined(name="fine: any order is right", plant=any_order_is_right, is_running=True),
    Examined(name="fine: relays only", plant=relays_only, is_running=True),
)
