"""Nim for two: the policy plays both sides, each of them in its own conversation.

Invariant: a side reads nothing but the heaps before each of its moves; the side that takes the last stone wins. The
outcome counts moves that leave the other side without a way to win, so that no side gains by losing.
"""

import random
import re
from functools import reduce
from operator import xor
from typing import Final

from swarm.config import EnvironmentConfig
from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.environments.params import Params, verifier_name
from swarm.episode import OUTCOME, Action, Actions, Message, Transition, TurnStatus

Heaps = tuple[int, ...]
ROLES: Final = ("first", "second")  # who moves first; the conversations 0 and 1, and the names of their rewards
_NAMES: Final = "abcde"
_MOVE: Final = re.compile(r"\s*([a-e]) ?([1-9])\.?\s*", re.ASCII)


class NimEnvironment(NumberedEnvironment):
    """Nim: two sides take stones from one heap in turn, until no stone is left.

    Params: `heaps` (3), `stones` (7: most of a heap at the start), `style` (text, or char), `max_turns` (heaps times
    stones). Actions: a heap and a number of stones, as `b2`; an invalid move loses the game. Rewards: outcome, of the
    positions that the side to move could win, the share in which it kept the win, but 0 after an invalid move; `first`
    and `second`, the roles: 1 for the side that won, else 0.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Reads the parameters. Raises ConfigError for an unknown one, or a value out of its bounds."""
        params = Params(config)
        self._num_heaps = params.integer("heaps", 3, 2, len(_NAMES))
        self._most = params.integer("stones", 7, 2, 9)
        self._style = params.choice("style", "text", ("text", "char"))
        self.max_turns = params.turns(self._num_heaps * self._most)
        self.signals = frozenset({"state_keys", "reward_parts"})
        params.finish()
        super().__init__(config, verifier_name(config, 1))

    def build(self, task_id: int) -> Problem:
        """Draws heaps, none of them empty."""
        source = random.Random(f"{self.config.seed}:{task_id}")
        heaps = tuple(source.randint(1, self._most) for _ in range(self._num_heaps))
        return Problem(question=self.ask(heaps), reference=best_move(heaps), entry=heaps, initial_state=str(heaps))

    def begin(self, problem: Problem) -> "Game":
        """A new game, in which the first side is to move."""
        return Game(self, problem.entry)

    def demonstration(self, task_id: int) -> Actions:
        """A game in which both sides play `best_move`. Raises LookupError for a task out of range."""
        heaps: Heaps = self.problem(task_id).entry
        moves: list[str] = []
        while any(heaps):
            moves.append(best_move(heaps))
            heaps = after(heaps, *_read(moves[-1]))
        return tuple(moves)

    def ask(self, heaps: Heaps) -> str:
        """Text that a side reads before its first move."""
        if self._style == "char":
            return f"nim:{self.show(heaps)}"
        return (
            "Nim: take stones from one heap; who takes the last stone wins. Say the heap and how many, such as b2 for "
            f"two stones of heap b.\n\n{self.show(heaps)}"
        )

    def show(self, heaps: Heaps) -> str:
        """Text that a side reads before another move."""
        if self._style == "char":
            return f"{''.join(map(str, heaps))}="
        return "Heaps: " + ", ".join(f"{name} {count}" for name, count in zip(_NAMES, heaps, strict=False))


class Game:
    """One game, move by move."""

    def __init__(self, environment: NimEnvironment, heaps: Heaps) -> None:
        self._environment = environment
        self._heaps = heaps
        self._mover = 0
        self._num_won = 0  # positions so far that could be won
        self._num_kept = 0  # of them those that stayed so
        self._has_seen = [True, False]

    def step(self, action: Action) -> Transition:
        """Makes a move and returns the text for the other side; the last stone or an invalid move ends the game."""
        move, role = _read(action.text), ROLES[self._mover]
        if not move[1]:
            return self._end(1 - self._mover, 0.0, TurnStatus.MALFORMED)
        if move[0] >= len(self._heaps) or self._heaps[move[0]] < move[1]:
            return self._end(1 - self._mover, 0.0, TurnStatus.TOOL_ERROR)
        could_win = _nim_sum(self._heaps) != 0
        self._heaps = after(self._heaps, *move)
        self._num_won += could_win
        self._num_kept += could_win and _nim_sum(self._heaps) == 0
        if not any(self._heaps):
            return self._end(self._mover, self._num_kept / self._num_won, TurnStatus.OK)
        self._mover = 1 - self._mover
        is_new, self._has_seen[self._mover] = not self._has_seen[self._mover], True
        text = self._environment.ask(self._heaps) if is_new else self._environment.show(self._heaps)
        return Transition(
            messages=(Message(role="user", content=text),),
            state_key=f"{self._mover} {self._heaps}",
            conversation=self._mover,
            role=role,
        )

    def _end(self, winner: int, outcome: float, status: TurnStatus) -> Transition:
        rewards = {OUTCOME: outcome, ROLES[winner]: 1.0, ROLES[1 - winner]: 0.0}
        return Transition(is_end=True, rewards=rewards, status=status, role=ROLES[self._mover], state_key="end")


def after(heaps: Heaps, heap: int, count: int) -> Heaps:
    """The heaps after `count` stones were taken from the heap of index `heap`."""
    return tuple(left - count * (index == heap) for index, left in enumerate(heaps))


def best_move(heaps: Heaps) -> str:
    """A move that keeps a won position won; in a lost one, one stone of the first heap that has any."""
    for heap, left in enumerate(heaps):
        rest = left ^ _nim_sum(heaps)
        if rest < left:
            return f"{_NAMES[heap]}{left - rest}"
    return f"{_NAMES[next(heap for heap, left in enumerate(heaps) if left)]}1"


def _nim_sum(heaps: Heaps) -> int:
    """Exclusive or of the heaps; 0 if the side to move loses against best play (Bouton, 1901)."""
    return reduce(xor, heaps)


def _read(text: str) -> tuple[int, int]:
    """Index of the heap and number of stones of a move; 0 stones if the text is not a move."""
    found = _MOVE.fullmatch(text.lower()) if len(text) < 20 else None
    return (_NAMES.index(found[1]), int(found[2])) if found else (0, 0)
