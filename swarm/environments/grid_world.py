"""Grid world in text: walk to the goal past walls, in some grids after fetching a key.

Invariant: a turn is one step, and its reward is the decrease of the distance to the goal (length of the shortest path)
over the distance at the start: walking in circles earns 0, and every episode that reaches the goal earns 1 in total. In
style `char` every text is made of the characters of the tiny model.
"""

import random
from collections import deque
from dataclasses import dataclass
from typing import Final

from swarm.config import EnvironmentConfig
from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.environments.params import Params, verifier_name
from swarm.episode import OUTCOME, Action, Actions, Message, Transition, TurnStatus

Cell = tuple[int, int]  # row, column
State = tuple[Cell, bool]  # own cell, and True if the key is held or the grid has none
MOVES: Final = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
_WORDS: Final = {**MOVES, **{word[0]: move for word, move in MOVES.items()}}
_MAX_DRAWS: Final = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A square grid with walls; `steps_left` maps each state from which the goal can be reached to its distance."""

    size: int
    walls: frozenset[Cell]
    start: State
    goal: Cell
    key: Cell | None
    steps_left: dict[State, int]

    def after(self, state: State, move: Cell) -> State | None:
        """The state after a step; None if a wall or the edge is in the way."""
        (row, column), is_open = state
        cell = row + move[0], column + move[1]
        if cell in self.walls or not (0 <= cell[0] < self.size and 0 <= cell[1] < self.size):
            return None
        return cell, is_open or cell == self.key


class GridWorldEnvironment(NumberedEnvironment):
    """Walks on a grid, one step a turn until the goal is reached.

    Params: `size` (4), `walls` (0.2, share of the cells), `keys` (0; 1: the goal counts only once the key was fetched),
    `steps` (0: largest distance from start to goal; 0 stands for half of the turns), `style` (text, or char),
    `max_turns` (8). Actions: up, right, down, left, or their first letters. Rewards: outcome 1 at the goal, `short` the
    length of the shortest path over the number of turns taken.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Reads the params. Raises ConfigError for a param that is unknown or out of bounds."""
        params = Params(config)
        self._size = params.integer("size", 4, 3, 8)
        self._walls = params.number("walls", 0.2, 0.0, 0.5)
        self._has_key = bool(params.integer("keys", 0, 0, 1))
        self.style = params.choice("style", "text", ("text", "char"))
        self.max_turns = params.turns(8)
        self.signals = frozenset({"turn_rewards", "state_keys", "reward_parts"})
        self._most_steps = params.integer("steps", 0, 0, 63) or max(2, self.max_turns // 2)
        params.finish()
        super().__init__(config, verifier_name(config, 1))

    def build(self, task_id: int) -> Problem:
        """Problem with a random grid, its goal 2 to `steps` moves away; if _MAX_DRAWS fail, 2 or more, no walls."""
        source = random.Random(f"{self.config.seed}:{task_id}")
        for _ in range(_MAX_DRAWS):
            grid = self._draw(source, self._walls)
            if 2 <= grid.steps_left.get(grid.start, 0) <= self._most_steps:
                break
        else:
            grid = self._draw(source, 0.0)
            while grid.steps_left[grid.start] < 2:
                grid = self._draw(source, 0.0)
        shown = show(grid, grid.start)
        return Problem(
            question=f"go:{show_char(grid, grid.start)}" if self.style == "char" else _question(shown, self._has_key),
            reference=" ".join(_shortest(grid)),
            entry=grid,
            initial_state=shown,
        )

    def begin(self, problem: Problem) -> "Walk":
        """Starts an episode at the start cell of the grid."""
        return Walk(problem.entry, is_char=self.style == "char")

    def demonstration(self, task_id: int) -> Actions:
        """Actions that earn every reward. Raises as `problem`."""
        words = _shortest(self.problem(task_id).entry)
        return tuple(word[0] for word in words) if self.style == "char" else words

    def _draw(self, source: random.Random, walls: float) -> Grid:
        cells = [(row, column) for row in range(self._size) for column in range(self._size)]
        start, goal, key, *others = source.sample(cells, len(cells))
        blocked = frozenset(others[: round(walls * len(cells))])
        grid = Grid(
            size=self._size,
            walls=blocked,
            start=(start, not self._has_key),
            goal=goal,
            key=key if self._has_key else None,
            steps_left={},
        )
        grid.steps_left.update(_steps_left(grid, cells))
        return grid


class Walk:
    """One episode, step by step."""

    def __init__(self, grid: Grid, *, is_char: bool) -> None:
        self._grid = grid
        self._is_char = is_char
        self._state = grid.start
        self._num_turns = 0

    def step(self, action: Action) -> Transition:
        """Takes a step, unless the word is unknown or the way blocked, and shows the grid; the goal ends the walk."""
        grid = self._grid
        self._num_turns += 1
        move = _WORDS.get(action.text.strip().rstrip(".").lower()) if len(action.text) < 20 else None
        after = None if move is None else grid.after(self._state, move)
        if after is None:
            return self._say(TurnStatus.MALFORMED if move is None else TurnStatus.TOOL_ERROR, 0.0)
        whole = grid.steps_left[grid.start]
        reward = (grid.steps_left[self._state] - grid.steps_left[after]) / whole
        self._state = after
        if after == (grid.goal, True):
            rewards = {OUTCOME: 1.0, "short": whole / self._num_turns}
            return Transition(is_end=True, rewards=rewards, reward=reward, state_key="end")
        return self._say(TurnStatus.OK, reward)

    def _say(self, status: TurnStatus, reward: float) -> Transition:
        (row, column), is_open = self._state
        text = show_char(self._grid, self._state) if self._is_char else show(self._grid, self._state)
        messages = (Message(role="user", content=text),)
        return Transition(messages=messages, reward=reward, status=status, state_key=f"{row},{column},{int(is_open)}")


def show(grid: Grid, state: State) -> str:
    """Rows of the grid: `@` you, `G` goal, `K` key, `#` wall, `.` free."""
    cells = {**dict.fromkeys(grid.walls, "#"), grid.goal: "G"}
    if grid.key is not None and not state[1]:
        cells[grid.key] = "K"
    cells[state[0]] = "@"
    every = range(grid.size)
    return "\n".join("".join(cells.get((row, column), ".") for column in every) for row in every)


def show_char(grid: Grid, state: State) -> str:
    """Own cell, cell of the missing key or goal, and `#` for each blocked move up, right, down, left: `b2d4-#--=`."""
    target = grid.goal if state[1] or grid.key is None else grid.key
    around = ("#" if grid.after(state, move) is None else "-" for move in MOVES.values())
    return f"{_name(state[0])}{_name(target)}{''.join(around)}="


def _name(cell: Cell) -> str:
    return f"{'abcdefgh'[cell[1]]}{cell[0] + 1}"


def _question(shown: str, has_key: bool) -> str:
    fetch = " Fetch the key K first." if has_key else ""
    return (
        f"You are @. Walk to G; # is a wall.{fetch} Say one word a turn: up, right, down or left.\n"
        f"Example: in the row .@G you say right.\n\n{shown}"
    )


def _steps_left(grid: Grid, cells: list[Cell]) -> dict[State, int]:
    """Distance to the goal of each state that can reach it, by a breadth-first search backwards from the goal."""
    before: dict[State, list[State]] = {}
    for cell in cells:
        for is_open in (False, True):
            for move in MOVES.values() if cell not in grid.walls else ():
                after = grid.after((cell, is_open), move)
                if after is not None:
                    before.setdefault(after, []).append((cell, is_open))
    steps: dict[State, int] = {(grid.goal, True): 0}
    waiting = deque(steps)
    while waiting:
        state = waiting.popleft()
        for earlier in before.get(state, ()):
            if earlier not in steps:
                steps[earlier] = steps[state] + 1
                waiting.append(earlier)
    return steps


def _shortest(grid: Grid) -> tuple[str, ...]:
    words: list[str] = []
    state = grid.start
    while grid.steps_left[state]:
        for word, move in MOVES.items():
            after = grid.after(state, move)
            if after is not None and grid.steps_left[after] < grid.steps_left[state]:
                words.append(word)
                state = after
                break
    return tuple(words)
