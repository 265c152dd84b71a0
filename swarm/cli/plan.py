"""Options of `swarm plan`; `swarm.extras.plan` computes the answer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from swarm.config import config_file
from swarm.plugins import load_extra

Figure = float | None  # None: not given


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Options of one call; a figure that is None comes from the run or has a default."""

    run: Path | None
    trainer: str  # "": the only node of the run that made steps
    max_age: int | None  # steps
    tokens_per_s: tuple[float, ...]  # one answer for each; empty: speeds of the run's generators
    step_s: Figure
    groups_per_step: Figure
    tokens_per_group: Figure
    groups_per_batch: int | None
    bytes_per_group: Figure
    patch_bytes: Figure
    encode_s: Figure
    apply_s: Figure
    pause_s: Figure
    down: Figure  # bytes/s
    up: Figure  # bytes/s
    as_json: bool
    gpu: Figure  # GiB; if given, only whether a node fits is computed
    config: Path | None  # node.toml, used with `gpu`


def plan_command(
    run: Annotated[Path | None, Option(help="Finished run with measured figures, such as runs/echo-TIME.")] = None,
    trainer: Annotated[str, Option(help="Node of the run whose steps count, where several train.")] = "",
    max_age: Annotated[int | None, Option(help="Lag bound: most steps of age of a token at its use.")] = None,
    tokens_per_s: Annotated[
        list[float] | None,
        Option("--tokens-per-s", help="Speed of one generator. Repeatable."),
    ] = None,
    step_s: Annotated[Figure, Option(help="T: seconds of a step that waits for no data, with publishing.")] = None,
    groups_per_step: Annotated[Figure, Option(help="b: groups that a step uses up, zero-variance ones too.")] = None,
    tokens_per_group: Annotated[Figure, Option(help="Response tokens of all rollouts of a group.")] = None,
    groups_per_batch: Annotated[int | None, Option(help="g: groups that a generator makes together.")] = None,
    bytes_per_group: Annotated[Figure, Option(help="Bytes of a group on the line. Default 0: takes no time.")] = None,
    patch_bytes: Annotated[Figure, Option(help="Bytes of one version as a patch. Default 0: takes no time.")] = None,
    encode_s: Annotated[Figure, Option(help="Seconds from the end of a step until its version is served.")] = None,
    apply_s: Annotated[Figure, Option(help="Seconds from the last byte of a version until it generates.")] = None,
    pause_s: Annotated[Figure, Option(help="The part of --apply-s in which generation stands still.")] = None,
    down: Annotated[Figure, Option("--down", help="Bytes/s to a generator. Default: unlimited.")] = None,
    up: Annotated[Figure, Option("--up", help="Bytes/s from a generator. Default: unlimited.")] = None,
    as_json: Annotated[bool, Option("--json", help="Machine-readable.")] = False,
    gpu: Annotated[
        Figure,
        Option("--gpu", help="GiB of a GPU: which settings of a node fit?"),
    ] = None,
    config: Annotated[
        Path | None, Option("--config", "-c", help="With --gpu: the node's directory or node.toml.")
    ] = None,
) -> None:
    """Plan number, speed and lines of the generators that a learner needs for a lag bound; exit code 1 if none will do.

    Measure first, then change figures: `swarm simulate --preset echo`, then `swarm plan --run runs/echo-...`, then
    again with options in place of measured figures, such as `--tokens-per-s 40 --down 1e6 --max-age 2`. Without a run,
    --step-s, --groups-per-step, --tokens-per-group, --tokens-per-s and --max-age are needed.

    Another question: does a node fit on a GPU? `swarm plan --gpu 24 -c node.toml`; exit code 1 if no setting fits.
    """
    run_plan: Callable[[PlanOptions], bool] = load_extra("plan")
    options = PlanOptions(
        run=run,
        trainer=trainer,
        max_age=max_age,
        tokens_per_s=tuple(tokens_per_s or ()),
        step_s=step_s,
        groups_per_step=groups_per_step,
        tokens_per_group=tokens_per_group,
        groups_per_batch=groups_per_batch,
        bytes_per_group=bytes_per_group,
        patch_bytes=patch_bytes,
        encode_s=encode_s,
        apply_s=apply_s,
        pause_s=pause_s,
        down=down,
        up=up,
        as_json=as_json,
        gpu=gpu,
        config=None if config is None else config_file(None, config),
    )
    raise typer.Exit(0 if run_plan(options) else 1)
