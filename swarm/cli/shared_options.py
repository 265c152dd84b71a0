"""Options that several commands share: limits on a node's use of the machine, weights of rewards, trust.

Invariant: an option about the machine is a key of the configuration under another name; each reward is named at most
once, and its weight is a finite number.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import typer
from typer import Option

from swarm.config.byte_sizes import parse_bytes

Threads = Annotated[
    int | None,
    Option(min=1, help="Threads of every process to learn, and as many to generate (num_threads). Default 1."),
]
MaxUpload = Annotated[str, Option(help="Most bytes to peers, such as 2MB/s (exchange.max_upload_bytes_per_s).")]
MaxDisk = Annotated[
    str,
    Option(help="Most bytes of the directory, such as 20GB (disk.max_bytes); `swarm check` shows how they are split."),
]
Trust = Annotated[
    bool,
    Option("--trust", help="Run code that its node.toml names, though no command of yours made the directory."),
]
RewardWeight = Annotated[
    list[str] | None,
    Option(
        "--reward-weight",
        metavar="NAME=WEIGHT",
        help="Weight of a named reward. Repeatable.",
    ),
]


def machine_overrides(threads: int | None, max_upload: str, max_disk: str) -> list[str]:
    """The options as `key=value` overrides of the configuration. Raises ConfigError if a size cannot be parsed."""
    overrides = [] if threads is None else [f"num_threads={threads}"]
    if max_upload:
        rate = parse_bytes(max_upload, "--max-upload", is_rate=True)
        overrides.append(f"exchange.max_upload_bytes_per_s={rate}")
    if max_disk:
        overrides.append(f"disk.max_bytes={parse_bytes(max_disk, '--max-disk')}")
    return overrides


def parse_weights(texts: Sequence[str] | None) -> dict[str, float]:
    """Name of each reward -> weight, from NAME=WEIGHT. Raises BadParameter for another form or a repeated name."""
    weights: dict[str, float] = {}
    for text in texts or ():
        name, _, number = text.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or name in weights or not math.isfinite(weight):
            raise typer.BadParameter(f"--reward-weight {text}: expected NAME=WEIGHT, such as right=1, each name once")
        weights[name] = weight
    return weights
