"""The option --reward-weight of the commands that take a user's own reward.

Invariant: a weight is named once, and is a finite number.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import typer

RewardWeight = Annotated[
    list[str] | None,
    typer.Option(
        "--reward-weight",
        metavar="NAME=WEIGHT",
        help="Weight of a named reward, where several are returned. Repeatable.",
    ),
]


def parse_weights(texts: Sequence[str] | None) -> dict[str, float]:
    """Name -> weight. Raises BadParameter."""
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
