"""A worker's signs of life: what it does now, and how far that is.

Invariant: an activity changes only where real work advanced, never by the clock.
"""

from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

from swarm.printable import one_line

WAITING: Final = "waiting for"  # begins the words of an activity that depends on other nodes
GENERATING: Final = "generating"
WAITING_FOR_ROOM: Final = f"{WAITING} room for groups"
OF_GENERATOR: Final = frozenset({GENERATING, WAITING_FOR_ROOM})
LOADING, MEASURING, PREPARING = "loading the model", "measuring the machine", "preparing the learner"
STARTING_ENGINE: Final = "starting the engine"
OF_START: Final = frozenset({LOADING, MEASURING, PREPARING, STARTING_ENGINE})  # every other activity is the learner's


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """The newest advance of a process.

    Example:
        Activity(what="evaluating", done=13, total=64, num_tokens=40, at_s=1.7e9)
    """

    what: str  # participle: "learning"
    done: int = 0  # answers, micro-batches, or seconds of CPU while it starts
    total: int = 0  # 0: nobody knows
    num_tokens: int = 0  # made by this call of the engine, or by its process since it began
    at_s: float  # wall clock of the newest advance

    @classmethod
    def read(cls, data: object) -> "Activity | None":
        """From status.json, which another release may have written; None where it is no activity."""
        if not isinstance(data, dict):
            return None
        known: dict[str, Any] = {each.name: data.get(each.name) for each in fields(cls)}
        numbers = [known[name] for name in ("done", "total", "num_tokens", "at_s")]
        if not isinstance(known["what"], str) or not all(type(each) in (int, float) for each in numbers):
            return None
        known["what"] = one_line(known["what"])
        return cls(**known)

    def words(self) -> str:
        """For people. Example: `evaluating 13/64, 40 tokens`."""
        share = f" {self.done}/{self.total}" if self.total else ""
        return f"{self.what}{share}" + (f", {self.num_tokens:,} tokens" if self.num_tokens else "")


class OnProgress(Protocol):
    """Takes note that work advanced; any thread may call it, once a token at most. Arguments as of `Activity`."""

    def __call__(self, what: str, done: int = 0, total: int = 0, num_tokens: int = 0) -> None: ...


def ignore_progress(what: str, done: int = 0, total: int = 0, num_tokens: int = 0) -> None:
    """An `OnProgress` for work that nobody watches."""
