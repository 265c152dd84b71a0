"""Options of `swarm plan`; the answer is in `swarm.extras.plan`."""

from pathlib import Path
from typing import Annotated

import typer

from swarm.plugins import load_extra

RunOption = Annotated[
    Path | None, typer.Option(help="A finished run, such as runs/echo-20250101-120000: what it measured is used.")
]
TrainerOption = Annotated[str, typer.Option(help="Node of the run whose steps count; needed where several train.")]
AgeOption = Annotated[int | None, typer.Option(help="Lag bound: oldest token that a step may use, in steps.")]
SpeedOption = Annotated[
    list[float] | None,
    typer.Option("--tokens-per-s", help="Speed of one generator, all its sequences together. Several: an answer each."),
]
StepOption = Annotated[float | None, typer.Option(help="T: seconds of a step that waits for no data, with publishing.")]
GroupsOption = Annotated[float | None, typer.Option(help="b: groups that a step uses up, zero-variance ones too.")]
TokensOption = Annotated[float | None, typer.Option(help="Response tokens of all rollouts of a group.")]
BatchOption = Annotated[int | None, typer.Option(help="g: groups that a generator makes together.")]
GroupBytesOption = Annotated[float | None, typer.Option(help="Bytes of a group as it travels. Default 0: no time.")]
PatchOption = Annotated[float | None, typer.Option(help="Bytes of one version as a patch. Default 0: no time.")]
EncodeOption = Annotated[float | None, typer.Option(help="Seconds from a step's end until its version is served.")]
ApplyOption = Annotated[float | None, typer.Option(help="Seconds from a version's last byte until it generates.")]
PauseOption = Annotated[float | None, typer.Option(help="The part of them in which generation stands still.")]
DownOption = Annotated[float | None, typer.Option("--down", help="Bytes/s to a generator. Default: unlimited.")]
UpOption = Annotated[float | None, typer.Option("--up", help="Bytes/s from a generator. Default: unlimited.")]
GpuOption = Annotated[
    float | None, typer.Option("--gpu", help="Memory of a GPU in GiB: what a node takes of it, and what would fit.")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="With --gpu: the node's node.toml.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


def plan_command(
    run: RunOption = None,
    trainer: TrainerOption = "",
    max_age: AgeOption = None,
    tokens_per_s: SpeedOption = None,
    step_s: StepOption = None,
    groups_per_step: GroupsOption = None,
    tokens_per_group: TokensOption = None,
    groups_per_batch: BatchOption = None,
    bytes_per_group: GroupBytesOption = None,
    patch_bytes: PatchOption = None,
    encode_s: EncodeOption = None,
    apply_s: ApplyOption = None,
    pause_s: PauseOption = None,
    down: DownOption = None,
    up: UpOption = None,
    as_json: JsonOption = False,
    gpu: GpuOption = None,
    config: ConfigOption = None,
) -> None:
    """How many generators a learner needs, how fast and on which lines, for a lag bound; exit code 1 if none will do.

    Measure first, then ask what if: `swarm simulate --preset echo`, then `swarm plan --run runs/echo-...`, then again
    with an option in place of a figure, such as `--tokens-per-s 40 --down 1e6 --max-age 2`. Without a run the options
    are the figures: --step-s, --groups-per-step, --tokens-per-group, --tokens-per-s and --max-age are then needed.

    Another question: does a node fit on a GPU? `swarm plan --gpu 24 -c node.toml`; exit code 1 if nothing would.
    """
    given = locals()
    raise typer.Exit(0 if load_extra("plan")(**given) else 1)
