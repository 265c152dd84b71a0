"""Commands around what a node made: samples, and its model: export, verify, eval, chat."""

import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from swarm.cli.reward_weights import RewardWeight, parse_weights
from swarm.config import NODE_FILE, CoordinatorConfig, EnvironmentConfig, NodeConfig, has_section, load_config
from swarm.errors import ConfigError
from swarm.printable import printable

if TYPE_CHECKING:
    from swarm.trained.evaluation import EnvironmentScore, Mean
    from swarm.trained.formats import Format
    from swarm.trained.hub import Pushed
    from swarm.trained.model import TrainedModel, WhichStep
    from swarm.trained.samples import Sample

console = Console()
PROVENANCE_FILE = "provenance.json"  # of an export


def _step(text: str) -> "WhichStep":
    if text != "best" and not text.isdecimal():
        raise typer.BadParameter(f"{text!r}: expected the number of a step, or best")
    return "best" if text == "best" else int(text)


Target = Annotated[
    str,
    typer.Argument(help="Directory of a node (its newest checkpoint), folder of a model, hub id, or smollm2 or tiny."),
]
Step = Annotated[
    Any,  # int, "best" or None; typer takes no such union
    typer.Option(
        "--step", parser=_step, metavar="N|best", help="Of the node: a checkpoint, or best; without, the newest."
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, or cuda:0 and so on.")]


def export(
    directory: Annotated[
        Path, typer.Argument(help="Directory of the node, which may be running; with --push also an export.")
    ],
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to make; with --push it can be left out.", show_default=False)
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            help="hf (a Hugging Face folder, adapters merged), peft (the adapter alone), gguf (llama.cpp, Ollama).",
        ),
    ] = "hf",
    step: Step = None,
    push: Annotated[
        str, typer.Option("--push", metavar="NAME|OWNER/NAME", help="Upload it to the Hugging Face hub as this.")
    ] = "",
    public: Annotated[bool, typer.Option("--public", help="With --push: everybody sees it. Else its owner.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --push: only list what would be sent.")] = False,
) -> None:
    """Take a trained model out: files for transformers, vLLM, PEFT or llama.cpp, with a model card.

    The model is that of the node's newest checkpoint; a stop with Ctrl-C saves one. provenance.json says which run,
    recipe and peers made it, and is signed by the node.

      swarm export swarm-node my-model                    a folder for from_pretrained("my-model")
      swarm export swarm-node my-model --push my-model    the same, and on a hub, private
      swarm export my-model --push my-model               what was exported before
    """
    from swarm.trained.formats import require_format

    known = require_format(kind)
    if not push and (public or dry_run or folder is None):
        what = "FOLDER: name the folder to make" if folder is None else "--public and --dry-run are of an upload"
        raise ConfigError(f"{what}, or name a repository with --push")
    if folder is None and not (directory / NODE_FILE).exists() and (directory / PROVENANCE_FILE).exists():
        return _push(directory, push, public, dry_run)
    _require_node(directory)
    _hide_progress_bars()
    if folder is not None:
        _export(directory, folder, known, step)
        return _push(folder, push, public, dry_run) if push else None
    from swarm.trained.hub import export_to_hub

    _print_pushed(export_to_hub(directory, push, known, step, is_private=not public, is_dry=dry_run), public)


def _push(folder: Path, repo: str, is_public: bool, is_dry: bool) -> None:
    from swarm.trained.hub import push_folder

    _print_pushed(push_folder(folder, repo, is_private=not is_public, is_dry=is_dry), is_public)


def _print_pushed(pushed: "Pushed", is_public: bool) -> None:
    for name, size in pushed.sizes_bytes.items():
        _plain(f"{size / 1e6:9.3f} MB  {name}")
    whose = "public" if is_public else "private"
    total = f"{len(pushed.sizes_bytes)} files, {sum(pushed.sizes_bytes.values()) / 1e6:.1f} MB"
    sent = f"sent to {pushed.repo} ({whose}): {pushed.url}" if pushed.url else f"would go to {pushed.repo} ({whose})"
    _plain(f"{total} {sent}")


def _export(directory: Path, folder: Path, kind: "Format", step: "WhichStep") -> None:
    from swarm.trained.export import export_model

    try:
        done = export_model(directory, folder, kind, step, time.time())
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error}; make room there or name another place") from None
    console.print(
        f"step {done.version.step} ({done.version.digest.hex()[:16]}) is in {done.folder}: {kind}, "
        f"{done.size_bytes / 1e6:.1f} MB",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def verify(folder: Annotated[Path, typer.Argument(help="Folder that `swarm export` made.")]) -> None:
    """Check an exported model: every file is as the node signed it. Shows who made it, from what."""
    from swarm.trained.provenance import verify_export

    found = verify_export(folder)
    for key, value in (
        ("signed by", found.node_id),
        ("files", f"{len(found.digests)}, all as signed"),
        ("model", f"step {found.step} of run {found.run_id}, from {found.base_model}"),
        ("recipe", found.recipe),
        ("version", found.version_digest),
        ("manifest", found.manifest_digest or "none: no run was joined by a link"),
    ):
        _plain(f"{key:<10} {value}")


def evaluate(
    target: Target,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="node.toml or coordinator.toml whose environments to use; not for a node."),
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Own .jsonl file, with `question` and `answer`.")] = None,
    reward: Annotated[
        str, typer.Option("--reward", help="my_file.py:score, with --data; without, the answer must be the same.")
    ] = "",
    reward_range: Annotated[
        tuple[float, float], typer.Option(help="LOW HIGH: what the function may return, rescaled to [0, 1].")
    ] = (0.0, 1.0),
    reward_weight: RewardWeight = None,
    question: Annotated[str, typer.Option(help="Field of a record of --data that asks.")] = "question",
    answer: Annotated[str, typer.Option(help="Field of it with the right answer.")] = "answer",
    env: Annotated[list[str] | None, typer.Option("--env", help="Only this environment. Repeatable.")] = None,
    step: Step = None,
    split: Annotated[
        str, typer.Option(help="held_out: never trained on; all: both. Own data: always all of it.")
    ] = "held_out",
    problems: Annotated[int, typer.Option(min=1, help="Problems of each environment.")] = 64,
    tries: Annotated[int, typer.Option(min=0, max=256, help="Sampled tries at each; 0: greedy answers only.")] = 8,
    temperature: Annotated[float, typer.Option(min=0.01, max=10, help="Of the sampled tries.")] = 1.0,
    max_new_tokens: Annotated[
        int, typer.Option(min=0, help="Longest answer or turn; 0: as the configuration says, else 256.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of problems and samples.")] = 0,
    show: Annotated[int, typer.Option(min=0, help="Print this many problems of each environment with answers.")] = 0,
    save: Annotated[Path | None, typer.Option("--save", help="Write every try as a line of JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    device: Device = "auto",
) -> None:
    """Evaluate a model: greedy, pass@1 and pass@k on the environments of a node, a run, or an own file.

      swarm eval swarm-node                              a node, on its own environments, held-out problems
      swarm eval my-model -c swarm-node/node.toml        an exported model on the same problems
      swarm eval smollm2 --data quiz.jsonl --reward my.py:score --show 3

    Equal options give equal problems, so that two models can be compared.
    """
    from swarm.trained.evaluation import EvaluationPlan, evaluate_model, own_environment, write_tries
    from swarm.trained.model import is_node, load_target
    from swarm.types import EpisodeLimits

    if split not in ("held_out", "all"):
        raise ConfigError(f"--split {split}: expected held_out or all")
    if reward and data is None:
        raise ConfigError(f"--reward {reward}: needs the problems, --data FILE.jsonl")
    if save is not None:
        try:
            save.open("a").close()  # before the work whose result it is to hold
        except OSError as error:
            raise ConfigError(f"--save {save}: cannot be written: {error.strerror}; name another file") from None
    _hide_progress_bars()
    model = load_target(target, step)
    settings = model.config if is_node(target) else None
    if config is not None:
        settings = _settings(config)
    if data is not None:
        fields = {"question": question, "answer": answer}
        environments: Sequence[EnvironmentConfig] = (
            own_environment(data, reward, fields, reward_range, parse_weights(reward_weight)),
        )
        split = "all"
    elif settings is not None:
        environments = _chosen(settings.environments, env or [])
    else:
        raise ConfigError(f"{target} is no node: say on what to evaluate it, --config node.toml or --data FILE.jsonl")
    limits = settings.generator.episode_limits if settings else EpisodeLimits(max_new_tokens=256)
    if max_new_tokens:
        limits = EpisodeLimits(max_new_tokens=max_new_tokens, max_episode_tokens=limits.max_episode_tokens)
    plan = EvaluationPlan(
        environments=tuple(environments),
        limits=limits,
        split=split,
        num_problems=problems,
        num_tries=tries,
        temperature=temperature,
        seed=seed,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        lines = {each.name: bar.add_task(each.name, total=None) for each in environments}
        scores = asyncio.run(
            evaluate_model(
                model, plan, lambda name, done, total: bar.update(lines[name], completed=done, total=total), device
            )
        )
    if save is not None:
        with save.open("w", encoding="utf-8") as file:
            write_tries(scores, file)
    if as_json:
        typer.echo(json.dumps([_figures(each) for each in scores], indent=2))
    else:
        _print_scores(target, model, scores, split)
        for each in scores:
            _print_problems(each, show)
    for each in scores:
        if each.num_unscored:
            said = f"{each.num_unscored} problems of {each.env} could not be scored and are left out"
            typer.echo(printable(f"{said}; the first: {each.why_unscored}"), err=True)
    if any(each.num_unscored for each in scores):
        raise typer.Exit(1)


def chat(
    target: Target,
    message: Annotated[
        str, typer.Option("--message", "-m", help="Ask this one question and end, instead of a conversation.")
    ] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    step: Step = None,
    temperature: Annotated[float, typer.Option(min=0, max=10, help="0: always the likeliest token.")] = 0.7,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, tokens.")] = 512,
    device: Device = "auto",
) -> None:
    """Talk to a model. Ctrl-C ends an answer, Ctrl-D the conversation; /new begins another one."""
    from swarm.trained.chat import Conversation
    from swarm.trained.model import load_target

    _hide_progress_bars()
    model = load_target(target, step)
    talk = Conversation(model, max_new_tokens=max_new_tokens, temperature=temperature, system=system, device=device)

    def show(piece: str) -> None:
        sys.stdout.write(printable(piece))
        sys.stdout.flush()

    if message:
        talk.ask(message, show)
        print()
        return
    of = f", step {model.version.step}" if model.version else ""
    console.print(f"{target}{of}. Ctrl-C ends an answer, Ctrl-D leaves, /new starts again.", markup=False)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/new":
            talk.reset()
        elif text:
            try:
                talk.ask(text, show)
            except KeyboardInterrupt:
                show(" [ended; forgotten]")
            except ConfigError as error:
                show(str(error))
            print()


def samples(
    directory: Annotated[Path, typer.Argument(help="Directory of the node, running or not.")],
    count: Annotated[int, typer.Option(min=1, help="Groups to show, newest first.")] = 2,
    each: Annotated[int, typer.Option(min=1, help="Answers of a group to show.")] = 4,
    origin: Annotated[str, typer.Option("--from", help="own, others, or all.")] = "all",
    env: Annotated[str, typer.Option(help="Of this environment alone.")] = "",
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Each token with its log-prob and the step of the weights that made it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, everything of each group.")] = False,
) -> None:
    """Read completions: what the model was asked, what it answered, and what that was worth.

    Own ones are what this node generated, others' what it admitted. Rewards are those of this node's verifier.
    """
    from swarm.trained.samples import SampleReader

    if origin not in ("own", "others", "all"):
        raise ConfigError(f"--from {origin}: expected own, others or all")
    groups = SampleReader(directory).newest(count, origin, env)
    if as_json:
        typer.echo(json.dumps([asdict(group) for group in groups], indent=1))
        return
    if not groups:
        console.print("no such group is in the store yet")
    for group in groups:
        who = "made here" if group.is_made_here else f"of node {group.producer[:8]}"
        console.rule(f"{group.env}, task {group.task_id}, {who}, {group.digest[:8]}", align="left")
        for message in group.messages:
            _plain(f"{message.role}: {message.content}")
        _plain(f"reference: {group.reference}")
        for sample in group.samples[:each]:
            _print_sample(sample, tokens)
        left = len(group.samples) - each
        if left > 0:
            console.print(f"... {left} more answers (--each)", style="dim")


# --- shared ---------------------------------------------------------------------------------------


def _require_node(directory: Path) -> None:
    if not (directory / NODE_FILE).is_file():
        raise ConfigError(
            f"{directory}: no node.toml, so no node's directory; `swarm join` makes one in swarm-node, "
            "`swarm simulate --keep-checkpoints` keeps its nodes in <run>/swarm/<name>"
        )


def _settings(config: Path) -> NodeConfig:
    if has_section(config, "node"):
        return load_config(CoordinatorConfig, config).node
    return load_config(NodeConfig, config)


def _chosen(environments: Sequence[EnvironmentConfig], names: Sequence[str]) -> Sequence[EnvironmentConfig]:
    unknown = sorted(set(names) - {each.name for each in environments})
    if unknown:
        known = ", ".join(each.name for each in environments)
        raise ConfigError(f"--env {unknown[0]}: unknown environment; known: {known}")
    return [each for each in environments if not names or each.name in names]


def _hide_progress_bars() -> None:
    """Those of transformers, which load and save a model."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _figures(score: "EnvironmentScore") -> dict[str, object]:
    figures: dict[str, object] = {
        "environment": score.env,
        "problems": len(score.problems),
        "unscored": score.num_unscored,
        "tries": score.num_tries,
        "reward": score.reward.value,
        "greedy": score.greedy.value,
        "greedy_half_width": score.greedy.half_width,
    }
    for k in _ks(score.num_tries):
        figures[f"pass@{k}"] = score.pass_at(k).value
        figures[f"pass@{k}_half_width"] = score.pass_at(k).half_width
    if score.num_tries:
        figures |= {"tokens": score.mean_tokens, "cut_off": score.cut_off_share}
    return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in figures.items()}


def _ks(num_tries: int) -> list[int]:
    return sorted({1, num_tries}) if num_tries else []


def _print_scores(target: str, model: "TrainedModel", scores: Sequence["EnvironmentScore"], split: str) -> None:
    of = f", step {model.version.step}" if model.version else ""
    table = Table(
        title=Text(f"{target}{of}: {split.replace('_', ' ')} problems"),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    num_tries = max((each.num_tries for each in scores), default=0)
    table.add_column("environment", no_wrap=True)
    for name in ("problems", "greedy", *(f"pass@{k}" for k in _ks(num_tries)), "reward"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("tokens", "cut off") if num_tries else ():
        table.add_column(name, justify="right", no_wrap=True)
    for each in scores:
        row = [each.env, str(len(each.problems)), _text(each.greedy)]
        row += [_text(each.pass_at(k)) if each.num_tries else "-" for k in _ks(num_tries)]
        row += [_text(each.reward)]
        row += [f"{each.mean_tokens:.1f}", f"{each.cut_off_share:.0%}"] if num_tries and each.problems else []
        table.add_row(*row)
    console.print(table)
    console.print("means over problems with their 95 % interval", style="dim")


def _text(mean: "Mean") -> str:
    if math.isnan(mean.value):
        return "-"
    texts = [f"{each:.2f}".removeprefix("0") for each in (mean.value, mean.half_width) if not math.isnan(each)]
    return "\u00b1".join(texts)


def _print_sample(sample: "Sample", has_tokens: bool) -> None:
    parts = {name: value for name, value in sample.reward_parts.items() if name != "outcome"}
    said = "".join(f", {name} {value:.3g}" for name, value in parts.items())
    cut = ", cut off" if sample.finish == "length" else ""
    console.print(f"\n[reward {sample.reward:.3g}{said}{cut}]", style="bold", markup=False, highlight=False)
    if has_tokens:
        for token in sample.tokens:
            chosen = f"{token.logprob:7.2f}" if token.logprob is not None else "      -"
            _plain(f"{chosen} nats  step {token.step:>4}  {token.text!r}")
        return
    for number, action in enumerate(sample.actions):
        _plain(action)
        for message in sample.observations[number] if number < len(sample.observations) else ():
            _plain(f"    {message.role}: {message.content}")


def _plain(text: str) -> None:
    """Text of a model or a peer: nothing in it is markup, and its control characters are shown, not obeyed."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _print_problems(score: "EnvironmentScore", count: int) -> None:
    for problem in score.problems[:count]:
        console.rule(f"{score.env}, problem {problem.task.task_id}", align="left")
        for each in problem.task.messages:
            _plain(f"{each.role}: {each.content}")
        for name, tried in (("greedy", problem.greedy), *((f"try {i}", t) for i, t in enumerate(problem.tries, 1))):
            _plain(f"{name} ({tried.reward:g}): {' | '.join(tried.actions)}")
        _plain(f"reference: {problem.reference}")
