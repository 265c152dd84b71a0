"""Ten ailments, three healthy nodes, by a fourth examiner who had read neither the rules of `swarm why` nor its page.

Written from the documentation and frozen before anything ran. What counts as right is judged as in
`_ailments_examiner.py`: by words of the sentence or the fix that is said first.
"""

import asyncio
import json
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks._ailing_node import LETTERS, count, make_config, run_nodes, write_letters
from benchmarks._ailments_examiner import Examined, after_s, pair
from benchmarks._ailments_known import in_vain
from benchmarks._ailments_third_examiner import GRADED, PATIENCE_S, REVERSE, examined, start_again, train
from node.daemon import Daemon
from swarm.config import NodeConfig
from swarm.events import Event, StepMade


def either(*conditions: Any) -> Any:
    """Until one of several holds."""

    def reached(daemons: list[Daemon], events: list[list[Event]]) -> bool:
        return any(condition(daemons, events) for condition in conditions)

    return reached


def time_only(*_: object) -> bool:
    """Nothing but the seconds of `after_s`."""
    return True


# Data, reward, prompt


async def references_are_solutions(folder: Path) -> Path:
    """Records as of gsm8k, whose answer is a whole solution with the result behind ####; no --reward was given."""
    rows: list[dict[str, str]] = []
    for line in write_letters(folder).read_text().splitlines():
        record = json.loads(line)
        right = record["answer"]
        rows.append({"question": record["question"], "answer": f"{' '.join(right)} #### {right}"})
    data = folder / "solutions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return await train(folder, either(in_vain(110), count(StepMade, 60)), data=data)


async def first_letter_is_enough(folder: Path) -> Path:
    """A reward of multiple-choice questions, which looks at the first letter alone, on questions that are none."""
    body = "return float(answer[:1] == reference[:1])"
    return await train(folder, either(in_vain(110), count(StepMade, 200)), body=body)


async def prefill_of_another_model(folder: Path) -> Path:
    """A block of environments was copied from a classification, with the beginning of its answers.

    SmolLM2, since the tiny model does not read a prefill: planted in that one it did no harm.
    """
    sums = {
        "name": "sums", "kind": "reasoning_gym", "dataset": "chain_sum", "prefill": "Label (yes or no):",
        "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    }  # fmt: skip
    config = make_config(
        folder,
        worker="process",
        environments=[sums],
        model={"source": "smollm2", "dtype": "bfloat16"},
        generator={"max_new_tokens": 16, "groups_per_batch": 4},
        learner={"learning_rate": 1e-5},
        disk={"checkpoint_at_end": False},
        evaluation={"num_problems": 8},
    )
    await run_nodes([config], after_s(240, time_only), PATIENCE_S)
    return config.dir


# Recipe, batch, evaluation

METHOD = '''"""My method: tokens count the less, the further the policy has moved from their generator."""

import torch

from swarm.objectives.part import Positive, Scored, TokenLosses, WeightPart
from swarm.objectives.parts import GroupCentred, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe


class Fading(WeightPart):
    """REINFORCE, each token weighted by how little its probability changed."""

    equation = "L_t = sg[exp(-|log r| / width)] A log pi_t"
    width: Positive = 1.0  # nats

    def __call__(self, scored: Scored) -> TokenLosses:
        weight = torch.exp(-scored.log_ratio.detach().abs() / self.width)
        return TokenLosses(losses=weight * scored.advantages * scored.logprobs, bounded=weight < 0.5)


RECIPE = Recipe(
    name="my_method",
    title="Fading",
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=Fading(),
    aggregate=TokenMean(),
)
'''


async def minus_forgotten(folder: Path) -> Path:
    """A recipe of one's own returns what should rise where a loss is asked for: the minus is missing."""
    path = folder / "my_method.py"
    path.write_text(METHOD)
    until = either(in_vain(60), count(StepMade, 80))
    return await train(folder, until, f"learner.recipe={path}:RECIPE", body=GRADED)


async def batch_of_thousands(folder: Path) -> Path:
    """A batch size of 4,000 sequences was wanted, and replay.local_groups counts groups of eight."""
    config = make_config(folder, replay={"local_groups": 4000, "external_groups": 0})
    await run_nodes([config], after_s(120, time_only), PATIENCE_S)
    return config.dir


async def evaluates_all_the_time(folder: Path) -> Path:
    """A smooth curve was wanted: 2,000 problems of either kind after each step."""
    config = make_config(folder, evaluation={"every_steps": 1, "num_problems": 2000})
    await run_nodes([config], after_s(100, count(StepMade, 3)), PATIENCE_S)
    return config.dir


# Several nodes


def publisher(folder: Path) -> NodeConfig:
    """A trainer that others can follow."""
    return make_config(folder, "trainer", directory={"kind": "dht"}, weights={"publish": True})


async def follows_an_old_id(folder: Path) -> Path:
    """The trainer was set up anew and has another key; follow.policy of the generator names the old one."""
    follower = make_config(
        folder, "follower", directory={"kind": "dht"}, roles=["generator"], follow={"policy": "3f" * 32}
    )
    await run_nodes([publisher(folder), follower], after_s(75, time_only), PATIENCE_S)
    return follower.dir


async def both_outward(folder: Path) -> Path:
    """Two friends at home, both with reach = "outward", no coordinator and nobody who relays."""
    configs = pair(folder, exchange={"reach": "outward"})
    await run_nodes(configs, after_s(75, count(StepMade, 15, node=1)), PATIENCE_S)
    return configs[1].dir


async def no_server_there(folder: Path) -> Path:
    """engine.url names a server that is not started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    follower = make_config(
        folder,
        "follower",
        worker="process",
        directory={"kind": "dht"},
        roles=["generator"],
        engine={"kind": "openai", "url": f"http://127.0.0.1:{port}/v1", "options": {"weights": "none"}},
    )
    await run_nodes([publisher(folder), follower], after_s(90, time_only), PATIENCE_S)
    return follower.dir


# Machine


async def data_moved(folder: Path) -> Path:
    """The folder was tidied up: the file of questions lies elsewhere when the training is to go on."""
    directory = await train(folder, count(StepMade, 12), body=GRADED)
    (folder / "letters.jsonl").rename(folder / "questions-of-november.jsonl")
    node = await start_again(directory)
    with suppress(TimeoutError):
        await asyncio.wait_for(node.wait(), 90)
    return directory


# Healthy


async def looks_up_by_parts(folder: Path) -> Path:
    """Episodes of several turns, worth their outcome and the share that was found, judged by sampled tries."""
    env = {
        "name": "find", "kind": "look_up", "params": {"style": "char"}, "seed": 1,
        "reward_weights": {"outcome": 0.75, "found": 0.25},
    }  # fmt: skip
    config = make_config(
        folder,
        environments=[env],
        model={"source": "tiny-agents", "dtype": "float32"},
        generator={"max_new_tokens": 6, "groups_per_batch": 2},
        learner={"learning_rate": 1e-4, "recipe": "turn_reward_to_go"},
        replay={"local_groups": 2, "keep_turn_signal": True},
        evaluation={"num_tries": 4},
    )
    await run_nodes([config], count(StepMade, 25), PATIENCE_S)
    return config.dir


async def goes_on_past_its_end(folder: Path) -> Path:
    """Done at 20 steps with a rate that had fallen, then told to make 40; small passes, layers computed again."""
    learner = {"learning_rate": 1e-4, "schedule": "linear", "gradient_checkpointing": True, "token_budget": 512}
    for num_steps in (20, 40):
        config = make_config(folder, learner={**learner, "num_steps": num_steps})
        await run_nodes([config], lambda *_: False, PATIENCE_S)
    return config.dir


async def one_task_to_itself(folder: Path) -> Path:
    """Of two tasks a node shares one, with a peer that has no other, and keeps the other one to itself."""
    both: dict[str, Any] = {"directory": {"kind": "dht"}}
    own = [LETTERS, {**REVERSE, "exchange": "own"}]
    configs = [make_config(folder, "other", **both), make_config(folder, seed=7, environments=own, **both)]
    await run_nodes(configs, after_s(40, count(StepMade, 20, node=1)), PATIENCE_S)
    return configs[1].dir


FOURTH_EXAMINER = examined(
    (
        (
            "references are solutions", references_are_solutions, False,
            ("####", "contain", "inside", "part of the reference", "more than the answer", "longer than", "ends with",
             "end with", "whole", "exactly the reference"),
            "The right answer of a record is a whole solution, which an answer would have to repeat letter by letter.",
            "says, or shows by an example, that references hold more than an answer does, or to compare the end only",
        ),
        (
            "first letter is enough", first_letter_is_enough, False,
            ("strict", "lenient", "not the reference", "other than the reference", "differ from the reference",
             "unlike the reference", "not the right answer", "wrong answers", "wrong ones", "right from wrong"),
            "The reward looks at the first letter, so that wrong answers are worth as much as right ones.",
            "says that answers which are not the right one get the full reward, or to make the reward stricter",
        ),
        (
            "prefill of another model", prefill_of_another_model, True, ("prefill",),
            "environments.prefill begins each answer with words that the model was never trained on.",
            "names prefill",
        ),
        (
            "minus forgotten", minus_forgotten, True,
            ("the sign", "wrong sign", "less likely", "learner.recipe", "my_method", "own recipe",
             "recipe of your own", "recipe of one's own"),
            "The recipe of one's own has the wrong sign: it makes better answers less likely.",
            "names the recipe or its sign as what is wrong",
        ),
        (
            "batch of thousands", batch_of_thousands, True, ("local_groups",),
            "replay.local_groups = 4000: a step waits for 32,000 answers.",
            "names local_groups, and to lower it",
        ),
        (
            "evaluates all the time", evaluates_all_the_time, True, ("evaluat", "num_problems"),
            "Nearly all of the time goes into an evaluation after each step.",
            "says that evaluations take the time, or names evaluation.every_steps or num_problems",
        ),
        (
            "follows an old id", follows_an_old_id, True,
            ("follow.policy", "follow policy", "names another", "node id", "id of the trainer", "trainer's id"),
            "follow.policy names a node that is not there; the trainer that is there has another id.",
            "names follow.policy, or says that the trainer that is named is another one than the one that is there",
        ),
        (
            "both outward", both_outward, True, ("outward", "relay", "exchange.reach"),
            "Neither of the two nodes can be dialled, and nobody relays.",
            "names exchange.reach, or says that a relay is missing",
        ),
        (
            "no server there", no_server_there, True, ("engine.url", "http://127.0.0.1", "server", "openai"),
            "Nobody answers at engine.url.",
            "names engine.url, or says that the server that should generate does not answer",
        ),
        (
            "data moved", data_moved, False, ("letters.jsonl",),
            "The file of questions is gone from where node.toml says, and the node does not start any more.",
            "names the file",
        ),
    )
)  # fmt: skip

FOURTH_HEALTHY = (
    Examined(name="fine: looks up, by parts", plant=looks_up_by_parts, is_running=True),
    Examined(name="fine: goes on past its end", plant=goes_on_past_its_end),
    Examined(name="fine: one task to itself", plant=one_task_to_itself, is_running=True),
)
