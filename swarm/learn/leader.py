"""One rank leads, the others follow: whatever the first rank's learner is asked to do, all of them do.

Invariant: only the first rank talks to anybody else or decides; the others make the steps that they are told of, in
that order, from the same bytes.
"""

import json
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from swarm.learn.data_parallel import ShardedRanks
from swarm.learn.learner import PolicyLearner
from swarm.objectives.recipe import Recipe
from swarm.types import Draw, StepReport
from swarm.wire.local import draw_from_parts, draw_to_fields
from swarm.wire.v1 import local_service_pb2 as pb

_LENGTH = 4  # bytes of the header's length


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCommand:
    """One thing that all ranks do."""

    kind: Literal["step", "save", "stop"]
    draw: Draw | None = None  # of a step
    is_safe: bool = False  # with the safe recipe in place of the learner's own
    is_frozen: bool = False
    ratio_band: float = math.inf

    def to_bytes(self) -> bytes:
        """A JSON header behind its length, then the messages of the draw that an agent gives its worker."""
        parts = draw_to_fields(self.draw) if self.draw else []
        messages = [pb.DrawResponse(**fields).SerializeToString() for fields in parts]
        header: dict[str, Any] = {
            "kind": self.kind,
            "is_safe": self.is_safe,
            "is_frozen": self.is_frozen,
            "ratio_band": self.ratio_band,
            "baselines": self.draw.baselines if self.draw else (),
            "sizes": [len(message) for message in messages],
        }
        text = json.dumps(header).encode()
        return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *messages])

    @classmethod
    def from_bytes(cls, data: bytes) -> "RankCommand":
        """The order of `to_bytes`."""
        end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        header = json.loads(data[_LENGTH:end])
        parts: list[pb.DrawResponse] = []
        for size in header.pop("sizes"):
            parts.append(pb.DrawResponse.FromString(data[end : end + size]))
            end += size
        baselines, draw = tuple(header.pop("baselines")), None
        if parts:
            draw = replace(draw_from_parts(parts[0], parts[1:]), baselines=baselines)
        return cls(draw=draw, **header)


class LeadingLearner(PolicyLearner):
    """The learner of the first of several ranks: `step` and `save` are made by all, the others being in `follow`.

    Example:
        learner = LeadingLearner(..., ranks=ShardedRanks.start()).resumed()
    """

    def step(
        self, draw: Draw, recipe: Recipe | None = None, is_frozen: bool = False, ratio_band: float = math.inf
    ) -> StepReport:
        """As `PolicyLearner.step`; `recipe` is None, or the safe one that the others have too."""
        order = RankCommand(
            kind="step", draw=draw, is_safe=recipe is not None, is_frozen=is_frozen, ratio_band=ratio_band
        )
        with self._line.together():
            self._line.say(order.to_bytes())
            return super().step(draw, recipe, is_frozen, ratio_band)

    def save(self) -> None:
        """As `PolicyLearner.save`: put together from all, written by this one."""
        with self._line.together():
            self._line.say(RankCommand(kind="save").to_bytes())
            super().save()

    def stop(self) -> None:
        """Ends `follow` on the others (blocking: a step in progress is made first).

        Where a step or save failed here, nothing: the others are in the middle of it, and end with this process.
        """
        with self._line.together() as do_hear:
            if do_hear:
                self._line.say(RankCommand(kind="stop").to_bytes())

    @property
    def _line(self) -> ShardedRanks:
        assert isinstance(self._ranks, ShardedRanks), "one process has nobody to lead"
        return self._ranks


def follow(learner: PolicyLearner, ranks: ShardedRanks, safe: Recipe) -> None:
    """Does what the first rank says until that is to stop (blocking).

    Args:
        learner: with the same weights and configuration as the first rank's.
        safe: recipe of steps that the first rank's guard makes carefully.
    """
    while (order := RankCommand.from_bytes(ranks.hear())).kind != "stop":
        if order.kind == "save":
            learner.save()
        else:
            assert order.draw is not None
            learner.step(order.draw, safe if order.is_safe else None, order.is_frozen, order.ratio_band)
