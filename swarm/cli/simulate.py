"""`swarm simulate`: the options of the command, checked and turned into a SimulationOptions.

Invariant: importing this file is cheap; what a run needs is imported when it begins.
"""

import math
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from swarm.errors import ConfigError

PresetOption = Annotated[
    str,
    typer.Option(
        help="smollm (2 peers, a real chat model), tiny (8 peers, seconds), agents (2 peers, the chat model over "
        "several turns), tiny-agents (4 tiny peers, episodes too), echo (a trainer and generators), echo-tiny."
    ),
]
NodesOption = Annotated[int | None, typer.Option(min=1, help="Number of nodes.")]
RoundsOption = Annotated[int | None, typer.Option(min=1, help="Optimizer steps of each node.")]
MinutesOption = Annotated[
    float | None,
    typer.Option(min=0, help="Stop this long after set-up (the first group), whatever was reached. No step: says why."),
]
MixOption = Annotated[str, typer.Option(help="Local:external groups of each step, such as 4:4; 8:0 never shares.")]
RecipeOption = Annotated[str, typer.Option(help="Objective: see `swarm recipes list`. Default: the preset's.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Of tasks, sampling and draws.")]
ExternalOption = Annotated[
    Literal["all", "positive"],
    typer.Option(help="positive: drop external rollouts with negative advantage; all: keep."),
]
SlowOption = Annotated[list[str] | None, typer.Option(help="NODE=FACTOR: this node takes FACTOR times as long.")]
KillOption = Annotated[list[str] | None, typer.Option(help="NODE@SECONDS (or coordinator@SECONDS): kill -9.")]
StopOption = Annotated[list[str] | None, typer.Option(help="NODE@SECONDS: SIGSTOP.")]
RestartOption = Annotated[bool, typer.Option("--restart", help="Killed processes come back after 5 seconds.")]
LatencyOption = Annotated[float, typer.Option(min=0, help="Delay of every group from a peer.")]
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
VirtualOption = Annotated[
    bool,
    typer.Option(
        "--virtual",
        help="The whole swarm in this process on virtual time; takes --nodes, --rounds, --seed, --episodes, --outward.",
    ),
]
EpisodesOption = Annotated[
    bool, typer.Option("--episodes", help="virtual: episodes of several turns in place of single answers.")
]
OutwardOption = Annotated[
    float | None,
    typer.Option(
        "--outward", min=0.0, max=1.0, help="virtual: share of nodes that nobody can dial; else the seed draws it."
    ),
]
VIRTUAL_TAKES = ("virtual", "episodes", "outward", "nodes", "rounds", "seed")
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any key of every node, or of one: --set seed=2, --set ada:compute_dtype=float32."),
]
KeepOption = Annotated[
    bool,
    typer.Option("--keep-checkpoints", help="Keep models and optimizer states (3 GB a SmolLM2 learner) at the end."),
]
OutOption = Annotated[Path | None, typer.Option(help="Directory of state and report. Default: runs/<preset>-<time>.")]


def simulate(
    context: typer.Context,
    preset: PresetOption = "smollm",
    nodes: NodesOption = None,
    rounds: RoundsOption = None,
    minutes: MinutesOption = None,
    mix: MixOption = "",
    recipe: RecipeOption = "",
    seed: SeedOption = 0,
    external: ExternalOption = "positive",
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
    episodes: EpisodesOption = False,
    outward: OutwardOption = None,
    set_: SetOption = None,
    out: OutOption = None,
    keep_checkpoints: KeepOption = False,
) -> None:
    """Run a real swarm on this machine and report what it did.

    A coordinator and every node are separate processes that find each other through the DHT and exchange
    rollouts over authenticated gRPC. Exit code 0 only if the run's invariants hold.
    """
    if virtual:
        _refuse_beside_virtual(context)
        from swarm.simulate.virtual.run import run_virtual_command

        num_nodes, num_rounds = 10 if nodes is None else nodes, 50 if rounds is None else rounds
        _end(run_virtual_command(num_nodes, num_rounds, seed, Console(), has_episodes=episodes, outward_share=outward))
    if episodes:
        raise ConfigError("--episodes: applies to --virtual alone; the presets name their environments")
    if outward is not None:
        raise ConfigError("--outward: applies to --virtual alone; local processes all listen on this machine")
    from swarm.simulate.presets import SimulationOptions

    options = SimulationOptions(
        preset=preset,
        nodes=nodes,
        rounds=rounds,
        minutes=minutes,
        mix=_mix(mix),
        recipe=recipe,
        seed=seed,
        slow=dict(_pair("--slow", text, "=FACTOR", least=1.0) for text in slow or []),
        kill=tuple(_pair("--kill", text, "@SECONDS") for text in kill or []),
        stop=tuple(_pair("--stop", text, "@SECONDS") for text in stop or []),
        restart=restart,
        latency_ms=latency_ms,
        barrier=barrier,
        deterministic=deterministic,
        external=external,
        mode=mode,
        overrides=tuple(set_ or ()),
        keep_checkpoints=keep_checkpoints,
    )
    from swarm.simulate.command import run_command

    directory = out or Path("runs") / f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    _end(run_command(options, directory, compare, Console()))


def _refuse_beside_virtual(context: typer.Context) -> None:
    """Raises ConfigError naming the options that a virtual swarm would not heed."""
    given = [
        option.opts[0]
        for option in context.command.params
        if option.name not in VIRTUAL_TAKES and _is_given(context, option.name)
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: does not apply to --virtual, which takes --nodes, --rounds, --seed, --episodes and "
            "--outward"
        )


def _is_given(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name or "")
    return source is not None and source.name == "COMMANDLINE"


def _end(holds: bool) -> None:
    raise typer.Exit(0 if holds else 1)


def _mix(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    local, separator, external = text.partition(":")
    if not separator or not local.isdigit() or not external.isdigit():
        raise ConfigError(f"--mix {text}: expected local:external, such as 4:4")
    if not int(local) + int(external):
        raise ConfigError(f"--mix {text}: a step would have nothing to learn from; such as 4:4")
    return int(local), int(external)


def _pair(option: str, text: str, form: str, least: float = 0.0) -> tuple[str, float]:
    """NAME and a number; `form` is the separator and what the number means."""
    name, _, number = text.partition(form[0])
    try:
        value = float(number)
    except ValueError:
        raise ConfigError(f"{option} {text}: expected NODE{form}") from None
    if not least <= value < math.inf:
        raise ConfigError(f"{option} {text}: {form[1:]} is at least {least:g}")
    return name, value
