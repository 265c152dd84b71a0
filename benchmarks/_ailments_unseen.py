"""Ailments that nobody had in mind when the rules of `swarm why` were written: taken from the documentation alone.

Rules were frozen before these were planted. What is expected is what a person who knows the cause would call it by.
"""

import asyncio
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from benchmarks._ailing_node import count, make_config, run_nodes, train_alone
from benchmarks._ailments_known import Ailment, coordinator_of, in_vain, linked, pair
from node.daemon import Daemon
from swarm.config import NodeConfig, load_config
from swarm.errors import SwarmError
from swarm.events import DiskFull, Event, GroupUnscored, StepMade
from swarm.process import load_or_create_identity, make_private


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


def agents(folder: Path, env: dict[str, object], **sections: object) -> NodeConfig:
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
