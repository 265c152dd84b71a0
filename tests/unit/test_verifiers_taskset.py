"""A taskset of the verifiers library, played and judged here: its tools, its rewards, and what is refused."""

import sys
import sysconfig
from pathlib import Path

import pytest

from swarm.config import EnvironmentConfig, SandboxConfig
from swarm.environments.load import build_environment
from swarm.environments.replay import replay
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.episode import TurnStatus
from swarm.errors import ConfigError
from swarm.interfaces import Environment

pytest.importorskip("verifiers", reason="needs pip install verifiers==0.4.0; .ci/run has an environment with it")

SUMS = """
import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class Counted(vf.State):
    num_calls: int = 0


class SumData(vf.TaskData):
    answer: str


class Adder(vf.Toolset[vf.ToolsetConfig, Counted]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        '''The sum of two numbers.'''
        self.state.num_calls += 1
        return str(a + b)


class SumTask(vf.Task[SumData, Counted, vf.TaskConfig]):
    @vf.reward(weight=0.75)
    async def right(self, trace) -> float:
        return float(trace.last_message.content.strip() == self.data.answer)

    @vf.reward(weight=0.25)
    async def thrifty(self, trace) -> float:
        return 1.0 / max(1, trace.state.num_calls)

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]


class Config(vf.TasksetConfig):
    first: int = 0


class SumTaskset(vf.Taskset[SumTask, Config]):
    def load(self):
        for a in range(self.config.first, self.config.first + 20):
            yield SumTask(SumData(answer=str(a + 2), prompt=f"{a}+2=?", system_prompt="Be brief."))
"""
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 2}}</tool_call>'


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "sum_tasks.py").write_text(SUMS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("sum_tasks", None)
    return "sum_tasks"


def config(taskset: str, **params: object) -> EnvironmentConfig:
    kind = "swarm.environments.verifiers_taskset:TasksetEnvironment"
    return EnvironmentConfig(name="sums", kind="plugin", dataset=kind, params={"taskset": taskset, **params})


def made(taskset: str, **params: object) -> Environment:
    return build_environment(config(taskset, **params))


def test_tools_are_called_and_rewards_are_added_as_the_library_does(installed: str) -> None:
    sums = made(installed)
    system, question = sums.task(3).messages
    assert system.content.startswith("Be brief.") and "add(a: int, b: int) -> str: The sum" in system.content
    assert question.content == "3+2=?" and sums.num_tasks == 20 and sums.max_turns == 8
    played = replay(sums, 3, (CALL, CALL, "5"))
    assert [each.messages[0].content for each in played.transitions[:-1]] == ["5", "5"]
    assert played.rewards == {"right": 1.0, "thrifty": 0.5, "outcome": 0.875} and played.reward == 0.875


def test_one_episode_keeps_nothing_of_another(installed: str) -> None:
    sums = made(installed)
    assert {replay(sums, 3, (CALL, "5")).reward for _ in range(3)} == {1.0}


def test_what_a_tool_refuses_is_told_to_the_model(installed: str) -> None:
    other = CALL.replace('"b"', '"c"')
    played = replay(made(installed), 3, (other, CALL.replace("add", "sub"), "<tool_call>{", "6"))
    statuses = [each.status for each in played.transitions]
    assert statuses == [TurnStatus.TOOL_ERROR, TurnStatus.TOOL_ERROR, TurnStatus.MALFORMED, TurnStatus.OK]
    assert "no tool 'sub'; there are: add" in played.transitions[1].messages[0].content


def test_other_params_are_the_tasksets_own(installed: str) -> None:
    assert made(installed, first=7).task(0).messages[-1].content == "7+2=?"
    assert made(installed, first=7).verifier != made(installed).verifier
    with pytest.raises(ConfigError, match=r"cannot be loaded: .* second: Extra inputs"):
        made(installed, second=7)
    with pytest.raises(ConfigError, match="'missing_tasks' cannot be loaded"):
        made("missing_tasks")


def test_other_tasks_of_one_configuration_are_another_version(installed: str, tmp_path: Path) -> None:
    """A taskset that reads a dataset in whatever state it is."""
    reads = SUMS.replace("            yield", "            a += int(DATA.read_text())\n            yield")
    data_line = f"import pathlib\nDATA = pathlib.Path({str(tmp_path / 'data.txt')!r})\n"
    (tmp_path / "sum_tasks.py").write_text(data_line + reads, encoding="utf-8")
    found: list[str] = []
    for data in ("1", "2", "1"):
        (tmp_path / "data.txt").write_text(data)
        found.append(made(installed).verifier)
    assert found[0] != found[1] and found[0] == found[2]


@pytest.mark.parametrize(
    ("find", "put", "reason"),
    [
        ("    @vf.reward(weight=0.75)", "    NEEDS_CONTAINER = True\n\n    @vf.reward", "a container"),
        ("async def right(self, trace)", "async def right(self, trace, runtime)", "a runtime for the reward right"),
        ("    @vf.reward(weight=0.75)\n    async def right", "    async def setup", "the hook setup"),
        ('prompt=f"{a}+2=?"', 'prompt=f"{a}+2=?" if a < 9 else None', "a user who opens the conversation"),
        ('prompt=f"{a}+2=?"', 'prompt=f"{a}+2=?", image="box" if a > 9 else None', "a container"),
        (
            "    @classmethod\n    def toolsets",
            "    @vf.stop\n    async def enough(self, trace: vf.Trace) -> bool:\n        return True\n\n"
            "    @classmethod\n    def toolsets",
            "the stop condition enough",
        ),
        (
            "return [Adder(vf.ToolsetConfig())]",
            'return [Adder(vf.ToolsetConfig(url="http://x"))]',
            "tools of Adder else",
        ),
        (
            "return [Adder(vf.ToolsetConfig())]",
            "return [Adder(vf.ToolsetConfig(colocated=True))]",
            "tools of Adder else",
        ),
        ("    TOOL_PREFIX = None", "    def register(self, mcp): pass", "tools of Adder elsewhere"),
        (
            'prompt=f"{a}+2=?"',
            'prompt=[vf.UserMessage(content="?"), vf.ToolMessage(tool_call_id="1", content="5")]',
            "a prompt with more than texts",
        ),
        (
            'prompt=f"{a}+2=?"',
            'prompt=f"{a}", artifacts=[vf.Artifact(source="/x")] if a > 9 else []',
            "artifacts",
        ),
        (
            "class Config(",
            "class Duel(vf.Env[vf.EnvConfig]):\n    async def run(self, task, agents): pass\n\n\n"
            '__all__ = ["SumTaskset", "Duel"]\n\n\nclass Config(',
            "its own environment Duel",
        ),
    ],
)
def test_what_needs_a_machine_is_refused_by_name(
    installed: str, tmp_path: Path, find: str, put: str, reason: str
) -> None:
    assert find in SUMS
    (tmp_path / "sum_tasks.py").write_text(SUMS.replace(find, put), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"needs {reason}"):
        made(installed)


def test_a_tool_that_waits_for_the_outside_is_an_error(installed: str, tmp_path: Path) -> None:
    waits = SUMS.replace("        self.state.num_calls += 1", "        await __import__('asyncio').sleep(1)")
    (tmp_path / "sum_tasks.py").write_text(waits, encoding="utf-8")
    first = replay(made(installed), 3, (CALL,)).transitions[0]
    assert first.status == TurnStatus.TOOL_ERROR and "waits for something outside" in first.messages[0].content


@pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux only")
async def test_it_is_replayed_in_the_confined_process() -> None:
    module = Path(sysconfig.get_path("purelib")) / "swarm_test_sum_tasks.py"  # the process sees what is installed alone
    module.write_text(SUMS, encoding="utf-8")
    async with SandboxVerifier((config(module.stem),), SandboxConfig(timeout_s=120.0)) as sandbox:
        verdict = await sandbox.verify("sums", 3, ((CALL, "5"), ("5",), ("6",)))
        module.unlink()
    assert verdict.rewards.tolist() == [1.0, 1.0, 0.25]
