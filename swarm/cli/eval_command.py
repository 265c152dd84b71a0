"""The command `swarm eval`: scores a model on problems of a node, of a run, or of the user's file."""

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from typer import Option

from swarm.cli.shared_options import RewardWeight, Trust, parse_weights
from swarm.cli.trained import Device, Step, Target, console, hide_progress_bars, plain
from swarm.command_line import ending_at_once, waiting
from swarm.config import (
    NODE_FILE,
    CoordinatorConfig,
    EnvironmentConfig,
    NodeConfig,
    config_file,
    has_section,
    load_config,
)
from swarm.errors import ConfigError
from swarm.printable import printable
from swarm.trained.own_directories import code_of, require_trusted

if TYPE_CHECKING:
    from swarm.trained.evaluation import EnvironmentScore, EvaluationPlan, Mean
    from swarm.trained.model import TrainedModel


def evaluate(
    target: Target,
    config: Annotated[
        Path | None,
        Option("--config", "-c", help="Directory, node.toml or coordinator.toml with the environments."),
    ] = None,
    data: Annotated[Path | None, Option("--data", help="Own .jsonl file, with `question` and `answer`.")] = None,
    reward: Annotated[str, Option("--reward", help="my_file.py:score, for --data. Default: the same answer.")] = "",
    reward_range: Annotated[
        tuple[float, float], Option(help="LOW HIGH: what the function may return, rescaled to [0, 1].")
    ] = (0.0, 1.0),
    reward_weight: RewardWeight = None,
    question: Annotated[str, Option(help="Field of --data with the question.")] = "question",
    answer: Annotated[str, Option(help="Field of --data with the right answer.")] = "answer",
    env: Annotated[list[str] | None, Option("--env", help="Only this environment. Repeatable.")] = None,
    step: Step = None,
    split: Annotated[str, Option(help="held_out: never trained on; all: both. Own data: all of it.")] = "held_out",
    problems: Annotated[int, Option(min=1, help="Problems of each environment.")] = 64,
    tries: Annotated[int, Option(min=0, max=256, help="Sampled tries at each problem; 0: greedy answers only.")] = 8,
    temperature: Annotated[float, Option(min=0.01, max=10, help="Temperature of the sampled tries.")] = 1.0,
    max_new_tokens: Annotated[
        int, Option(min=0, help="Longest answer or turn, in tokens; 0: as configured, else 256.")
    ] = 0,
    seed: Annotated[int, Option(min=0, help="Seed of problems and samples.")] = 0,
    show: Annotated[int, Option(min=0, help="Print this many problems of each environment with answers.")] = 0,
    save: Annotated[Path | None, Option("--save", help="Write every try as a line of JSON to this file.")] = None,
    as_json: Annotated[bool, Option("--json", help="Machine-readable.")] = False,
    device: Device = "auto",
    trust: Trust = False,
) -> None:
    """Evaluate a model: greedy, pass@1 and pass@k on the environments of a node or a run, or on your own file.

      swarm eval swarm-node                              a node, on its own environments, held-out problems
      swarm eval my-model -c swarm-node/node.toml        an exported model on the same problems
      swarm eval smollm2 --data quiz.jsonl --reward my.py:score --show 3

    Equal options give equal problems, so that two models can be compared.
    """
    with waiting("loading the packages", is_quiet=as_json):
        from swarm.trained.evaluation import EvaluationPlan, own_environment, write_tries
        from swarm.trained.model import is_node, load_target

        hide_progress_bars()
    from swarm.types import EpisodeLimits

    if split not in ("held_out", "all"):
        raise ConfigError(f"--split {split}: expected held_out or all")
    if reward and data is None:
        raise ConfigError(f"--reward {reward}: needs the problems, --data FILE.jsonl")
    if save is not None:
        _require_writable(save)
    path = Path(target).expanduser() / NODE_FILE if is_node(target) else None
    path = path if config is None else config_file(None, config)
    settings = _settings(path) if path is not None else None
    if data is not None:
        fields = {"question": question, "answer": answer}
        environments: Sequence[EnvironmentConfig] = (
            own_environment(data, reward, fields, reward_range, parse_weights(reward_weight)),
        )
        split = "all"
    elif settings is not None and path is not None:
        environments = _chosen(settings.environments, env or [])
        if not environments:
            raise ConfigError(f"{target}: has no environments, name --data FILE.jsonl; agents have held-out runs")
        require_trusted(path.parent, code_of(environments), trust)
    else:
        load_target(target, step)  # what it lacks comes first: a directory, or checkpoints
        raise ConfigError(f"{target} is no node: say on what to evaluate it, --config node.toml or --data FILE.jsonl")
    with waiting(f"loading the model of {target}", is_quiet=as_json):
        model = load_target(target, step)
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
    scores = _evaluate(model, plan, device, is_quiet=as_json)
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
            words = f"{each.num_unscored} problems of {each.env} could not be scored and are left out"
            typer.echo(printable(f"{words}; the first: {each.why_unscored}"), err=True)
    if any(each.num_unscored for each in scores):
        raise typer.Exit(1)


def _require_writable(path: Path) -> None:
    """Raises ConfigError before the work, rather than after it, if a file cannot be written; creates a missing file."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"--save {path}: cannot be written: {error.strerror}; name another file") from None


def _evaluate(
    model: "TrainedModel", plan: "EvaluationPlan", device: str, *, is_quiet: bool
) -> "Sequence[EnvironmentScore]":
    """Evaluates a model with a progress bar for each environment, or lines beside a file; returns the scores."""
    from swarm.trained.evaluation import evaluate_model

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    screen = Console(stderr=True)
    with (
        waiting("evaluating", is_quiet=is_quiet or screen.is_terminal) as wait,
        Progress(*columns, console=screen, transient=True) as bar,
    ):
        lines = {each.name: bar.add_task(each.name, total=None) for each in plan.environments}

        now = ["", "evaluating"]  # environment, and what is said of it

        def show(name: str, done: int, total: int) -> None:
            now[:] = name, f"evaluating {name} {done}/{total}"
            bar.update(lines[name], completed=done, total=total, description=name)
            wait.now(now[1])

        def show_answers(what: str, done: int = 0, total: int = 0, num_tokens: int = 0) -> None:
            name, said = now
            answers = f"{done} of the next {total} answers, {num_tokens:,} tokens"
            bar.update(lines[name], description=f"{name} ({answers})")
            wait.now(f"{said}, {answers}")

        with ending_at_once():  # the network's own thread would go on until its batch is through
            return asyncio.run(evaluate_model(model, plan, show, device, show_answers))


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


def _print_problems(score: "EnvironmentScore", count: int) -> None:
    for problem in score.problems[:count]:
        console.rule(f"{score.env}, problem {problem.task.task_id}", align="left")
        for each in problem.task.messages:
            plain(f"{each.role}: {each.content}")
        for name, tried in (("greedy", problem.greedy), *((f"try {i}", t) for i, t in enumerate(problem.tries, 1))):
            plain(f"{name} ({tried.reward:g}): {' | '.join(tried.actions)}")
        plain(f"reference: {problem.reference}")
