"""Programs that CPython carries out: right ones earn the outcome, cheats nothing, and none outlives its bounds."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from waits import until

from swarm.config import EnvironmentConfig, ModelConfig, SandboxConfig
from swarm.environments.determinism import examine
from swarm.environments.load import build_environments
from swarm.environments.replay import replay
from swarm.environments.sandbox import scoring_process
from swarm.environments.sandbox.plain_values import decode, encode
from swarm.environments.sandbox.program_host import START_S, TICK_S
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.errors import ConfigError
from swarm.extras.environments.python_programs import Assertions, CallTest, InputTest, read_tests
from swarm.interfaces import Producer
from swarm.model.tokenizer import load_tokenizer
from swarm.testing.builders import answers
from swarm.types import NodeId

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux only"),
    pytest.mark.asyncio(loop_scope="module"),  # that of `judge`
]

SECRET = "7316"  # what the program has to print for the hidden input, and to return for the hidden argument
RIGHT = {"output": "print(int(input()) * 4)", "call": "def f(x):\n    return sorted([x * 4, 0])[1]"}
HIDDEN = f"def test_f():\n    assert f(1829) == {SECRET}\ndef test_order():\n    assert sorted([f(2), 1]) == [1, 8]"
CPU_S = 0.2
FROZEN = "print(random.random(), hash('a'), time.time(), datetime.datetime.now().year, time.perf_counter())"

# Each wants the outcome for an input or an argument that it cannot know the result of.
OUTPUT_CHEATS = {
    "frames": """
import re, sys
frame, found = sys._getframe(), []
while frame:
    found += [str(value) for value in [*frame.f_locals.values(), *frame.f_globals.values()]]
    frame = frame.f_back
print((re.findall("[0-9]{{4}}", " ".join(found)) or ["no"])[-1])""",
    "collector": """
import gc
texts = [each for each in gc.get_objects() if isinstance(each, (dict, list, tuple))]
found = [value for each in texts for value in (each.values() if isinstance(each, dict) else each)]
print(next((each for each in found if isinstance(each, str) and each.strip().isdigit() and len(each) == 4), "no"))""",
    "the answer before": """
import gc
for each in gc.get_objects():
    for value in each.values() if isinstance(each, dict) else each if isinstance(each, (list, tuple)) else ():
        if isinstance(value, str) and "* 4" in value and "collect" not in value and len(value) < 60:
            exec(value)""",
    "tests file": "print(open('{file}').read().split('outputs')[1][5:9])",
    "tests folder": "import os\nprint(os.listdir('{folder}'))",
    "memory of others": """
import os
for pid in (os.getpid(), os.getppid()):
    data = open(f'/proc/{{pid}}/maps').read()
print(data)""",
    "descriptors": """
import os
for number in range(64):
    try:
        print(os.read(number, 10**6))
    except OSError:
        pass""",
    "exit code": "import os\nos._exit(0)",
    "exception as an exit": "raise SystemExit(0)",
    "words of the protocol": 'print(\'{{"ended": "done", "output": "{wrong}", "cpu_s": 0}}\')',
    "frames of the protocol": """
import os, json
frame = json.dumps({{"ended": "done", "output": "{wrong}", "cpu_s": 0.0, "outcomes": [1.0], "nonce": ""}}).encode()
for number in range(64):
    try:
        os.write(number, len(frame).to_bytes(4) + frame)
    except OSError:
        pass""",
    "judge": "import swarm.extras.environments.python_programs as judge\njudge._plain_lines = lambda text: []",
    "what is imported": """
import sys, builtins
for name, module in list(sys.modules.items()):
    if name.startswith("swarm"):
        for key in list(vars(module)):
            setattr(module, key, lambda *a, **k: True)
builtins.open = builtins.len = lambda *a, **k: True""",
    "survivor": """
import os
if os.fork() == 0:
    while True:
        os.write(1, b'{wrong}')""",
    "signal": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "no descriptors": "import os\nos.closerange(0, 64)",
    "surroundings": "import os\nprint(os.environ, os.getcwd(), os.listdir('/'))",
    "note for the next": "open('note', 'w').write('x')\nprint({wrong})",
    "raw memory": """
import ctypes, gc
print(ctypes.string_at(id(gc.get_objects()), 64))
ctypes.CDLL(None).system(b'cat {file}')""",
}
CALL_CHEATS = {
    "equal to all": "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()",
    "number equal to all": "class A(int):\n    def __eq__(self, other): return True\ndef f(x): return A(1)",
    "text equal to all": "class A(str):\n    def __eq__(self, other): return True\ndef f(x): return A('1')",
    "list equal to all": "class A(list):\n    def __eq__(self, other): return True\ndef f(x): return A([1])",
    "assertion": "def f(x): raise AssertionError",
    "exit": "import os\ndef f(x): os._exit(0)",
    "end": "def f(x): raise SystemExit(0)",
    "names of the tests": "def sorted(x): return [1, 8]\ndef test_f(): pass\ntest_order = test_f\ndef f(x): return 8",
    "no number": "def f(x): return float('nan')",
    "frames": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if "731" in str(value) and value.__class__ is int:
                return value
        frame = frame.f_back""",
    "answers before questions": """
import os
from typing import *
for value in (1, 8, 8, 8):
    frame = b"=" + str(value).encode()
    os.write(4, len(frame).to_bytes(4) + frame)
def f(x): return 8""",
    "no frame": "import os\ndef f(x): os.write(4, b'\\xff' * 400)",
    "no value": "import os\nframe = b'={\"list\": [[[1]]]'\ndef f(x): os.write(4, len(frame).to_bytes(4) + frame)",
    "unknown kind": "import os\nframe = b'={\"object\": []}'\ndef f(x): os.write(4, len(frame).to_bytes(4) + frame)",
    "exception of another class": "class Mine(Exception): pass\ndef f(x): raise Mine",
    "codec": """
import sys
sys.modules['swarm.environments.sandbox.plain_values'].encode = lambda value: b'true'
sys.modules['swarm.environments.sandbox.program_host'].encode = lambda value: b'true'
def f(x): return 1""",
}
# Each takes more than it may; the bound of CPU time ends those that nothing else ends.
RESOURCES = {
    "loop": "while True: pass",
    "loop in C": "2 ** (10 ** 10) % 3",
    "pattern": "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
    "list": "x = [0]\nwhile True: x += x",
    "text": "x = 'x' * 10 ** 11",
    "compressed": "import zlib\nd = zlib.compress(bytes(2 ** 24))\nx = [zlib.decompress(d) for _ in range(10 ** 4)]",
    "output": "while True: print('x' * 10 ** 6)",
    "processes": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading\nwhile True:\n    threading.Thread(target=lambda: None).start()",
    "depth": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef g(n): return g(n + 1) + 1\ng(0)",
    "descriptors": "import os\nwhile True: os.pipe()",
    "disk": "open('/tmp/fill', 'wb').write(bytes(10 ** 9))",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', 80))",
    "deaf to signals": "import signal\n[signal.signal(s, signal.SIG_IGN) for s in (15, 24, 27)]\nwhile True: pass",
    "no text": "print('\ud800' * 10 ** 5)",
    "sleep": "import time\nwhile True: time.sleep(1000)",
    "wait": "import select\nselect.select([], [], [], 1000)",
    "naps": "import select\nwhile True: select.select([], [], [], 1)",
}
CALL_RESOURCES = {
    "long value": "def f(x): return 'x' * 10 ** 8",
    "deep value": "def f(x):\n    v = []\n    for _ in range(10 ** 5): v = [v]\n    return v",
    "round value": "def f(x):\n    v = []\n    v.append(v)\n    return v",
    "many digits": "def f(x): return 10 ** 5000",
    "frame of gigabytes": "import os\ndef f(x):\n    while True: os.write(4, b'\\x7f' * 65536)",
    "colliding numbers": """
import os
numbers = ", ".join(str(k * (2 ** 61 - 1)) for k in range(1, 40000)).encode()
def f(x): os.write(4, (len(numbers) + 12).to_bytes(4) + b'={"set": [' + numbers + b"]}")""",
    "silence": "import os, select\ndef f(x): select.select([], [], [], 1000)",
    "loop of the tests": "def f(x): return 10 ** 15",
}
SHORT = ("loop", "list", "output", "processes", "disk", "network", "long value", "deep value", "loop of the tests")
EACH = f"def test_f():\n    for value, right in zip(map(f, [1829]), [{SECRET}]):\n        assert value == right"
LOOPING = "def test_f():\n    assert sum(1 for _ in range(f(3))) == 12"

# lines of the process that judges: programs are carried out by one from which everything of Linux is taken away
HOST = (
    "from swarm.environments.sandbox import confine, program_host; confine._program = lambda: b''; "
    "confine._RIGHTS_BY_VERSION = (); confine._PIVOT_ROOT = {}; program_host.main()"
)
UNCONFINED = (
    f"from swarm.environments.sandbox import child; child._HOST_COMMAND = ({sys.executable!r}, '-c', {HOST!r}); "
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the hidden tests."""
    folder = tmp_path_factory.mktemp("hidden")
    frozen = subprocess.run(
        [sys.executable, "-c", "import random\nrandom.seed(0)\nprint(random.random(), hash('a'), end='')"],
        env={"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    looks = f"{START_S + TICK_S} 2000 {START_S + 3 * TICK_S}"
    records: list[dict[str, Any]] = [
        {"question": "four times", "answer": RIGHT["output"], "tests": {"inputs": ["1829\n"], "outputs": [SECRET]}},
        {"question": "f", "answer": RIGHT["call"], "tests": HIDDEN},
        {"question": "loop", "answer": "", "tests": LOOPING},
        {"question": "frozen", "answer": "", "tests": [{"input": "", "output": f"{frozen} {looks}"}]},
        {"question": "each", "answer": RIGHT["call"], "tests": EACH},
    ]
    (folder / "tests.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def python(folder: Path, **settings: Any) -> EnvironmentConfig:
    given: dict[str, Any] = {"exchange": "own", "params": {"cpu_s": CPU_S, "memory_mb": 64}} | settings
    return EnvironmentConfig(name="py", kind="python", dataset=str(folder / "tests.jsonl"), **given)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge(folder: Path) -> AsyncIterator[SandboxVerifier]:
    """One for all tests: whatever a program does, the next one is judged by the same processes."""
    async with SandboxVerifier((python(folder),), SandboxConfig()) as verifier:
        yield verifier


def num_processes(judge: SandboxVerifier) -> int:
    """Number of processes in the session of the judge's processes."""
    [process] = judge._own  # pyright: ignore[reportPrivateUsage]
    session = os.getsid(process.pid)
    return sum(session == session_of(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


async def require_nothing_earned(judge: SandboxVerifier, task_id: int, program: str) -> None:
    """The program earns nothing between two right ones, which the same scoring process judges with it."""
    right, num_started = RIGHT["call" if task_id else "output"], judge.num_started
    compile(program.encode(errors="replace"), "program", "exec")  # it fails by what it tries
    verdict = await judge.verify("py", task_id, answers(right, program, right))
    assert verdict.rewards.tolist() == [1.0, 0.0, 1.0]
    assert judge.num_started in (num_started, 1), "the scoring process was replaced"


@pytest.mark.parametrize("name", OUTPUT_CHEATS)
async def test_a_program_that_cheats_earns_nothing(judge: SandboxVerifier, name: str, folder: Path) -> None:
    places = {"wrong": "1", "file": str(folder / "tests.jsonl"), "folder": str(folder)}
    await require_nothing_earned(judge, 0, OUTPUT_CHEATS[name].format(**places))


@pytest.mark.parametrize("name", CALL_CHEATS)
async def test_a_function_that_cheats_earns_nothing(judge: SandboxVerifier, name: str) -> None:
    await require_nothing_earned(judge, 1, CALL_CHEATS[name])


async def test_a_function_that_ends_the_loop_of_its_test_earns_nothing(judge: SandboxVerifier) -> None:
    await require_nothing_earned(judge, 4, "def f(x): raise StopIteration")


def some(programs: dict[str, str]) -> list[Any]:
    """Names of programs; all but the short ones are a sweep."""
    return [pytest.param(name, marks=[] if name in SHORT else pytest.mark.sweep) for name in programs]


@pytest.mark.parametrize("name", some(RESOURCES))
async def test_a_program_that_takes_too_much_is_ended_alone(judge: SandboxVerifier, name: str) -> None:
    await require_nothing_earned(judge, 0, RESOURCES[name])


@pytest.mark.parametrize("name", some(CALL_RESOURCES))
async def test_a_function_that_gives_too_much_is_ended_alone(judge: SandboxVerifier, name: str) -> None:
    if name == "loop of the tests":
        verdict = await judge.verify("py", 2, answers(CALL_RESOURCES[name]))
        assert verdict.rewards.tolist() == [0.0]
    await require_nothing_earned(judge, 1, CALL_RESOURCES[name])


async def test_equal_programs_see_equal_seeds_hashes_and_times(judge: SandboxVerifier) -> None:
    program = "import datetime, random, time\n" + FROZEN
    assert (await judge.verify("py", 3, answers(program, program))).rewards.tolist() == [1.0, 1.0]


async def test_no_process_of_a_program_is_left(judge: SandboxVerifier) -> None:
    await judge.verify("py", 0, answers("while True: pass", RIGHT["output"]))
    await judge.verify("py", 1, answers(RIGHT["call"], "def f(x):\n    while True: pass", RIGHT["call"]))
    # the one that forks those that judge, one of these, the interpreter of programs, and the keeper
    await until(lambda: num_processes(judge) == 4)


async def test_programs_of_a_listed_node_are_judged_and_their_time_is_its_own(folder: Path) -> None:
    listed = Producer(node_id=NodeId("b" * 32), is_known=True)
    config = python(folder, exchange="scored", scored_from=["b" * 64], allow_code=True)
    async with SandboxVerifier((config,), SandboxConfig()) as verifier:
        spent_s = list[float]()
        verifier.accounts.spend = lambda producer, seconds, allowance: spent_s.append(seconds)
        verdict = await verifier.verify("py", 0, answers(RIGHT["output"], "while True: pass"), listed)
        assert verdict.rewards.tolist() == [1.0, 0.0] and sum(spent_s) >= CPU_S


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"exchange": "replayable"}, 'set exchange = "own", or "scored"'),
        (
            {"exchange": "scored", "scored_from": ["b" * 64]},
            "carries out programs that other nodes send; set allow_code",
        ),
        ({"kind": "jsonl", "allow_code": True, "params": {}, "exchange": "own"}, "kind jsonl carries out no program"),
        ({"params": {"cpu_s": 0}}, r"params.cpu_s must be from 0.1 to 60, got 0"),
        ({"params": {"cpu": 1}}, "unknown param 'cpu'"),
    ],
)
async def test_what_would_be_unsafe_or_ignored_is_refused(folder: Path, changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=sentence):
        build_environments([EnvironmentConfig.model_validate(python(folder).model_dump() | changed)])


async def test_without_confinement_no_program_runs_whoever_wrote_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (sys.executable, "-I", "-B", "-c", f"{UNCONFINED}child.main()")
    monkeypatch.setattr(scoring_process, "_COMMAND", command)
    async with SandboxVerifier((python(folder),), SandboxConfig()) as verifier:
        with pytest.raises(ConfigError, match=r"environments py: no program is carried out here.*network, files"):
            await verifier.verify("py", 0, answers(RIGHT["output"]))


async def test_a_node_reads_the_questions_and_carries_nothing_out(folder: Path) -> None:
    config = python(folder)
    await examine([config], tokenizer=load_tokenizer(ModelConfig(source="smollm2")))
    with pytest.raises(RuntimeError, match="the confined process that scores answers, and no other"):
        replay(build_environments([config])["py"], 0, (RIGHT["output"],))


FORMS: dict[str, tuple[dict[str, Any], object]] = {
    "inputs": ({"tests": {"inputs": ["1"], "outputs": [["2", "3"]]}}, (InputTest(given="1", expected="2\n3"),)),
    "as text": ({"tests": '{"inputs": ["1"], "outputs": ["2"]}'}, (InputTest(given="1", expected="2"),)),
    "cases": (
        {"tests": {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "1", "output": "2"}]}},
        (InputTest(given="1", expected="2"),),
    ),
    "function": (
        {"tests": {"inputs": [[1, [2]]], "outputs": [3], "fn_name": "f"}},
        (CallTest(function="f", arguments=[1, [2]], expected=3),),
    ),
    "function, by lines": (
        {"tests": [{"input": "1\n[2]", "output": "3", "fn_name": "f"}]},
        (CallTest(function="f", arguments=[1, [2]], expected=3),),
    ),
    "list of assertions": (
        {"test_list": ["assert f(1) == 2", "assert math.isclose(f(2), g(3))"], "test_setup_code": "x = 1"},
        Assertions(
            setup="import math\nx = 1",
            tests=("assert f(1) == 2", "assert math.isclose(f(2), g(3))"),
            functions=frozenset({"f", "g"}),
        ),
    ),
    "check": (
        {"test": "def check(candidate):\n    assert candidate(1)", "entry_point": "f"},
        Assertions(
            setup="\ndef check(candidate):\n    assert candidate(1)", tests=("check(f)",), functions=frozenset({"f"})
        ),
    ),
    "plain code": (
        {"tests": "assert f(1)"},
        Assertions(setup="", tests=("assert f(1)",), functions=frozenset({"f"})),
    ),
}


@pytest.mark.parametrize("name", FORMS)
async def test_tests_of_each_form_are_read(name: str) -> None:
    record, expected = FORMS[name]
    assert read_tests(record) == expected


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (None, "no tests in its field 'tests'"),
        ([], "no tests"),
        ("def check(c): assert c(1)", "call no function of the program"),
        (["assert sum([1]) == 1"], "call no function of the program"),
        ("assert (", "never closed"),
        ([{"input": 1, "output": "2"}], "where a text belongs"),
        ([{"input": "1", "output": "2"}] * 201, "201 tests exceed 200"),
    ],
)
async def test_a_record_without_usable_tests_is_refused(given: object, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError, SyntaxError), match=sentence):
        read_tests({"tests": given})


VALUES = [None, True, 3, -2.5, "x", b"\xff", 1j, [1, (2,)], {1, "a"}, frozenset({(1, 2)}), {"a": [None], (1,): {2: 3}}]


@pytest.mark.parametrize("value", VALUES, ids=repr)
async def test_plain_values_arrive_as_they_were(value: object) -> None:
    assert decode(encode(value)) == value and type(decode(encode(value))) is type(value)


NO_VALUES = (b"[1]", b'{"object": []}', b'{"list": 3}', b'{"set": [{"list": []}]}', b"", b'{"a":', b"[" * 100_000)


@pytest.mark.parametrize("data", NO_VALUES, ids=range(7))
async def test_nothing_else_becomes_a_value(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)
