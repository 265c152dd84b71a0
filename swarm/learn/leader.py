"""Commands from rank 0 to the other ranks: all ranks make every step and save of rank 0's learner.

Invariant: only rank 0 decides and talks to other processes; the others execute its commands in order, from the same
bytes.
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
    """One command to all ranks: make a step, compute one without an update, save, or stop."""

    kind: Literal["step", "dry_run", "save", "stop"]
    draw: Draw | None = None  # of a step or dry run, else None
    is_safe: bool = False  # use the safe recipe in place of the learner's own
    is_frozen: bool = False
    ratio_band: float = math.inf

    def to_bytes(self) -> bytes:
        """The command as bytes: length of the header u32, header (JSON), then the draw as messages of LocalService."""
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
        """The inverse of `to_bytes`."""
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
    """The learner of rank 0: runs `step`, `dry_run` and `save` on all ranks, while the others run `obey_leader`.

    Example:
        learner = LeadingLearner(..., ranks=ShardedRanks.start()).resume()
    """

    def step(
        self, draw: Draw, recipe: Recipe | None = None, is_frozen: bool = False, ratio_band: float = math.inf
    ) -> StepReport:
        """`PolicyLearner.step` on all ranks; `recipe` is None or the safe recipe, which the other ranks have, too."""
        command = RankCommand(
            kind="step", draw=draw, is_safe=recipe is not None, is_frozen=is_frozen, ratio_band=ratio_band
        )
        with self._sharded.in_step():
            self._sharded.send_command(command.to_bytes())
            return super().step(draw, recipe, is_frozen, ratio_band)

    def dry_run(self, draw: Draw, recipe: Recipe | None = None) -> None:
        """`PolicyLearner.dry_run` on all ranks."""
        command = RankCommand(kind="dry_run", draw=draw, is_safe=recipe is not None)
        with self._sharded.in_step():
            self._sharded.send_command(command.to_bytes())
            super().dry_run(draw, recipe)

    def save(self) -> None:
        """Gathers the checkpoint from all ranks and writes it on rank 0. Raises OSError, NonFiniteStep."""
        with self._sharded.in_step():
            self._sharded.send_command(RankCommand(kind="save").to_bytes())
            checkpoint = self._gather()
        self._write(checkpoint)  # outside `in_step`: an error of the disk leaves the ranks in step

    def stop(self) -> None:
        """Ends `obey_leader` on the other ranks, after a step in progress (blocking).

        Does nothing if a command failed here: the other ranks wait in the middle of it, and end with this process.
        """
        with self._sharded.in_step() as is_in_step:
            if is_in_step:
                self._sharded.send_command(RankCommand(kind="stop").to_bytes())

    @property
    def _sharded(self) -> ShardedRanks:
        assert isinstance(self._ranks, ShardedRanks), "one process has nobody to lead"
        return self._ranks


def obey_leader(learner: PolicyLearner, ranks: ShardedRanks, safe: Recipe) -> None:
    """Executes rank 0's commands until it sends `stop` (blocking).

    Args:
        learner: has the same weights and configuration as rank 0's.
        safe: recipe of the steps for which rank 0's guard chose the safe level.
    """
    while (command := RankCommand.from_bytes(ranks.receive_command())).kind != "stop":
        if command.kind == "save":
            learner.save()
            continue
        assert command.draw is not None
        if command.kind == "dry_run":
            learner.dry_run(command.draw, safe if command.is_safe else None)
        else:
            learner.step(command.draw, safe if command.is_safe else None, command.is_frozen, command.ratio_band)
