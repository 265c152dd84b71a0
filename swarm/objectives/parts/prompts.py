"""Memory of parts by prompt: plain JSON records of bounded number, and bins of difficulty.

Invariant: never more than `limit` records, whatever prompts other nodes invent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from swarm.objectives.part import Memory

MAX_PROMPTS = 20_000
"""Default number of prompts that a part remembers."""


def renewed(records: Mapping[str, Any], news: Mapping[str, Any], limit: int = MAX_PROMPTS) -> dict[str, Any]:
    """Returns `records` updated with `news`, which move to the end; beyond `limit`, the oldest are left out."""
    kept = {key: value for key, value in records.items() if key not in news} | dict(news)
    return dict(list(kept.items())[max(0, len(kept) - limit) :])


Prompts = Mapping[str, Memory]  # key -> {"bin": int, "groups": [[mean reward, responses], ...]}


def pass_at(num_right: int, num_responses: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k answers is right, if `num_right` of `num_responses` are right.

    If k exceeds `num_responses`, `num_responses` is used for k.

    Source: arXiv:2107.03374 eq. 1.
    """
    k = min(k, num_responses)
    return 1 - math.comb(num_responses - num_right, k) / math.comb(num_responses, k)


def bin_of(value: float, num_bins: int, before: int | None, margin: float) -> int:
    """Returns the bin of a value in [0, 1]; a prompt leaves bin `before` only at `margin` beyond the border."""
    found = min(int(value * num_bins), num_bins - 1)
    if before is None or found == before:
        return found
    if found > before:
        return found if value >= (before + 1) / num_bins + margin else before
    return found if value < before / num_bins - margin else before


@dataclass(frozen=True, kw_only=True, slots=True)
class Bins:
    """Rule that sorts prompts into bins by the pass@k of their last groups."""

    num_bins: int
    k: int  # answers of which one must be right
    window: int  # groups of a prompt that count
    margin: float  # hysteresis
    limit: int  # prompts

    def with_group(self, prompts: Prompts, key: str, reward: float, num_responses: int) -> dict[str, Memory]:
        """Returns the table after a group with mean reward `reward`, its prompt last; the oldest over `limit` go."""
        before = prompts.get(key)
        groups = [*(_groups(before) if before else ()), [min(1.0, max(0.0, reward)), num_responses]][-self.window :]
        num_right = sum(round(mean * number) for mean, number in groups)
        chance = pass_at(num_right, sum(int(number) for _, number in groups), self.k)
        place = bin_of(chance, self.num_bins, None if before is None else int(before["bin"]), self.margin)
        return renewed(prompts, {key: {"bin": place, "groups": groups}}, self.limit)


def place_of(prompts: Prompts, key: str) -> int | None:
    """Returns the bin of a prompt; None if the table has no record of the prompt."""
    return None if key not in prompts else int(prompts[key]["bin"])


def _groups(entry: Memory) -> Sequence[Any]:
    return cast("Sequence[Any]", entry["groups"])
