"""Ailments that nobody had in mind when the rules of `swarm why` were written: taken from the documentation alone.

Rules were frozen before these were planted. What is expected is what a person who knows the cause would call it by.
"""

import asyncio
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks._ailing_node import LETTERS, count, make_config, run_nodes, train_alone, write_letters
from benchmarks._ailments_known import Ailment, SkewedClock, coordinator_of, in_vain, linked, pair, refused
from node.daemon import Daemon
from swarm.config import NodeConfig, load_config
from swarm.errors import SwarmError
from swarm.events import DiskFull, Event, GroupUnscored, StepMade
from swarm.process import load_or_create_identity, make_private
from swarm.types import RefusalReason


async def always_the_likeliest(folder: Path) -> Path:
    """All answers to a question are the same."""
    return await train_alone(folder, in_vain(110), "generator.temperature=0.01")


async def gradients_clipped_away(folder: Path) -> Path:
    return await train_alone(folder, count(StepMade, 40), "learner.max_grad_norm=1e-12")


async def endless_warm_up(folder: Path) -> Path:
    return await train_alone(folder, count(StepMade, 40), "learner.warmup_steps=10000000")


async def weights_decay(folder: Path) -> Path:
    """AdamW takes a tenth of each weight at each step."""
    return await train_alone(
        folder, lambda d, e: in_vain(40)(d, e) or count(StepMade, 60)(d, e), "learner.weight_decay=1000"
    )


async def prompt_unlike_training(folder: Path) -> Path:
    """The model never saw such a question."""
    return await train_alone(folder, in_vain(110), prompt="please: {question}")


async def few_problems(folder: Path) -> Path:
    """Twelve problems, over and over."""
    return await train_alone(
        folder, count(StepMade, 250), "evaluation.num_problems=64", count=16, learning_rate=4e-4, max_new_tokens=6
    )


async def one_key_twice(folder: Path) -> Path:
    """Two nodes of one run, made by a copy of the directory."""
    first, second = make_config(folder, "ada"), make_config(folder, "bell")
    make_private(first.dir)
    make_private(second.dir)
    load_or_create_identity(first.dir / "identity.key")
    shutil.copy(first.dir / "identity.key", second.dir / "identity.key")
    async with coordinator_of(folder, second) as run:
        await run_nodes(
            [linked(first, run), linked(second, run)],
            lambda d, e: count(StepMade, 40, 1)(d, e) and count(StepMade, 40)(d, e),
        )
    return second.dir


def seconds(number: float):  # type: ignore[no-untyped-def]
    """Until so much time has passed since the first look."""
    ends: list[float] = []

    def reached(_: list[Daemon], __: list[list[Event]]) -> bool:
        now = asyncio.get_running_loop().time()
        ends.append(ends[0] if ends else now + number)
        return now > ends[0]

    return reached


async def low_quota(folder: Path) -> Path:
    """A node that takes two groups a minute from each other."""
    return await pair(folder, {}, seconds(40), exchange={"groups_per_minute": 2})


async def peer_keeps_all(folder: Path) -> Path:
    """The only other node keeps its episodes to itself."""
    own = {"name": "sort", "kind": "char", "dataset": "sort", "seed": 1, "exchange": "own"}
    return await pair(folder, {"environments": [own]}, seconds(40))


async def other_run(folder: Path) -> Path:
    """Nodes that meet in one DHT, and name their run differently."""
    return await pair(folder, {"run_id": "ailment"}, seconds(65))


async def no_neighbours(folder: Path) -> Path:
    return await pair(folder, {}, seconds(65), exchange={"max_neighbours": 0})


async def members_of_another(folder: Path) -> Path:
    """The only other node admits members alone, and this one is none."""
    make_private(folder / "ada")
    entry = {"kind": "members", "members": [load_or_create_identity(folder / "ada" / "identity.key").node_id]}
    return await pair(folder, {"entry": entry}, seconds(65))


# --- a second dozen, after the rules had learned from the first ----------------------------------------------


async def buffer_of_one(folder: Path) -> Path:
    """The replay buffer holds fewer groups than a step needs."""
    return await train_alone(folder, seconds(25), "replay.max_groups=1")


async def buffer_of_bytes(folder: Path) -> Path:
    return await train_alone(folder, seconds(25), "replay.max_bytes=1000")


async def groups_too_large(folder: Path) -> Path:
    """Groups of 64 answers in 1,024 bytes."""
    return await train_alone(folder, seconds(20), "exchange.max_group_bytes=1024", "generator.group_size=64")


async def no_room_for_weights(folder: Path) -> Path:
    """A generator whose budget for weights is below one version."""
    trainer: dict[str, object] = {"weights": {"publish": True}}
    return await pair(folder, trainer, seconds(30), roles=["generator"], weights={"store_bytes": 100_000})


async def slow_barrier(folder: Path) -> Path:
    """Every step waits for a node that is thirty times as slow."""
    slow: dict[str, object] = {"faults": {"slow_factor": 30}, "replay": {"barrier": True, "max_age_steps": 0}}
    return await pair(folder, slow, seconds(60), replay={"barrier": True, "max_age_steps": 0})


async def damaged_checkpoints(folder: Path) -> Path:
    """The disk changed every checkpoint of a node that is started again."""
    directory = await train_alone(folder, count(StepMade, 25))
    for path in (directory / "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(b"rubbish" + path.read_bytes()[7:][::-1])
    await run_nodes([load_config(NodeConfig, directory / "node.toml")], seconds(10))
    return directory


async def two_answers_a_group(folder: Path) -> Path:
    """Two tries at each question, of which a model this weak gets hardly ever one right."""
    return await train_alone(folder, seconds(25), "generator.group_size=2", prompt="{question} ")


async def wrong_answers_in_the_data(folder: Path) -> Path:
    """The column of right answers is another one."""
    return await train_alone(folder, in_vain(110), answer="question")


# --- a third set, after settings far from the usual were blamed for what they explain ----------------------------


def agents(folder: Path, env: dict[str, object], **sections: Any) -> NodeConfig:
    """A node of the tiny model of episodes, in one environment."""
    return make_config(
        folder,
        environments=[{"name": "play", "seed": 1, **env}],
        model={"source": "tiny-agents", "dtype": "float32"},
        **sections,
    )


async def one_turn_only(folder: Path) -> Path:
    """A way of several steps, and one turn to walk it."""
    params = {"style": "char", "size": 6, "steps": 6, "max_turns": 6}
    config = agents(folder, {"kind": "grid_world", "params": params}, generator={"max_episode_tokens": 8})
    await run_nodes([config], in_vain(110))
    return config.dir


async def weighs_the_wrong_name(folder: Path) -> Path:
    """Only the part of the reward counts that every answer gets."""
    return await train_alone(
        folder,
        in_vain(110),
        body='return {"right": float(answer == reference), "polite": 1.0 if len(answer) < 99 else 0.0}',
        reward_weights={"polite": 1.0},
    )


async def slow_reward(folder: Path) -> Path:
    """A reward that waits for a second at each answer, as one that asks a server does."""
    return await train_alone(folder, count(GroupUnscored, 5), body="import time\ntime.sleep(1)\nreturn 0.5")


async def little_disk(folder: Path) -> Path:
    """Room for the checkpoints, and next to none for groups."""
    directory = await train_alone(folder, count(DiskFull, 3), "disk.max_bytes=8000000")
    return directory


async def follower_with_another_temperature(folder: Path) -> Path:
    """What it makes for its trainer is refused."""
    trainer: dict[str, object] = {"roles": ["trainer"], "weights": {"publish": True}, "replay": {"local_groups": 2}}
    configs = [
        make_config(folder, "ada", directory={"kind": "dht"}, **trainer),
        make_config(
            folder,
            "bell",
            directory={"kind": "dht"},
            roles=["generator"],
            generator={"max_new_tokens": 9, "temperature": 0.7},
        ),
    ]
    await run_nodes(configs, seconds(70))
    return configs[0].dir


async def nobody_listens_there(folder: Path) -> Path:
    """Both nodes name a port to each other that their routers do not forward."""
    wrong = {"exchange": {"advertise": "127.0.0.1:9", "reach": "dialable", "lookup_every_s": 0.3}}
    return await pair(folder, dict(wrong), seconds(75), **wrong)  # type: ignore[arg-type]


async def broken_download(folder: Path) -> Path:
    """A folder of a model whose weights were not loaded to the end."""
    first = await train_alone(folder, count(StepMade, 3))
    out = folder / "model"
    command = [sys.executable, "-m", "swarm.cli.main", "export", str(first), str(out)]
    await (await asyncio.create_subprocess_exec(*command)).wait()
    weights = next(out.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:5000])
    config = make_config(folder, "second", model={"source": str(out), "dtype": "float32"})
    with suppress(SwarmError):
        await run_nodes([config], seconds(40))
    return config.dir


async def actions_cut_off(folder: Path) -> Path:
    """A search needs four tokens, and a turn has two."""
    params = {"style": "char"}
    config = agents(folder, {"kind": "look_up", "params": params}, generator={"max_new_tokens": 2})
    await run_nodes([config], in_vain(110))
    return config.dir


async def misspelt_member(folder: Path) -> Path:
    """A run of listed nodes, in whose list the id of this one is misspelt."""
    for name in ("ada", "bell"):
        make_private(folder / name)
    ids = [load_or_create_identity(folder / name / "identity.key").node_id for name in ("ada", "bell")]
    entry = {"entry": {"kind": "members", "members": [ids[0], ids[1][:-1] + ("0" if ids[1][-1] != "0" else "1")]}}
    return await pair(folder, dict(entry), seconds(75), **entry)  # type: ignore[arg-type]


async def dead_bootstrap(folder: Path) -> Path:
    """The only address of another node is one of last week."""
    known = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    config = make_config(folder, directory={"kind": "dht", "bootstrap": [known]})
    with suppress(SwarmError):
        await run_nodes([config], seconds(75))
    return config.dir


THIRD = tuple(
    Ailment(name=name, plant=plant, expected=expected)
    for name, plant, expected in (
        (
            "episodes end before the goal can be reached",
            one_turn_only,
            ("generator.max_episode_tokens", "environments.params", "cut_off"),
        ),
        ("weights name the reward that all get", weighs_the_wrong_name, ("environments.reward_weights",)),
        ("a reward that waits a second for each answer", slow_reward, ("cannot_be_scored", "sandbox.timeout_s")),
        ("little room on the disk by disk.max_bytes", little_disk, ("disk.max_bytes",)),
        ("a follower has another temperature", follower_with_another_temperature, ("settings_differ",)),
        ("addresses that nobody listens on", nobody_listens_there, ("cannot_dial", "exchange.advertise")),
        ("a model that was not loaded to the end", broken_download, ("ended_with_error", "worker_dies")),
        ("actions of an episode are cut off", actions_cut_off, ("cut_off", "generator.max_new_tokens")),
        (
            "a list of members with a misspelt id",
            misspelt_member,
            ("entry.kind", "entry.members", "no_entry", "turns_others_away"),
        ),
        ("a bootstrap address of last week", dead_bootstrap, ("alone", "directory.bootstrap", "cannot_dial")),
    )
)
# --- a fourth set, after what the third one showed ---------------------------------------------------------------


async def peer_tries_less(folder: Path) -> Path:
    """The other node asks each question four times, this one eight times."""
    other: dict[str, object] = {"generator": {"max_new_tokens": 9, "group_size": 4}}
    return await pair(folder, other, refused(10, RefusalReason.WRONG_GROUP_SIZE))


async def three_questions(folder: Path) -> Path:
    """A data file that has the same three questions a hundred times."""
    data = folder / "letters.jsonl"

    def repeat(daemons: list[Daemon], events: list[list[Event]]) -> bool:
        return in_vain(110)(daemons, events) or count(StepMade, 150)(daemons, events)

    write_letters(folder, 3)
    data.write_text("".join(data.read_text().splitlines(keepends=True) * 100))
    env = {"name": "own", "kind": "jsonl", "dataset": str(data)}
    config = make_config(folder, environments=[env], learner={"learning_rate": 1e-3})
    await run_nodes([config], repeat)
    return config.dir


async def first_come_first_served(folder: Path) -> Path:
    """A reward that pays every third call."""
    body = "calls = globals().setdefault('calls', [])\ncalls.append(1)\nreturn float(len(calls) % 3 == 0)"
    return await train_alone(folder, count(StepMade, 20), body=body)


async def peer_of_another_base(folder: Path) -> Path:
    """The other node began with the other model of the same tokenizer."""
    other: dict[str, object] = {"model": {"source": "tiny-agents", "dtype": "float32"}}
    return await pair(folder, other, seconds(45))


async def peer_edited_its_data(folder: Path) -> Path:
    """A line more in the other node's copy of the data."""
    envs: list[dict[str, object]] = []
    for name in ("mine", "theirs"):
        (folder / name).mkdir()
        path = write_letters(folder / name)
        envs.append({"name": "own", "kind": "jsonl", "dataset": str(path)})
    with path.open("a") as file:
        file.write('{"question": "sort:hga=", "answer": "agh"}\n')
    return await pair(folder, {"environments": envs[1:]}, seconds(45), environments=envs[:1])


async def peer_with_a_clock_ahead(folder: Path) -> Path:
    """The other node's clock is an hour ahead of this one's, which is right."""

    def made(config: NodeConfig, on_event: Callable[[Event], None]) -> Daemon:
        daemon = Daemon(config, on_event)
        if config.name == "ada":
            daemon.clock = SkewedClock()
        return daemon

    configs = [make_config(folder, name, directory={"kind": "dht"}) for name in ("ada", "bell")]
    await run_nodes(configs, seconds(45), made=made)
    return configs[1].dir


async def checkpoints_deleted(folder: Path) -> Path:
    """To make room, while the node did not run."""
    directory = await train_alone(folder, count(StepMade, 40))
    shutil.rmtree(directory / "checkpoints")
    await run_nodes([load_config(NodeConfig, directory / "node.toml")], count(StepMade, 10))
    return directory


async def no_vllm_there(folder: Path) -> Path:
    """engine.kind = "vllm" on a machine without vLLM."""
    config = make_config(folder, engine={"kind": "vllm"}, worker="process")
    await run_nodes([config], seconds(40))
    return config.dir


async def model_changed_between_runs(folder: Path) -> Path:
    """Another base model in node.toml, and the checkpoints of the one before."""
    first = make_config(folder)
    await run_nodes([first], count(StepMade, 12))
    second = make_config(folder, model={"source": "tiny-agents", "dtype": "float32", "lora_rank": 4})
    await run_nodes([second], seconds(25))
    return second.dir


async def second_task_unknown(folder: Path) -> Path:
    """Of two tasks the model knows one."""
    envs = [LETTERS, {**LETTERS, "name": "odd", "prompt": "what is {question}"}]
    config = make_config(folder, environments=envs)
    await run_nodes([config], count(StepMade, 30))
    return config.dir


FOURTH = tuple(
    Ailment(name=name, plant=plant, expected=expected)
    for name, plant, expected in (
        ("a peer asks each question half as often", peer_tries_less, ("settings_differ", "generator.group_size")),
        ("three questions a hundred times", three_questions, ("few_questions", "overfits")),
        ("a reward that pays every third call", first_come_first_served, ("reward_is_random",)),
        ("a peer of another base model", peer_of_another_base, ("tokens_differ", "settings_differ", "model.source")),
        ("a peer edited its copy of the data", peer_edited_its_data, ("environments_differ",)),
        ("a peer's clock is an hour ahead", peer_with_a_clock_ahead, ("clock_is_wrong", "come_too_late")),
        ("checkpoints are deleted", checkpoints_deleted, ("steps_made_again", "ended_with_error")),
        (
            "an engine that is not installed",
            no_vllm_there,
            ("package_missing", "file_gone", "ended_with_error", "worker_dies", "engine.kind"),
        ),
        ("another model between two runs", model_changed_between_runs, ("ended_with_error", "model.source")),
        ("of two tasks the model knows one", second_task_unknown, ("environment_in_vain", "environments.prompt")),
    )
)
SECOND = tuple(
    Ailment(name=name, plant=plant, expected=expected)
    for name, plant, expected in (
        ("a replay buffer of one group", buffer_of_one, ("replay.max_groups",)),
        ("a replay buffer of 1,000 bytes", buffer_of_bytes, ("replay.max_bytes",)),
        ("groups larger than max_group_bytes", groups_too_large, ("cannot_be_scored",)),
        ("no room for the trainer's weights", no_room_for_weights, ("weights.store_bytes",)),
        ("a barrier with a peer thirty times as slow", slow_barrier, ("barrier_waits", "replay.max_age_steps")),
        ("every checkpoint is damaged", damaged_checkpoints, ("ended_with_error",)),
        ("two answers a question, hardly ever one right", two_answers_a_group, ("all_wrong", "generator.group_size")),
        ("the right answers are another column", wrong_answers_in_the_data, ("all_wrong", "cut_off")),
    )
)
UNSEEN = tuple(
    Ailment(name=name, plant=plant, expected=expected)
    for name, plant, expected in (
        ("temperature .01: equal answers", always_the_likeliest, ("generator.temperature",)),
        ("max_grad_norm 1e-12", gradients_clipped_away, ("learner.max_grad_norm",)),
        ("a warm-up without end", endless_warm_up, ("learner.warmup_steps",)),
        ("weight decay takes a tenth a step", weights_decay, ("weights_decay", "learning_rate_too_high")),
        ("a prompt unlike all that the model knows", prompt_unlike_training, ("all_wrong",)),
        ("twelve problems, 250 steps", few_problems, ("overfits",)),
        ("two nodes with one key", one_key_twice, ("one_key_twice",)),
        ("a quota of two groups a minute", low_quota, ("exchange.groups_per_minute",)),
        ("a peer that keeps its episodes", peer_keeps_all, ("no_external",)),
        ("a peer of another run_id", other_run, ("alone",)),
        ("max_neighbours = 0", no_neighbours, ("exchange.max_neighbours",)),
        ("a peer that admits members only", members_of_another, ("alone", "cannot_dial", "no_entry")),
    )
)
