"""Programming: a function in Python against hidden tests, with the class and line of an error, and several attempts.

Invariant: `program_steps` interprets a program, and Python never executes it, so that it reaches neither the tests nor
their results nor anything of this process, and its limits are counted steps; each test has its own run. The tests
follow from the program itself: whoever writes their results into it has other tests.
"""

import hashlib
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

from swarm.config import EnvironmentConfig
from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.environments.params import Params, verifier_name
from swarm.episode import OUTCOME, Action, Actions, Message, Transition, TurnStatus
from swarm.extras.environments.program_steps import Run, read_program
from swarm.extras.environments.program_values import MAX_STEPS, ProgramFailed

Numbers = list[int]
Pairs = tuple[tuple[Numbers, object], ...]  # argument and result
_FENCED: Final = re.compile(r"```(?:python)?[ \t]*\n(.*?)```", re.DOTALL)
_MAX_DRAWS: Final = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """A change of a list of numbers, or a result from one: in words, as code over `xs`, and as a function."""

    words: str
    code: str
    apply: Callable[[Numbers], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Puzzle:
    """A function to write, as its operations, with the number of its hidden tests and an example of another one."""

    operations: tuple[Operation, ...]
    num_tests: int
    example: tuple[Numbers, object]
    seed: str

    def tests(self, program: str) -> Pairs:
        """The tests of a program; drawn again, at most 100 times, if they have fewer than three different results."""
        digest = hashlib.sha256(program.encode("utf-8", "surrogatepass")).hexdigest()
        source = random.Random(f"{self.seed}:{digest}")
        tests = _tests(source, self.operations, self.num_tests)
        for _ in range(_MAX_DRAWS):
            if _are_varied(tests):
                break
            tests = _tests(source, self.operations, self.num_tests)
        return tests


def _changes(k: int) -> tuple[Operation, ...]:
    table: tuple[tuple[str, str, Callable[[Numbers], object]], ...] = (
        (f"keep the numbers greater than {k}", f"[x for x in xs if x > {k}]", lambda xs: [x for x in xs if x > k]),
        (f"keep the multiples of {k}", f"[x for x in xs if x % {k} == 0]", lambda xs: [x for x in xs if x % k == 0]),
        (f"multiply each by {k}", f"[x * {k} for x in xs]", lambda xs: [x * k for x in xs]),
        (f"add {k} to each", f"[x + {k} for x in xs]", lambda xs: [x + k for x in xs]),
        (f"leave the first {k} out", f"xs[{k}:]", lambda xs: xs[k:]),
        (f"take every {k}th, beginning with the first", f"xs[::{k}]", lambda xs: xs[::k]),
        ("reverse the list", "xs[::-1]", lambda xs: xs[::-1]),
        ("sort it, smallest first", "sorted(xs)", sorted),
    )
    return tuple(Operation(words=words, code=code, apply=apply) for words, code, apply in table)


_RESULTS: Final = (
    Operation(words="return the list", code="xs", apply=lambda xs: xs),
    Operation(words="return the sum", code="sum(xs)", apply=lambda xs: sum(xs)),
    Operation(words="return how many there are", code="len(xs)", apply=lambda xs: len(xs)),
    Operation(words="return the largest (0 if none)", code="max(xs, default=0)", apply=lambda xs: max(xs, default=0)),
)  # fmt: skip


class CodeEnvironment(NumberedEnvironment):
    """A function `f(xs)` over a list of numbers.

    Params: `operations` (2: changes of the list before the result), `tests` (6), `max_turns` (3: attempts). Actions:
    the program, alone or fenced, in a part of Python: functions, loops, conditions, comprehensions, numbers, texts,
    lists, tuples, dicts, and their common methods and functions. Rewards: outcome 1 if all tests pass, `tests` the
    share that passes at the end, `first_try` 1 if all tests pass at the first attempt. A turn earns the change of that
    share.
    """

    answer_cpu_s = 0.5  # 40,000 steps take a tenth

    def __init__(self, config: EnvironmentConfig) -> None:
        """Reads the parameters. Raises ConfigError for an unknown one, or a value out of its bounds."""
        params = Params(config)
        self._operations = params.integer("operations", 2, 1, 5)
        self._tests = params.integer("tests", 6, 3, 20)
        self.max_turns = params.turns(3)
        self.signals = frozenset({"turn_rewards", "state_keys", "reward_parts"})
        params.finish()
        minor = ".".join(map(str, sys.version_info[:2]))  # which decides what is a syntax error, and in which line
        super().__init__(config, f"{verifier_name(config, 3)}+python{minor}")

    def build(self, task_id: int) -> Problem:
        """Draws operations, again at most 100 times if tests of them have fewer than three different results."""
        source = random.Random(f"{self.config.seed}:{task_id}")
        puzzle, are_varied = self._draw(source)
        for _ in range(_MAX_DRAWS):
            if are_varied:
                break
            puzzle, are_varied = self._draw(source)
        *changes, result = (operation.words for operation in puzzle.operations)
        given, expected = puzzle.example
        text = f"{', then '.join(changes)}, then {result}"
        return Problem(
            question=(
                "Write a Python function f(xs) over a list of whole numbers, and nothing else, such as\n"
                "```python\ndef f(xs):\n    xs = [x - 1 for x in xs]\n    return len(xs)\n```\n"
                f"It shall {text}. For example f({given}) is {expected}."
            ),
            reference=_program(puzzle.operations),
            entry=puzzle,
            initial_state=f"{text} {puzzle.seed}",
        )

    def begin(self, problem: Problem) -> "Programming":
        """A new try, before the first attempt."""
        return Programming(problem.entry, self.max_turns)

    def demonstration(self, task_id: int) -> Actions:
        """Actions that earn every reward in full. Raises LookupError for a task out of range."""
        return (f"```python\n{self.reference(task_id)}```",)

    def _draw(self, source: random.Random) -> tuple[Puzzle, bool]:
        """A puzzle, and whether tests of it have enough different results."""
        changes = [source.choice(_changes(source.randint(2, 5))) for _ in range(self._operations)]
        operations = (*changes, source.choice(_RESULTS))
        example, *tests = _tests(source, operations, self._tests + 1)
        seed = str(source.getrandbits(64))
        puzzle = Puzzle(operations=operations, num_tests=self._tests, example=example, seed=seed)
        return puzzle, _are_varied(tests)


class Programming:
    """One try: attempts until all tests pass, or the turns are used up."""

    def __init__(self, puzzle: Puzzle, max_turns: int) -> None:
        self._puzzle = puzzle
        self._left = max_turns
        self._share = 0.0
        self._num_attempts = 0

    def step(self, action: Action) -> Transition:
        """Judges an attempt; returns the first error or the number of tests that passed, or ends the episode."""
        num_tests, before = self._puzzle.num_tests, self._share
        num_passed, error = judge(program_in(action.text), self._puzzle)
        self._share = num_passed / num_tests
        self._left -= 1
        self._num_attempts += 1
        is_right = num_passed == num_tests
        status = TurnStatus.MALFORMED if error and error.name == "SyntaxError" else TurnStatus.OK
        if is_right or not self._left:
            is_first = is_right and self._num_attempts == 1
            rewards = {OUTCOME: float(is_right), "tests": self._share, "first_try": float(is_first)}
            return Transition(is_end=True, rewards=rewards, reward=self._share - before, status=status, state_key="end")
        said = f"{error}" if error else f"{num_passed} of {num_tests} tests pass"
        messages = (Message(role="user", content=f"{said}. Try again."),)
        key = f"{num_passed}:{said}"
        return Transition(messages=messages, reward=self._share - before, status=status, state_key=key)


def judge(program: str, puzzle: Puzzle) -> tuple[int, ProgramFailed | None]:
    """Number of tests that a program passes, and its first error or None. All tests share MAX_STEPS steps."""
    try:
        tree = read_program(program)
    except ProgramFailed as error:
        return 0, error
    num_passed, num_steps, first = 0, MAX_STEPS, cast("ProgramFailed | None", None)
    for given, expected in puzzle.tests(program):
        run = Run(tree, num_steps)
        try:
            num_passed += _is_same(run.call("f", list(given)), expected)
        except ProgramFailed as error:
            first = first or error
        num_steps -= run.num_steps
    return num_passed, first


def program_in(text: str) -> str:
    """The first fenced block of a text, or without one the whole text, stripped."""
    found = _FENCED.search(text)
    return found[1] if found else text.strip()


def _is_same(value: object, expected: object) -> bool:
    """True if both are equal in value and type; looks at no more items than the expected value holds."""
    if isinstance(expected, list):
        if type(value) is not list:
            return False
        items, wanted = cast("list[object]", value), cast("list[object]", expected)
        return len(items) == len(wanted) and all(map(_is_same, items, wanted))
    return type(value) is type(expected) and value == expected


def _tests(source: random.Random, operations: tuple[Operation, ...], count: int) -> Pairs:
    """Random lists and the empty one last, each with its result."""
    lists = [[source.randint(-9, 20) for _ in range(source.randint(3, 9))] for _ in range(count - 1)]
    return tuple((numbers, _result(operations, numbers)) for numbers in (*lists, []))


def _are_varied(tests: Sequence[tuple[Numbers, object]]) -> bool:
    return len({repr(result) for _, result in tests}) >= min(3, len(tests))


def _result(operations: tuple[Operation, ...], numbers: Numbers) -> object:
    *changes, result = operations
    for change in changes:
        numbers = cast("Numbers", change.apply(numbers))
    return result.apply(numbers)


def _program(operations: tuple[Operation, ...]) -> str:
    *changes, result = operations
    return "\n".join(
        ["def f(xs):", *(f"    xs = {change.code}" for change in changes), f"    return {result.code}", ""]
    )
