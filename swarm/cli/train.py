"""The command `swarm train`."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from swarm.cli.shared_options import MaxDisk, MaxUpload, RewardWeight, Threads, Trust, machine_overrides, parse_weights
from swarm.command_line import waiting


def train(
    directory: Annotated[Path, Argument(help="Directory of the training, new or to go on with.")] = Path("swarm-train"),
    model: Annotated[str, Option("--model", "-m", help="smollm2, a folder, a hub id; or tiny, for a quick try.")] = "",
    init_from: Annotated[
        Path | None,
        Option("--init-from", help="Node's directory or export, in place of --model."),
    ] = None,
    resume: Annotated[
        bool,
        Option("--resume", help="Only go on; never begin a new training."),
    ] = False,
    data: Annotated[
        Path | None, Option("--data", "-d", help="Questions: .jsonl, parquet, csv, json, folder or hub id.")
    ] = None,
    subset: Annotated[str, Option(help="Configuration of a dataset that has several.")] = "",
    split: Annotated[str, Option(help="Split of a dataset.")] = "train",
    reward: Annotated[
        str, Option("--reward", "-r", help="my_file.py:score(question, answer, reference) -> number in [0, 1].")
    ] = "",
    reward_range: Annotated[
        tuple[float, float] | None, Option(help="LOW HIGH: what the function may return, rescaled to [0, 1].")
    ] = None,
    reward_weight: RewardWeight = None,
    env: Annotated[
        list[str] | None,
        Option("--env", "-e", help="Tasks: KIND[:DATASET], such as reasoning_gym:gcd. Repeatable."),
    ] = None,
    steps: Annotated[int | None, Option(min=0, help="Optimizer steps in all; 0: until Ctrl-C. Default 100.")] = None,
    question: Annotated[str, Option(help="Field with the question; `messages` is known, too.")] = "question",
    answer: Annotated[str, Option(help="Field with the right answer.")] = "answer",
    prompt: Annotated[str, Option(help="Template of the user message, with {question}.")] = "{question}",
    system: Annotated[str, Option(help="System message.")] = "",
    prefill: Annotated[str, Option(help="How each answer begins, such as 'Answer:'; the model goes on.")] = "",
    max_new_tokens: Annotated[
        int | None, Option(min=1, help="Longest answer or turn, in tokens. Default 256; tiny 16.")
    ] = None,
    learning_rate: Annotated[
        float | None, Option("--lr", min=0, help="Default 1e-5; 1e-4 with adapters or tiny.")
    ] = None,
    lora_rank: Annotated[int, Option("--lora-rank", min=0, help="Train adapters of this rank; 0: all weights.")] = 0,
    warm_up: Annotated[
        str, Option("--warm-up", help="Imitate right answers before step 1: references, or a FILE.jsonl of them.")
    ] = "",
    recipe: Annotated[str, Option(help="Objective: see `swarm recipes list`, or my_recipe.py:RECIPE.")] = "",
    set_: Annotated[list[str] | None, Option("--set", help="Override one key of the configuration.")] = None,
    threads: Threads = None,
    max_upload: MaxUpload = "",
    max_disk: MaxDisk = "",
    patient: Annotated[bool, Option("--patient", help="Go on although nothing can be learned.")] = False,
    only_write: Annotated[bool, Option("--only-write", help="Write node.toml and stop.")] = False,
    trust: Trust = False,
) -> None:
    """Train a model on this machine alone: questions and a reward in, a model out. No network.

      swarm train -m smollm2 --data quiz.jsonl --reward my.py:score
      swarm train -m tiny --env char:sort --steps 200
      swarm train swarm-train --steps 400                  goes on with the training that is there

    Each line of the file is a record with `question` and `answer` (or `messages`, and --answer). Without --reward the
    answer must be the same text or number. Ctrl-C saves and stops. Then: swarm samples, eval, chat, export.
    """
    with waiting("loading the packages"):
        from node.train import prepare
        from node.train import train as run
        from node.train_options import TrainOptions
        from swarm.telemetry import setup_logging

    options = TrainOptions(
        directory=directory,
        model=model,
        init_from=init_from,
        must_exist=resume,
        data=data,
        subset=subset,
        split=split,
        reward=reward,
        reward_range=reward_range,
        reward_weights=parse_weights(reward_weight),
        environments=tuple(env or ()),
        question=question,
        answer=answer,
        prompt=prompt,
        system=system,
        prefill=prefill,
        steps=steps,
        max_new_tokens=max_new_tokens,
        learning_rate=learning_rate,
        lora_rank=lora_rank,
        warm_up=warm_up,
        recipe=recipe,
        overrides=(*machine_overrides(threads, max_upload, max_disk), *(set_ or ())),
        is_trusted=trust,
    )
    if only_write:
        with waiting("looking at the questions, the reward and this machine"):
            asyncio.run(prepare(options, typer.echo))
        typer.echo(f"written: {directory / 'node.toml'}")
    else:
        asyncio.run(run(options, typer.echo, patient, setup_logging))
