"""Programs carried out with counted steps: as Python would, bounded before anything large is made, and out of reach."""

import contextlib
import gc
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from swarm.config import EnvironmentConfig
from swarm.environments.environment import Problem
from swarm.environments.load import build_environment
from swarm.environments.replay import replay
from swarm.extras.environments.code import CodeEnvironment, Puzzle, judge, program_in
from swarm.extras.environments.program_steps import Run, read_program
from swarm.extras.environments.program_values import MAX_STEPS, ProgramFailed

PROGRAMS = (
    "def f(xs):\n    total = 0\n    for x in xs:\n        if x % 2 == 0:\n            continue\n"
    "        total += x\n    return total",
    "def f(xs):\n    i, out = 0, []\n    while i < len(xs):\n        out.append(xs[i] ** 2)\n"
    "        i += 1\n    else:\n        out += [0]\n    return out",
    "def f(xs):\n    def g(n, m=3):\n        return 1 if n <= 1 else n * g(n - 1)\n    return [g(abs(x)) for x in xs]",
    "def f(xs):\n    seen = {}\n    for i, x in enumerate(xs):\n        seen[x] = seen.get(x, 0) + i\n"
    "    return sorted(seen.items(), key=lambda p: (-p[1], p[0]))",
    "f = lambda xs: [a - b for a, b in zip(xs, xs[1:]) if a != b and not a < b]",
    "def f(xs):\n    return ', '.join(map(str, xs[::-1])).replace('1', 'one').upper().split(',')",
    "def f(xs):\n    for x in range(2, 50):\n        for y in range(2, x):\n            if x % y == 0:\n"
    "                break\n        else:\n            xs.append(x)\n    return xs",
    "def f(xs):\n    return {x: [y for y in xs if y > x] for x in xs}",
    "def f(xs):\n    a, (b, *c) = 1, (2, 3)\n    return a",
    "def f(xs):\n    return f'{len(xs)} items, largest {max(xs)}', round(sum(xs) / len(xs), 2), divmod(xs[0], 3)",
    "def f(xs):\n    xs.sort(key=abs, reverse=True)\n    xs.insert(0, xs.pop())\n"
    "    return xs, any(x > 3 for x in xs), min(xs, key=lambda x: -x)",
    "def f(xs):\n    return [x if isinstance(x, int) else 0 for x in xs if x is not None][1:-1]",
    "def f(xs):\n    ys = xs\n    ys += [1]\n    ys[0] += 2\n    return xs",
    "def f(xs):\n    return sum(xs, 5) if xs and xs[0] else None",
    "def f(xs):\n    return xs[100]",
    "def f(xs):\n    return undefined",
    "def f(xs):\n    return 'a' + 1",
    "def f(xs):\n    assert len(xs) == 0\n    return 1",
    "def f(xs):\n    return {'a': 1}['b']",
    "def f(xs):\n    return 1 / (xs[0] - xs[0])",
    "def f(xs):\n    return int('x')",
    "def f(xs, y):\n    return y",
    "def f(xs):\n    return f(xs)",
)


def by_python(program: str, *arguments: Any) -> tuple[str, object]:
    space: dict[str, Any] = {}
    try:
        exec(program, space)
        return "value", space["f"](*arguments)
    except Exception as error:
        return "error", type(error).__name__


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_comes_to_what_python_makes_of_it(program: str) -> None:
    for numbers in ([3, -1, 4, 1, 5, 9, 2, 6], [7, 7], [1, 2, 3]):
        expected = by_python(program, list(numbers))
        try:
            made: tuple[str, object] = "value", Run(read_program(program)).call("f", list(numbers))
        except ProgramFailed as error:
            made = "error", error.name
        assert made == expected or (made == ("error", "NotImplementedError") and "*c" in program)


ESCAPES = (
    "().__class__", "xs.__class__", "f.__globals__", "[].append.__self__", "'{0.__class__}'.format(xs)",
    "'%s' % xs", "getattr(xs, 'x')", "__import__('os')", "open('/etc/passwd')", "eval('1')", "exec('1')",
    "globals()", "vars()", "dir()", "type(xs)", "str.join", "xs.__len__()", "object", "print.__self__",
    "(x for x in xs).gi_frame", "help", "input()", "memoryview(xs)", "breakpoint()", "xs.__reduce__()", "f'{xs!r:>9}'",
    "len.__call__(xs)", "id(xs)", "hash('a')", "set(xs)", "__builtins__", "__name__", "super()",
    "Exception().__traceback__",
)  # fmt: skip
STATEMENTS = (
    "import os", "from sys import modules", "global x", "del xs", "raise KeyError", "class A:\n        pass",
    "try:\n        f(xs)\n    except RecursionError:\n        pass", "with xs:\n        pass", "yield 1", "await xs",
    "async def g(): pass", "nonlocal xs", "xs.x = 1", "f.__code__ = 1", "@f\n    def g(): pass", "def g(*a): pass",
    "match xs:\n        case []:\n            pass",
)  # fmt: skip


@pytest.mark.parametrize("escape", ESCAPES)
def test_nothing_but_plain_data_can_be_reached(escape: str) -> None:
    with pytest.raises(ProgramFailed):
        Run(read_program(f"def f(xs):\n    return {escape}")).call("f", [1, 2])


@pytest.mark.parametrize("statement", STATEMENTS)
def test_statements_that_programs_do_not_have_end_them(statement: str) -> None:
    with pytest.raises(ProgramFailed):
        Run(read_program(f"def f(xs):\n    {statement}\n    return 1")).call("f", [1, 2])


BOMBS = (
    "while True: pass", "while 1: xs.append(1)", "for x in xs: xs.append(x)", "return 9 ** 9 ** 9",
    "return 2 ** 10 ** 9",
    "x = 3\n    while 1: x = x * x", "return 'a' * 10 ** 10", "return [0] * 10 ** 10",
    "return [[0] * 9999] * 9999 == 1",
    "return list(range(10 ** 12))", "return sum(range(10 ** 12))", "return 'a' in range(10 ** 18)",
    "return f(xs) + f(xs)",
    "x = []\n    for i in range(64): x = [x, x]\n    return str(x)",
    "x = ()\n    for i in range(64): x = (x, x)\n    return {x: 1}",
    "x = y = []\n    for i in range(64): x, y = [x, x], [y, y]\n    return x == y", "xs.append(xs)\n    return str(xs)",
    "x = 'aa'\n    while 1: x = x.replace('a', 'aaaaaaaaaa')", "x = 'a'\n    while 1: x = x.join(['b'] * 999)",
    "x = 'a'\n    while 1: x += x", "x = [1]\n    while 1: x += x", "return 10 ** 1999 * 10 ** 1999",
    "return int('9' * 4000)",
    "d = {}\n    for i in range(9999): d[i * (2 ** 61 - 1)] = i\n    return len(d)",
    "return sorted(range(9999), key=lambda x: f(xs))",
    "return max([[[0] * 99] * 99] * 99)", "d = {}\n    for k in range(99): d[k] = k\n    for k in d: d[-k - 1] = 0",
    "return [x for x in range(9999) for y in range(9999)]", "return (lambda g: g(g))(lambda g: g(g))",
    "return round(10.0, 10 ** 9)",
    "return " + "(" * 90 + "1" + ")" * 90, "return " + "-" * 3000 + "1", "return " + "not " * 900 + "1",
    "return " + "[" * 80 + "]" * 80,
    "return 1e308 * 10 ** 400", "return (-8) ** 0.5", "x = [9999] * 9999\n    while 1: x.count(x)",
    "return range(10 ** 30)[::7]",
    "x = ''.join(map(chr, range(5000)))\n    while 1: x.upper().title().find('zz')",
    "while 1: sorted(list(range(9000)))",
    "x = list(range(9999))\n    while 1: x.insert(0, x.pop())", "x = 'a' * 9999\n    while 1: x[::-1]",
    "while 1: int('9' * 600)",
)  # fmt: skip


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Time is that of the code under test, not of a collection of all that other tests have left."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("bomb", BOMBS)
def test_what_would_take_long_or_much_ends_within_its_steps(bomb: str) -> None:
    began_s = time.process_time()
    try:
        run = Run(read_program(f"def f(xs):\n    {bomb}"))
    except ProgramFailed:
        return
    try:
        run.call("f", [1, 2])
    except ProgramFailed as error:
        assert error.name in (
            "TimeoutError",
            "RecursionError",
            "MemoryError",
            "OverflowError",
            "RuntimeError",
            "TypeError",
        )
    assert run.num_steps <= MAX_STEPS and time.process_time() - began_s < 0.4


@pytest.mark.parametrize("name", ["strip", "lstrip", "rstrip"])
def test_stripping_takes_steps_by_the_letters_that_are_compared(name: str) -> None:
    run = Run(read_program(f"def f(xs):\n    return ('a' * xs[0]).{name}('b' * xs[0] + 'a')"))
    assert run.call("f", [50]) == ""
    with pytest.raises(ProgramFailed, match="TimeoutError"):
        run.call("f", [5000])


def test_building_a_list_takes_steps_by_its_length() -> None:
    tree = read_program("def f(n):\n    xs = []\n    for i in range(n):\n        xs.append(i)\n    return len(xs)")
    runs = Run(tree), Run(tree)
    assert [run.call("f", count) for run, count in zip(runs, (1000, 2000), strict=True)] == [1000, 2000]
    assert runs[1].num_steps < 2 * runs[0].num_steps < 20_000


@pytest.mark.parametrize(
    "body", ["f(xs)", "sorted([1], key=f)", "[f(y) for y in [1]]", "max([1], key=lambda y: f(y))", "-" * 1300 + "1"]
)
def test_steps_and_errors_are_the_same_at_any_depth_of_the_caller(body: str) -> None:
    def at(depth: int) -> tuple[str, int]:
        if depth:
            return at(depth - 1)
        try:
            run = Run(read_program(f"def f(xs):\n    return {body}"))
        except ProgramFailed as error:
            return str(error), 0
        with pytest.raises(ProgramFailed) as failed:
            run.call("f", [])
        return str(failed.value), run.num_steps

    assert at(0) == at(600) and at(0)[0] == "RecursionError in line 2"


@pytest.mark.usefixtures("uncollected")
def test_programs_with_random_changes_raise_nothing_else_and_end_in_time() -> None:
    source = random.Random(0)
    texts = [*PROGRAMS, *(f"def f(xs):\n    {each}" for each in (*BOMBS, *STATEMENTS))]
    words = [word for text in texts for word in re.findall(r"\w+|\W", text)]
    for _ in range(600):
        parts = re.findall(r"\w+|\W", source.choice(texts))
        for _ in range(source.choice((1, 2, 5))):
            parts[source.randrange(len(parts))] = source.choice(words)
        began_s = time.process_time()
        with contextlib.suppress(ProgramFailed):
            Run(read_program("".join(parts))).call("f", [3, -1, 2])
        assert time.process_time() - began_s < 0.4, "".join(parts)


def made(**params: object) -> CodeEnvironment:
    built = build_environment(EnvironmentConfig.model_validate({"name": "code", "kind": "code", "params": params}))
    assert isinstance(built, CodeEnvironment)
    return built


def test_an_attempt_says_the_first_error_or_how_many_tests_pass() -> None:
    environment = made()
    wrong = (
        "def f(xs):\n  retrun 1",
        "def f(xs):\n    return y",
        "def g(): pass",
        "def f(xs):\n    return 'x'",
        "while 1: pass",
    )
    said = [replay(environment, 0, (each,)).transitions[0].messages[0].content for each in wrong]
    assert said == [
        "SyntaxError in line 2. Try again.",
        "NameError in line 2. Try again.",
        "NameError in line 1. Try again.",
        "0 of 6 tests pass. Try again.",
        "TimeoutError in line 1. Try again.",
    ]
    outcome = replay(environment, 0, (wrong[0], wrong[3], *environment.demonstration(0)))
    assert outcome.rewards == {"outcome": 1.0, "tests": 1.0, "first_try": 0.0}
    assert sum(each.reward for each in outcome.transitions) == pytest.approx(1.0)


def test_no_constant_and_no_left_over_state_passes_the_tests() -> None:
    environment = made(operations=1)
    for task_id in range(100):
        problem: Problem = environment.problem(task_id)
        tests = problem.entry.tests("")
        results = [result for _, result in tests]
        for result in (*results, problem.entry.example[1]):
            assert judge(f"def f(xs):\n    return {result!r}", problem.entry)[0] < len(results)
        listed = f"answers = {results!r}\nn = [0]\ndef f(xs):\n    n[0] += 1\n    return answers[n[0] - 1]"
        assert judge(listed, problem.entry)[0] < len(results), "a list in order, counted over tests"


def written_out(puzzle: Puzzle, program: str) -> str:
    """A program that knows the results of another program's tests, as each node can compute them."""
    cases = "".join(f"    if xs == {given!r}:\n        return {result!r}\n" for given, result in puzzle.tests(program))
    return f"def f(xs):\n{cases}    return 0\n"


def test_a_program_with_the_results_of_the_tests_in_it_has_other_tests() -> None:
    environment = made()
    for task_id in range(50):
        puzzle: Puzzle = environment.problem(task_id).entry
        program = ""
        for _ in range(3):
            program = written_out(puzzle, program)
            assert judge(program, puzzle)[0] < puzzle.num_tests
        assert judge(environment.reference(task_id), puzzle)[0] == puzzle.num_tests


def test_a_program_is_found_in_a_fence_or_alone() -> None:
    assert program_in("Here:\n```python\nx = 1\n```\nand ```\ny\n```") == "x = 1\n"
    assert program_in(" x = 1 ") == "x = 1" and program_in("```" * 30_000).startswith("```")
