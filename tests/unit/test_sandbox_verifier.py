"""The confined scoring process, with verifiers that run whatever an answer says."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from waits import HANG_S

from swarm.config import EnvironmentConfig, SandboxConfig
from swarm.environments.load import build_environments
from swarm.environments.sandbox.verifier import MAX_REQUEST_BYTES, SandboxVerifier
from swarm.errors import ConfigError, RolloutFailed, TooLarge
from swarm.interfaces import EnvironmentShape, Producer, Verifier
from swarm.testing.builders import InlineVerifier, answers
from swarm.types import NodeId

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux only"),
    pytest.mark.asyncio(loop_scope="module"),  # that of `obedient`
]

CHAR = EnvironmentConfig(name="rev", kind="char", dataset="reverse", prefill="A:")
MATRIX = EnvironmentConfig(name="matrix", kind="reasoning_gym", dataset="binary_matrix")
# executes the answer and rewards it with what it evaluates to: the worst verifier there can be
OBEDIENT = "def score(question, answer, reference):\n    space = {'result': 0.0}\n    exec(answer, space)\n" + (
    "    return space['result']\nscore.answer_cpu_s = 0.5\n"
)
# takes as many seconds of CPU for an answer as the answer says, and a tenth of a second to build its only task
SLOW = """
import time
from swarm.environments.environment import AnswerEnvironment, Problem

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

class Slow(AnswerEnvironment):
    def __init__(self, config):
        super().__init__(config, "slow/1")

    def build(self, task_id):
        burn(0.1)
        return Problem(question="q", reference="a")

    def judge(self, problem, answer):
        burn(float(answer))
        return 1.0
"""
# C calls that make an object which outlives the process, or that watch files
OUTLIVING = (
    *("shmget(0, 4096, 0o1600)", "semget(0, 1, 0o1600)", "msgget(0, 0o1600)", "mq_open(b'/x', 0o102, 0o600, None)"),
    *("inotify_init()", "inotify_init1(0)", "fanotify_init(0x200, 0)"),
)
ASLEEP = "import time; time.sleep(60)"
STRANGER, FRIEND = Producer(node_id=NodeId("a" * 32), is_known=False), Producer(node_id=NodeId("b" * 32), is_known=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the code of the worst verifier."""
    folder = tmp_path_factory.mktemp("obedient")
    (folder / "rule.py").write_text(OBEDIENT)
    (folder / "problems.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}))
    return folder


def obedient_config(folder: Path) -> EnvironmentConfig:
    params = {"path": str(folder / "problems.jsonl")}
    return EnvironmentConfig(name="run", kind="function", dataset=f"{folder / 'rule.py'}:score", params=params)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def obedient(folder: Path) -> AsyncIterator[SandboxVerifier]:
    """One for all tests: a child takes half a second to start, and whatever an answer does, the next one works."""
    limits = SandboxConfig(timeout_s=2.0, memory_bytes=512 * 2**20)
    async with SandboxVerifier((obedient_config(folder), CHAR), limits) as verifier:
        yield verifier


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def patient(folder: Path) -> AsyncIterator[SandboxVerifier]:
    """The same verifier with time for every request: only the CPU time of an answer ends it."""
    limits = SandboxConfig(timeout_s=60.0, memory_bytes=512 * 2**20)
    async with SandboxVerifier((obedient_config(folder),), limits) as verifier:
        yield verifier


def slow_verifier(folder: Path, code: str = SLOW) -> SandboxVerifier:
    (folder / "slow.py").write_text(code)
    config = EnvironmentConfig(name="slow", kind="plugin", dataset=f"{folder / 'slow.py'}:Slow")
    return SandboxVerifier((config,), SandboxConfig(timeout_s=60.0))


async def is_refused(verifier: SandboxVerifier, code: str, folder: Path) -> bool:
    """True if an answer fails alone: its process lives on, and the folder holds what it held."""
    before, num_started = contents(folder), verifier.num_started
    with pytest.raises(RolloutFailed):
        await verifier.verify("run", 0, answers(code.replace("{dir}", str(folder)).replace("{home}", str(Path.home()))))
    return contents(folder) == before and await works(verifier) and verifier.num_started == num_started


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def works(verifier: Verifier) -> bool:
    right = build_environments([CHAR])["rev"].reference(1)
    return (await verifier.verify("rev", 1, answers(right, "no"))).rewards.tolist() == [1.0, 0.0]


async def test_sandbox_and_inline_verifier_agree() -> None:
    inline = InlineVerifier(build_environments([CHAR]))
    async with SandboxVerifier((CHAR,), SandboxConfig()) as sandbox:
        for task_id in range(5):
            texts = [(await inline.verify("rev", task_id, [])).reference, "x", "", "\ud800 lone", "n" * 5000]
            here, there = [await each.verify("rev", task_id, answers(*texts)) for each in (inline, sandbox)]
            assert (here.task, here.verifier, here.reference) == (there.task, there.verifier, there.reference)
            np.testing.assert_array_equal(here.rewards, there.rewards)
            assert there.rewards.dtype == np.float32 and there.rewards.tolist()[0] == 1.0
        for verifier in (inline, sandbox):
            for env, task_id in (("other", 1), ("rev", -1), ("rev", 10**9)):
                with pytest.raises(LookupError):
                    await verifier.verify(env, task_id, answers("x"))
            assert await works(verifier)


async def test_the_shape_of_each_environment_is_known_once_a_process_started() -> None:
    built = build_environments([CHAR])["rev"]
    async with SandboxVerifier((CHAR,), SandboxConfig()) as sandbox:
        assert sandbox.shapes == {}
        await sandbox.limits_in_force()
        assert sandbox.shapes == {"rev": EnvironmentShape(built.verifier, built.max_turns)}


async def test_every_limit_is_in_force_or_said_not_to_be() -> None:
    async with SandboxVerifier((CHAR,), SandboxConfig()) as verifier:
        limits = await verifier.limits_in_force()
        assert set(limits) == {
            *("cpu", "memory", "open_files", "file_size", "core_dumps", "processes"),
            *("dies_with_parent", "no_new_privileges", "network", "files", "system_calls", "file_reads"),
            "other_files_hidden",
        }
        assert limits["cpu"] and limits["memory"] and limits["file_size"] and limits["no_new_privileges"]


async def test_code_as_an_answer_to_binary_matrix_is_worth_0_and_runs_nothing(tmp_path: Path) -> None:
    target = tmp_path / "written"
    texts = [
        f"__import__('os').system('touch {target}')",
        f"open('{target}', 'w').write('x')",
        "[c for c in ().__class__.__base__.__subclasses__()]",
        "[[0]] * 10**10",
        "9**9**9**9",
        "[" * 100_000,
        "print('x' * 10**6)",
        "(lambda f: f(f))(lambda f: f(f))",
    ]
    async with SandboxVerifier((MATRIX, CHAR), SandboxConfig()) as verifier:
        for answer in texts:
            verdict = await verifier.verify("matrix", 0, answers(answer))
            right = await verifier.verify("matrix", 0, answers(verdict.reference))
            assert (verdict.rewards.tolist(), right.rewards.tolist()) == ([0.0], [1.0]), answer
            assert not target.exists() and verifier.num_started == 1, answer


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise SystemExit(3)", r"the verifier raised SystemExit: 3 \(rule.py:2"),
        ("raise KeyboardInterrupt", r"the verifier raised KeyboardInterrupt"),
        ("import os; os._exit(3)", "ended before it answered: it exited"),
        ("import os; os.abort()", r"ended before it answered: signal \d+ ended it"),
    ],
)
async def test_a_reward_that_ends_the_program_on_the_first_right_answer_is_named(
    code: str, says: str, tmp_path: Path
) -> None:
    """That answer is scored in the process that forks the others, where it must end none."""
    (tmp_path / "rule.py").write_text(f"def score(question, answer, reference):\n    {code}\n")
    (tmp_path / "problems.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}))
    section = EnvironmentConfig(
        name="ends",
        kind="function",
        dataset=f"{tmp_path / 'rule.py'}:score",
        params={"path": str(tmp_path / "problems.jsonl")},
    )
    async with SandboxVerifier((section,), SandboxConfig()) as verifier:
        with pytest.raises(RolloutFailed, match=f"environment ends, task 0: .*{says}"):
            await verifier.verify("ends", 0, answers("a"))


WAITING = f"""
import time
from swarm.environments.sandbox import child
child._FIRST_HANG_S = 0.2
child.replay = lambda *_: time.sleep({HANG_S})

class Silent:
    def reference(self, task_id):
        return ""

child._answer_first(Silent())
print("goes on")
"""


async def test_a_first_answer_that_waits_for_ever_is_given_up() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", WAITING, stdout=asyncio.subprocess.PIPE)
    assert (await process.communicate())[0] == b"goes on\n"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import os, signal; os._exit(0)",
        "import ctypes; ctypes.string_at(0)",
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'\\x7f' * 99999)\n  except OSError: pass",
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'\\0\\0\\0\\x03[1]')\n  except OSError: pass",
        "import __main__ as s\ns.Scorer.encode = lambda self, reply: b'[' * 10**6",
        "import __main__ as s, json\n"
        "s.Scorer.encode = lambda self, r: json.dumps({**r, 'outcomes': [[10**400, []]], 'cpu_s': 10**400}).encode()",
        "import swarm.environments.replay as b\nb.min = lambda *a: 7.0\nb.max = b.min\nresult = 0.5",
    ],
)
async def test_an_answer_that_breaks_the_child_fails_alone_in_bounded_time(
    obedient: SandboxVerifier, code: str
) -> None:
    assert await works(obedient)
    with pytest.raises(RolloutFailed):
        await obedient.verify("run", 0, answers(code))
    assert await works(obedient)


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(2**31)",
        "import os\nwhile True: os.fork()",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.kill(os.getppid(), 9)",
        "import socket; socket.socket()",
        "import threading; threading.Thread(target=print).start()",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "open('{dir}/new', 'w')",
        "open('{dir}/problems.jsonl', 'r+')",
        "import os; os.remove('{dir}/problems.jsonl')",
        "import os; os.rename('{dir}/problems.jsonl', '{dir}/other')",
        "import os; os.mkdir('{dir}/folder')",
        "import os; os.chmod('{dir}/problems.jsonl', 0)",
        "import os; os.truncate('{dir}/problems.jsonl', 0)",
        "import os; os.symlink('{dir}', '{dir}/link')",
        "raise SystemError('no')",
    ],
)
async def test_what_the_kernel_refuses_an_answer_is_an_error_of_that_answer(
    obedient: SandboxVerifier, code: str, folder: Path
) -> None:
    if not (await obedient.limits_in_force())["system_calls"]:
        pytest.skip("no seccomp filter on this machine")
    assert await is_refused(obedient, code, folder)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("x = bytearray(2**31)", r"MemoryError: more than sandbox\.memory_bytes allows"),
        ("open('/etc/passwd')", r"FileNotFoundError: .*name its file or folder in params\.path"),
    ],
)
async def test_an_error_of_an_environment_says_which_limit_or_value(
    obedient: SandboxVerifier, code: str, reason: str
) -> None:
    with pytest.raises(RolloutFailed, match=f"environment run, task 0: the verifier raised {reason}"):
        await obedient.verify("run", 0, answers(code))


@pytest.mark.parametrize(
    "code",
    [
        "open('{dir}/secret').read()",
        "open('{dir}/rule.py').read()",
        "import os; os.listdir('{dir}')",
        "import os; os.listdir('{home}')",
        "open('/etc/passwd').read()",
        "open('/proc/self/environ').read()",
        "open('/proc/%d/cmdline' % __import__('os').getppid()).read()",
        "import os; os.open('{dir}/secret', os.O_RDONLY | os.O_NOFOLLOW)",
        "import ctypes, os\nfd = ctypes.CDLL(None).open(b'{dir}/secret', 0)\nassert fd >= 0",
    ],
)
async def test_an_answer_reads_no_file_of_the_user(obedient: SandboxVerifier, code: str, folder: Path) -> None:
    if not (await obedient.limits_in_force())["file_reads"]:
        pytest.skip("no Landlock on this machine")
    (folder / "secret").write_text("key")
    assert await is_refused(obedient, code, folder)


@pytest.mark.parametrize(
    "code",
    [
        *(f"import ctypes\nassert ctypes.CDLL(None).{call} >= 0" for call in OUTLIVING),
        "import os; os.stat('{dir}/secret')",
        "import os; os.lstat('/etc/passwd')",
        "import os; assert os.access('{dir}/secret', 0)",
        "import os; os.readlink('/proc/self/exe')",
        "import os; os.statvfs('/var')",
        "import os; os.chdir('/var')",
        "import os; os.getxattr('{dir}/secret', 'user.x')",
        "import ctypes as c; assert c.CDLL(None).statx(-100, b'/etc/passwd', 0, 7, c.create_string_buffer(999)) == 0",
        "import ctypes; assert ctypes.CDLL(None).name_to_handle_at(-100, b'/', None, None, 0) == 0",
        "import ctypes; assert ctypes.CDLL(None).mount(b'x', b'/usr', b'tmpfs', 0, None) == 0",
        "import os; assert os.uname().nodename != 'sandbox'",
    ],
)
async def test_an_answer_leaves_nothing_behind_and_finds_out_nothing(
    obedient: SandboxVerifier, code: str, folder: Path
) -> None:
    limits = await obedient.limits_in_force()
    if not (limits["system_calls"] and limits["other_files_hidden"]):
        pytest.skip("no seccomp filter or no mounts in a namespace on this machine")
    (folder / "secret").write_text("key")
    assert await is_refused(obedient, code, folder)


async def test_verifiers_still_import_what_is_installed_and_read_their_records(
    obedient: SandboxVerifier,
) -> None:
    code = (
        "import colorsys, email, importlib.resources, yaml\n"
        "result = float(bool(importlib.resources.files('swarm').joinpath('types.py').read_text()))"
    )
    for _ in range(2):
        verdict = await obedient.verify("run", 0, answers(code))
        assert verdict.rewards.tolist() == [1.0] and verdict.reference == "a"


async def test_the_child_sees_no_environment_variables_of_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    look = "import os; result = float('SECRET_TOKEN' in os.environ)"
    async with SandboxVerifier((obedient_config(folder),), SandboxConfig()) as verifier:
        verdict = await verifier.verify("run", 0, answers(look, "result = 1"))
    assert verdict.rewards.tolist() == [0.0, 1.0]


async def test_a_closed_verifier_starts_nothing_for_a_thread_that_still_plays() -> None:
    async with SandboxVerifier((CHAR,), SandboxConfig()) as verifier:
        assert await verifier.limits_in_force()
    with pytest.raises(RolloutFailed, match="ended with the node"):
        await verifier.step("rev", 0, ("a",))
    with pytest.raises(RolloutFailed, match="ended with the node"):
        await verifier.verify("rev", 0, answers("a"))
    assert verifier.num_started == 1


async def test_printing_does_not_reach_the_protocol(obedient: SandboxVerifier) -> None:
    code = "import sys, os\nprint('x' * 10**6)\nsys.__stdout__.write('y')\nos.write(1, b'z' * 999)\nresult = 0.5"
    assert (await obedient.verify("run", 0, answers(code))).rewards.tolist() == [0.5]
    assert await works(obedient)


async def test_the_child_is_replaced_when_its_cpu_budget_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.environments.sandbox.verifier.PROCESS_CPU_S", 1e-6)  # its start alone takes more
    async with SandboxVerifier((CHAR,), SandboxConfig()) as verifier:
        assert await works(verifier) and await works(verifier)
        assert verifier.num_replaced == 2


async def test_a_child_killed_from_outside_is_started_again(obedient: SandboxVerifier) -> None:
    assert await works(obedient)
    (child,), num_started = obedient._own, obedient.num_started
    os.kill(child.pid, signal.SIGKILL)
    assert await child.reader.read(1) == b""
    assert await works(obedient) and obedient.num_started == num_started + 1


async def test_a_cancelled_request_does_not_shift_the_replies_of_the_next(obedient: SandboxVerifier) -> None:
    assert await works(obedient)
    request = asyncio.create_task(obedient.verify("run", 0, answers("while True: pass")))
    await asyncio.sleep(0.05)  # into the endless loop; earlier would be right as well
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert await works(obedient)


@pytest.mark.parametrize(
    "code", ["while True: pass", "9 ** 9 ** 9", "import re; re.match('(a|a)*b', 'a' * 60)", "sum(range(10**12))"]
)
async def test_the_kernel_ends_an_answer_that_takes_too_much_cpu_time_in_python_and_in_c(
    patient: SandboxVerifier, code: str
) -> None:
    right = (await patient.verify("run", 0, answers("result = 1.0"))).rewards.tolist()
    num_replaced = patient.num_replaced
    with pytest.raises(RolloutFailed, match="answer_cpu_s"):
        await patient.verify("run", 0, answers("result = 1.0", code))
    assert patient.num_replaced == num_replaced + 1 and patient._own  # replaced already: nobody else waits for that
    assert right == (await patient.verify("run", 0, answers("result = 1.0"))).rewards.tolist() == [1.0]


async def test_without_the_timer_only_the_wall_clock_of_the_request_ends_an_answer(obedient: SandboxVerifier) -> None:
    """An answer takes the timer away."""
    code = "import signal; signal.setitimer(signal.ITIMER_PROF, 0)\nwhile True: pass"
    with pytest.raises(RolloutFailed, match="timeout_s"):
        await obedient.verify("run", 0, answers(code))


async def test_a_task_that_cannot_be_built_is_no_fault_of_who_answered_it(tmp_path: Path) -> None:
    reason = r"environment slow: task 2 of .* cannot be built: IndexError: .*slow\.py:\d+ in build"
    async with slow_verifier(tmp_path, SLOW.replace("burn(0.1)", "[0, 0][task_id]")) as verifier:
        with pytest.raises(RolloutFailed, match=reason):
            await verifier.verify("slow", 2, answers("0"))
        with pytest.raises(LookupError, match=reason):
            await verifier.verify("slow", 2, answers("0"), FRIEND)


async def test_each_answer_has_its_own_time_and_building_the_task_takes_none_of_it(tmp_path: Path) -> None:
    async with slow_verifier(tmp_path) as verifier:
        assert (await verifier.verify("slow", 1, [("0.02",)] * 10)).rewards.tolist() == [1.0] * 10
        with pytest.raises(RolloutFailed, match=r"answer_cpu_s 0\.05"):
            await verifier.verify("slow", 1, answers("0.02", "30"))


@pytest.mark.parametrize("takes_as_many_as_were_sent", [False, True])
async def test_actions_that_no_environment_takes_give_the_others_no_time(
    tmp_path: Path, takes_as_many_as_were_sent: bool
) -> None:
    """A text of two bytes must not buy 50 ms for the action that never ends, but where the environment takes it."""
    most = "\n    max_turns = 100\n" if takes_as_many_as_were_sent else "\n"
    async with slow_verifier(tmp_path, SLOW + most) as verifier:
        request = verifier.verify("slow", 1, [("0.5", *("",) * 99)])
        if takes_as_many_as_were_sent:
            assert (await request).rewards.tolist() == [1.0]
        else:
            with pytest.raises(RolloutFailed, match=r"answer_cpu_s 0\.05"):
                await request


async def test_an_environment_that_wants_more_time_than_a_request_has_is_a_config_error(folder: Path) -> None:
    verifier = SandboxVerifier((obedient_config(folder),), SandboxConfig(timeout_s=0.25))
    with pytest.raises(ConfigError, match=r"answer_cpu_s 0\.5 must be above 0 and at most sandbox\.timeout_s 0\.25"):
        await verifier.verify("run", 0, answers("result = 1.0"))


async def test_own_answers_neither_wait_for_those_of_peers_nor_share_a_process(
    obedient: SandboxVerifier,
) -> None:
    endless = asyncio.create_task(obedient.verify("run", 0, answers(ASLEEP), STRANGER))
    await asyncio.sleep(0)  # it has its turn
    assert await works(obedient)
    assert not endless.done()
    with pytest.raises(RolloutFailed, match="timeout_s"):
        await endless
    assert {process.pid for process in obedient._own}.isdisjoint(process.pid for process in obedient._external)


async def test_a_known_producer_does_not_wait_behind_a_flood_of_fresh_keys(
    obedient: SandboxVerifier,
) -> None:
    flood = [
        asyncio.create_task(
            obedient.verify("run", 0, answers(ASLEEP), Producer(node_id=NodeId(f"{i:032}"), is_known=False))
        )
        for i in range(3)
    ]
    await asyncio.sleep(0)
    right = build_environments([CHAR])["rev"].reference(1)
    verdict = await obedient.verify("rev", 1, answers(right), FRIEND)
    assert verdict.rewards.tolist() == [1.0]
    assert not any(task.done() for task in flood)
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_concurrent_requests_get_their_own_verdicts() -> None:
    references = [build_environments([CHAR])["rev"].reference(i) for i in range(20)]
    async with SandboxVerifier((CHAR,), SandboxConfig()) as verifier:
        verdicts = await asyncio.gather(*(verifier.verify("rev", i, answers(references[i], "-")) for i in range(20)))
        assert [v.task.task_id for v in verdicts] == list(range(20))
        assert all(v.rewards.tolist() == [1.0, 0.0] for v in verdicts)


async def test_too_many_bytes_are_refused_before_they_are_sent() -> None:
    async with SandboxVerifier((CHAR,), SandboxConfig()) as verifier:
        with pytest.raises(TooLarge):
            await verifier.verify("rev", 0, answers("x" * (MAX_REQUEST_BYTES + 1)))
        assert verifier.num_started == 0


async def test_an_environment_that_cannot_be_built_is_a_config_error() -> None:
    verifier = SandboxVerifier((EnvironmentConfig(name="x", kind="char", dataset="absent"),), SandboxConfig())
    with pytest.raises(ConfigError, match="absent"):
        await verifier.verify("x", 0, answers("a"))
