"""Silence of processes: seconds since the last sign of life of each.

Invariant: a sign is work that advanced: an event, an activity of its worker, or, before there can be one, used CPU.
Status files and heartbeats, which a process with a stuck worker goes on writing, are none.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from swarm.activity import WAITING
from swarm.simulate.local.processes import Process, SimulationFailed

# The longest between two signs of life of two SmolLM2 workers, in float32 on two AVX2 cores, was 37 s beside 4 busy
# processes: the prefill of 57 prompts at once (13 s: a micro-batch). bfloat16 without hardware takes 6 times as long.
SILENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class _LastSign:
    sign: object
    words: str
    seen_s: float  # monotonic


class SilenceWatch:
    """The newest sign of life of each process. Example: `watch.look(process)` now and then, then `watch.check(names)`.

    Args:
        monotonic_s: the clock.
        bound_s: of silence.
    """

    def __init__(self, monotonic_s: Callable[[], float], bound_s: float = SILENCE_S) -> None:
        self._monotonic_s, self._bound_s = monotonic_s, bound_s
        self._last: dict[str, _LastSign] = {}

    @property
    def last_signs(self) -> dict[str, str]:
        """The newest sign of life of each, in words."""
        return {name: last.words for name, last in self._last.items()}

    def look(self, process: Process) -> None:
        """Takes the sign of life that a process shows now (blocking)."""
        sign, words = process.sign_of_life()
        last = self._last.get(process.name)
        if last is None or last.sign != sign:
            self._last[process.name] = _LastSign(sign, words, self._monotonic_s())

    def check(self, names: Collection[str]) -> None:
        """Raises SimulationFailed where one of these processes is silent, or all are and each waits for another."""
        now_s = self._monotonic_s()
        last = {name: self._last[name] for name in names if name in self._last}
        silent = {name: each for name, each in last.items() if now_s - each.seen_s >= self._bound_s}
        stuck = {name: each for name, each in silent.items() if not each.words.startswith(WAITING)}
        if not stuck and len(silent) == len(names):
            stuck = silent
        if stuck:
            lines = [
                f"{name} showed no sign of life for {now_s - each.seen_s:.0f} s; its last one: {each.words}"
                for name, each in stuck.items()
            ]
            raise SimulationFailed("\n".join(lines))
