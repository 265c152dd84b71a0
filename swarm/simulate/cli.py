"""`swarm simulate` as a command: its options, and what they are turned into.

Invariant: importing this file is cheap; what a run needs is imported when it begins.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.simulate.presets import SimulationOptions

PresetOption = Annotated[
    str,
    typer.Option(
        help="smollm (2 peers, a real chat model), tiny (8 peers, seconds), echo (a trainer and generators), echo-tiny."
    ),
]
NodesOption = Annotated[int | None, typer.Option(help="Number of nodes.")]
RoundsOption = Annotated[int | None, typer.Option(help="Optimizer steps of each node.")]
MinutesOption = Annotated[float | None, typer.Option(help="Stop after this long, whatever was reached.")]
MixOption = Annotated[str, typer.Option(help="Local:external groups of each step, such as 4:4; 8:0 never shares.")]
RecipeOption = Annotated[str, typer.Option(help="Objective: see `swarm recipes list`.")]
SeedOption = Annotated[int, typer.Option(help="Of tasks, sampling and draws.")]
ForeignOption = Annotated[
    Literal["all", "positive"],
    typer.Option(help="positive: drop foreign rollouts with negative advantage; all: keep."),
]
SlowOption = Annotated[list[str] | None, typer.Option(help="NODE=FACTOR: this node takes FACTOR times as long.")]
KillOption = Annotated[list[str] | None, typer.Option(help="NODE@SECONDS (or coordinator@SECONDS): kill -9.")]
StopOption = Annotated[list[str] | None, typer.Option(help="NODE@SECONDS: SIGSTOP.")]
RestartOption = Annotated[bool, typer.Option("--restart", help="Killed processes come back after 5 seconds.")]
LatencyOption = Annotated[float, typer.Option(help="Delay of every group from a peer.")]
BarrierOption = Annotated[bool, typer.Option("--barrier", help="Synchronous rounds, for comparison.")]
DeterministicOption = Annotated[
    bool,
    typer.Option("--deterministic", help="Generate and learn strictly in turn: one node repeats bit for bit."),
]
CompareOption = Annotated[
    Literal["", "silo", "colocated"],
    typer.Option(help="silo: run the same without sharing too. colocated (echo): one node does both. Reports both."),
]
ModeOption = Annotated[
    Literal["push", "pull", "synchronous"],
    typer.Option(help="echo: how generators take new versions, and whether each step waits for all of them."),
]
VirtualOption = Annotated[bool, typer.Option("--virtual", help="The whole swarm in this process on virtual time.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Any key of every node: --set learner.learning_rate=2e-5.")
]
KeepOption = Annotated[
    bool,
    typer.Option("--keep-checkpoints", help="Keep models and optimizer states (3 GB a SmolLM2 learner) at the end."),
]
OutOption = Annotated[Path | None, typer.Option(help="Directory of state and report. Default: runs/<preset>-<time>.")]


def simulate(
    preset: PresetOption = "smollm",
    nodes: NodesOption = None,
    rounds: RoundsOption = None,
    minutes: MinutesOption = None,
    mix: MixOption = "",
    recipe: RecipeOption = "swarm_sampling",
    seed: SeedOption = 0,
    foreign: ForeignOption = "positive",
    slow: SlowOption = None,
    kill: KillOption = None,
    stop: StopOption = None,
    restart: RestartOption = False,
    latency_ms: LatencyOption = 0.0,
    barrier: BarrierOption = False,
    deterministic: DeterministicOption = False,
    compare: CompareOption = "",
    mode: ModeOption = "push",
    virtual: VirtualOption = False,
    set_: SetOption = None,
    out: OutOption = None,
    keep_checkpoints: KeepOption = False,
) -> None:
    """Run a real swarm on this machine and report what it did.

    A coordinator and every node are separate processes that find each other through the DHT and exchange
    rollouts over authenticated gRPC. Exit code 0 only if the run's invariants hold.
    """
    if virtual:
        _end(_run_virtual(nodes, rounds, seed))
    from swarm.simulate.presets import SimulationOptions

    options = SimulationOptions(
        preset=preset,
        nodes=nodes,
        rounds=rounds,
        minutes=minutes,
        mix=_mix(mix),
        recipe=recipe,
        seed=seed,
        slow=dict(_pair(text, "=") for text in slow or []),
        kill=tuple(_pair(text, "@") for text in kill or []),
        stop=tuple(_pair(text, "@") for text in stop or []),
        restart=restart,
        latency_ms=latency_ms,
        barrier=barrier,
        deterministic=deterministic,
        foreign=foreign,
        mode=mode,
        overrides=tuple(set_ or ()),
        out=out,
        keep_checkpoints=keep_checkpoints,
    )
    _end(_run(options, compare))


def _run(options: "SimulationOptions", compare: str) -> bool:
    from swarm.simulate.command import run_command

    directory = options.out or Path("runs") / f"{options.preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    return run_command(options, directory, compare, Console())


def _run_virtual(nodes: int | None, rounds: int | None, seed: int) -> bool:
    from swarm.simulate.virtual_run import run_virtual_command

    return run_virtual_command(num_nodes=nodes or 10, num_steps=rounds or 50, seed=seed, console=Console())


def _end(holds: bool) -> None:
    raise typer.Exit(0 if holds else 1)


def _mix(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    local, separator, external = text.partition(":")
    if not separator or not local.isdigit() or not external.isdigit():
        raise ConfigError(f"--mix {text}: expected local:external, such as 4:4")
    return int(local), int(external)


def _pair(text: str, separator: str) -> tuple[str, float]:
    name, _, number = text.partition(separator)
    try:
        return name, float(number)
    except ValueError:
        raise ConfigError(f"{text}: expected NAME{separator}NUMBER") from None
