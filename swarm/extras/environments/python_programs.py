"""Programming in Python itself: a program that CPython carries out, against hidden tests of a file of records.

Invariant: tests and expected outputs stay in the process that judges; the program runs in another one, which has its
source and one input at a time, and gives bytes or plain values (`swarm.environments.sandbox.programs`).
"""

import ast
import builtins
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, cast

from swarm.config import EnvironmentConfig
from swarm.environments.environment import Problem
from swarm.environments.jsonl import RecordEnvironment
from swarm.environments.sandbox.programs import Program, ProgramEnded, ProgramLimits, is_asking, require_host
from swarm.episode import OUTCOME, Message
from swarm.errors import ConfigError
from swarm.extras.environments.code import program_in

MAX_TESTS: Final = 200  # of a record
_TESTS_CPU_S: Final = 0.8  # of the judge, for the tests of an answer: a value may make them loop
_AGAIN_S: Final = 0.01
_FIELDS: Final = ("tests", "test_list", "test", "input_output", "verification_info")  # own files, MBPP, HumanEval, ...
_FILE: Final = "<tests>"


@dataclass(frozen=True, kw_only=True, slots=True)
class InputTest:
    """Text that the program reads, and the text that it has to print."""

    given: str
    expected: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTest:
    """A call of a function of the program with plain values, and the value that it has to return."""

    function: str
    arguments: list[Any]
    expected: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Assertions:
    """Code of tests: what comes before them, each test, and the names that stand for functions of the program."""

    setup: str
    tests: tuple[str, ...]
    functions: frozenset[str]


Tests = tuple[InputTest | CallTest, ...] | Assertions


class PythonEnvironment(RecordEnvironment):
    """Records with a question and the tests of a program, in one of the forms that `read_tests` knows.

    Params: `path` or `dataset` (the file), `question`, `answer` (a right program, if there is one), `tests` (field with
    the tests), `cpu_s` (2: CPU seconds of the program over all tests), `memory_mb` (256). Action: the program, alone or
    fenced. Rewards: outcome 1 if all tests pass, `tests` the share that passes.
    """

    is_answer_needed = False
    is_record_needed = True
    known_params = RecordEnvironment.known_params | {"tests", "cpu_s", "memory_mb"}
    answer_cpu_s = 1.0  # of the judge
    signals = frozenset({"reward_parts"})

    def __init__(self, config: EnvironmentConfig) -> None:
        """Raises ConfigError for a param out of its bounds, and as RecordEnvironment."""
        self._tests_key = str(config.params.get("tests", ""))
        self.program_cpu_s = _number(config, "cpu_s", 2.0, 0.1, 60.0)
        self._memory_bytes = int(_number(config, "memory_mb", 256, 16, 2**20) * 2**20)
        super().__init__(config, f"python{'.'.join(map(str, sys.version_info[:2]))}")

    def build(self, task_id: int) -> Problem:
        """The question of a record, with its tests. Raises LookupError if it has no tests of a known form."""
        problem = super().build(task_id)
        try:
            tests = read_tests(problem.entry.record, self._tests_key)
        except (ValueError, KeyError, TypeError, SyntaxError, RecursionError) as error:
            raise LookupError(f"environment {self.name}: record {task_id}: {error}") from None
        return replace(problem, entry=_Asked(tests, problem.entry.chat))

    def rewards(self, problem: Problem, answer: str) -> Mapping[str, float]:
        """The outcome and the share of tests that the program in an answer passes."""
        require_host()
        source, tests = program_in(answer), cast("Tests", problem.entry.tests)
        limits = ProgramLimits(cpu_s=self.program_cpu_s, memory_bytes=self._memory_bytes)
        passed = _judge(source, tests, limits)
        return {OUTCOME: float(all(passed)), "tests": sum(passed) / len(passed)}

    def score(self, task_id: int, text: str) -> Mapping[str, float]:
        """The rewards of an answer of another node, which is believed in the rest of its episode."""
        return self.rewards(self.problem(task_id), text.strip())


class _Asked(NamedTuple):
    """The tests of a record, and its chat."""

    tests: Tests
    chat: tuple[Message, ...]


def read_tests(record: Mapping[str, Any], key: str = "") -> Tests:
    """The tests in the field `key` of a record, or without a key in the first one of a usual name (_FIELDS).

    Forms: inputs and outputs, as `{"inputs": [...], "outputs": [...]}` or a list of `{"input": ..., "output": ...}`,
    also as JSON text and below "test_cases"; with a "fn_name", arguments and values of that function. Assertions, as a
    list of texts, or as one text with functions `test_...`, with `check(candidate)` for the record's `entry_point`, or
    with neither; the field "test_setup_code" or "setup" goes before.

    Raises:
        ValueError, KeyError, TypeError, SyntaxError: there are none, more than MAX_TESTS, or none of these forms.
    """
    key = key or next((name for name in _FIELDS if name in record), _FIELDS[0])
    given = record.get(key)
    if isinstance(given, str) and given.lstrip()[:1] in ("{", "["):
        with suppress(ValueError):
            given = json.loads(given)
    if isinstance(given, dict):
        given = cast("dict[str, Any]", given).get("test_cases", given)
    if isinstance(given, dict):
        columns = cast("dict[str, Any]", given)
        pairs = zip(columns["inputs"], columns["outputs"], strict=True)
        given = [{"input": one, "output": other, "fn_name": columns.get("fn_name")} for one, other in pairs]
    setup = str(record.get("test_setup_code") or record.get("setup") or "")
    entry_point = str(record.get("entry_point") or "")
    if isinstance(given, str):
        cases = _cases_in(given, entry_point)
        tests: Tests = _assertions(f"{setup}\n{given}" if cases else setup, cases or (given,), entry_point)
    elif isinstance(given, list) and given:
        items = cast("list[Any]", given)
        if all(isinstance(each, str) for each in items):
            tests = _assertions(setup, tuple(items), entry_point)
        else:
            tests = tuple(_case(each) for each in items)
    else:
        raise ValueError(f"no tests in its field {key!r} ({', '.join(sorted(record))}); name it with params.tests")
    num_tests = len(tests.tests) if isinstance(tests, Assertions) else len(tests)
    if num_tests > MAX_TESTS:
        raise ValueError(f"{num_tests} tests exceed {MAX_TESTS}")
    return tests


def _case(data: dict[str, Any]) -> InputTest | CallTest:
    given, expected, name = data["input"], data["output"], data.get("fn_name")
    if not name:
        return InputTest(given=_lines(given), expected=_lines(expected))
    if isinstance(given, str):  # an argument in each line, as JSON
        given, expected = [json.loads(line) for line in given.splitlines()], json.loads(expected)
    return CallTest(function=str(name), arguments=list(given), expected=expected)


def _lines(given: Any) -> str:
    if isinstance(given, list):
        return "\n".join(map(str, cast("list[object]", given)))
    if not isinstance(given, str):
        raise TypeError(f"a test has {given!r:.60} where a text belongs")
    return given


def _cases_in(code: str, entry_point: str) -> tuple[str, ...]:
    """The calls that carry out the tests which code defines; () where the code itself is the test."""
    names = [each.name for each in ast.parse(code).body if isinstance(each, ast.FunctionDef)]
    if entry_point and "check" in names:
        return (f"check({entry_point})",)
    return tuple(f"{name}()" for name in names if name.startswith("test_"))


def _assertions(setup: str, tests: tuple[str, ...], entry_point: str) -> Assertions:
    """Tests as code; each name in them that nothing binds is a function of the program."""
    nodes = [node for code in (setup, *tests) for node in ast.walk(ast.parse(code, _FILE))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)} | set(dir(builtins))
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    used = {node.id for node in names} - bound
    modules = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    imported = sorted(used & modules & sys.stdlib_module_names)  # such as math, which only the program imports
    functions = used - set(imported) | ({entry_point} if entry_point else set())
    if not functions:
        raise ValueError("its tests call no function of the program")
    return Assertions(
        setup="\n".join([*(f"import {name}" for name in imported), setup]), tests=tests, functions=frozenset(functions)
    )


def _judge(source: str, tests: Tests, limits: ProgramLimits) -> list[bool]:
    """For each test, True if the program passes it; a test that the time did not suffice for counts as failed."""
    passed = list[bool]()
    before = signal.signal(signal.SIGVTALRM, _stop_tests)
    signal.setitimer(signal.ITIMER_VIRTUAL, _TESTS_CPU_S)
    try:
        with suppress(_TestsTookLong):
            judge = (
                _judge_code(source, tests, limits)
                if isinstance(tests, Assertions)
                else _judge_runs(source, tests, limits)
            )
            for is_right in judge:
                passed.append(is_right)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    num_tests = len(tests.tests) if isinstance(tests, Assertions) else len(tests)
    return passed + [False] * (num_tests - len(passed))


def _judge_runs(source: str, tests: Sequence[InputTest | CallTest], limits: ProgramLimits) -> Iterator[bool]:
    """Runs a program for each test, in a process of its own; all of them share the CPU time."""
    left_s = limits.cpu_s
    for test in tests:
        is_right = False
        if left_s > 0:
            with Program(source, replace(limits, cpu_s=left_s)) as program, suppress(ProgramEnded, Exception):
                if isinstance(test, InputTest):
                    output = program.output(test.given)
                    is_right = program.ended == "done" and _plain_lines(output) == _plain_lines(test.expected)
                else:
                    is_right = _listed(program.call(test.function, *test.arguments)) == test.expected
            left_s -= program.cpu_s
        yield is_right


def _judge_code(source: str, tests: Assertions, limits: ProgramLimits) -> Iterator[bool]:
    """Carries out tests here, one after the other, with one process of the program behind the functions they call."""
    with Program(source, limits) as program:
        calls = list[str]()
        space: dict[str, Any] = {"__name__": "tests"}
        space |= {name: partial(_call, program, calls, name) for name in tests.functions}
        for number, code in enumerate((tests.setup, *tests.tests)):
            num_calls, is_right = len(calls), False
            with suppress(ProgramEnded, SystemExit, Exception):
                exec(compile(code, _FILE, "exec"), space)
                is_right = len(calls) > num_calls
            if number:
                yield is_right


def _call(program: Program, calls: list[str], name: str, *arguments: object) -> Any:
    calls.append(name)
    return program.call(name, *arguments)


class _TestsTookLong(BaseException):
    """A value of the program made the tests take more than _TESTS_CPU_S."""


def _stop_tests(*_: object) -> None:
    if is_asking():  # half a reply read would be the beginning of the next one
        signal.setitimer(signal.ITIMER_VIRTUAL, _AGAIN_S)
    else:
        raise _TestsTookLong


def _plain_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _listed(value: Any) -> Any:
    """A value with lists in the place of tuples, as JSON has none."""
    if isinstance(value, list | tuple):
        return [_listed(each) for each in cast("list[object]", value)]
    if isinstance(value, dict):
        return {key: _listed(each) for key, each in cast("dict[object, object]", value).items()}
    return value


def _number(config: EnvironmentConfig, name: str, default: float, least: float, most: float) -> float:
    value = config.params.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ConfigError(
            f"environment {config.name}: params.{name} must be from {least:g} to {most:g}, got {value!r:.40}"
        )
    return float(value)
