"""Environments that a node could not use, or not as they say, are refused with the place and the fix."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from node.doctor import _check_environments
from swarm.cli.main import app
from swarm.config import EnvironmentConfig, ModelConfig, NodeConfig, SandboxConfig
from swarm.environments.determinism import examine, require_repeatable
from swarm.environments.load import build_environment
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.environments.soundness import narrow_tokenizer, require_sound, try_out
from swarm.errors import ConfigError, RolloutFailed
from swarm.testing.builders import InlineVerifier

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux only")

# a walk along a line of numbers: "go 3" three times ends it
WALK = """
import math, os, socket, subprocess, time
from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.episode import Message, Transition

class Walk(NumberedEnvironment):
    max_turns = 6
    signals = frozenset({"turn_rewards", "state_keys", "reward_parts"})

    def __init__(self, config):
        super().__init__(config, "walk/1")

    def build(self, task_id):
        {build}
        return Problem(question=f"walk {task_id}", reference="go 3", initial_state=str(task_id))

    def begin(self, problem):
        return Line()

    def demonstration(self, task_id):
        return {demonstration}

class Line:
    place = number = 0

    def step(self, action):
        self.number += 1
        is_legal = action.text.startswith("go ") and action.text[3:].isdigit() and len(action.text) < 9
        self.place += int(action.text[3:]) if is_legal else 0
        said = f"at {self.place}"
        {step}
        if self.place >= 9:
            return Transition(is_end=True, rewards={"outcome": 1.0 if self.place == 9 else {miss}})
        return Transition(messages=(Message(role="user", content=said),))
"""
GOOD = {"build": "pass", "demonstration": "('go 3',) * 3", "step": "pass", "miss": "0.0"}


def walk(folder: Path, **changes: str) -> EnvironmentConfig:
    code = WALK
    for part, text in {**GOOD, **changes}.items():
        code = code.replace(f"{{{part}}}", text)
    (folder / "walk.py").write_text(code)
    return EnvironmentConfig(name="walk", kind="plugin", dataset=f"{folder / 'walk.py'}:Walk", num_tasks=100)


async def refuse(config: EnvironmentConfig, reason: str) -> None:
    """In this process, which is quick."""
    with pytest.raises(ConfigError, match=reason):
        await sound(config)


async def sound(config: EnvironmentConfig) -> None:
    environment = build_environment(config)
    verifier = InlineVerifier({config.name: environment})
    await require_sound(config.name, try_out(environment), verifier, narrow_tokenizer(ModelConfig(source="tiny")))


async def test_a_sound_environment_is_examined_and_its_turns_are_known(tmp_path: Path) -> None:
    config = walk(tmp_path)
    await sound(config)
    assert (await require_repeatable([config]))["walk"].max_turns == 6


def test_check_shows_how_many_turns_an_environment_has(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(
        f'[[environments]]\nname = "walk"\nkind = "plugin"\ndataset = "{walk(tmp_path).dataset}"\n'
    )
    shown = CliRunner().invoke(app, ["check", "--trust", str(tmp_path)], env={"COLUMNS": "300"})
    assert "environment walk: replayable, at most 6 turns (max_turns)" in shown.output, shown.exception


@pytest.mark.parametrize("miss", ["-0.5", "100.0"])
async def test_an_outcome_that_only_a_legal_action_reaches_is_looked_at(tmp_path: Path, miss: str) -> None:
    await refuse(
        walk(tmp_path, miss=miss), rf"gave the reward 'outcome' {float(miss):g}, which would be clipped to \[0, 1\]"
    )


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ('Transition(rewards={"outcome": 7.0})', "action 2 gave the reward 'outcome' 7, which would be clipped"),
        ("Transition(reward=-1e6)", "action 2 gave the reward of its turn -1e.06, where 1e.06 cuts it"),
        ('Transition(rewards={"outcome": 0.0, "far": 1e9})', "action 2 gave the reward 'far' 1e.06"),
    ],
)
async def test_every_transition_is_looked_at_and_not_the_last_alone(tmp_path: Path, second: str, reason: str) -> None:
    await refuse(walk(tmp_path, step=f"if self.number == 2: return {second}"), reason)


@pytest.mark.parametrize(
    ("demonstration", "reason"),
    [
        ("('go 4',) * 3", r"demonstration\(0\) gives \['go 4', 'go 4', 'go 4'\], which earns 0; give actions"),
        ("('go 3',)", r"demonstration\(0\) gives \['go 3'\], which earns 0 and does not end the episode"),
        ("self.problem(task_id).way", r"demonstration\(0\) raised AttributeError: .* \(walk.py:\d+ in demonstration"),
    ],
)
async def test_a_demonstration_that_earns_nothing_is_refused(tmp_path: Path, demonstration: str, reason: str) -> None:
    await refuse(walk(tmp_path, demonstration=demonstration), reason)


async def test_a_task_far_from_the_first_one_that_cannot_be_built_is_named(tmp_path: Path) -> None:
    build = "if 60 < task_id < 70: {}[task_id]"
    await refuse(
        walk(tmp_path, build=build), r"task 69 of 0\.\.99 cannot be built: KeyError: 69 \(walk.py:\d+ in build"
    )


async def test_a_text_that_the_tiny_model_cannot_read_is_named_with_its_place(tmp_path: Path) -> None:
    reason = r"environment 'walk': task 0, after action 1 .*cannot read character 'A'.*abcdefghij.*kind = 'char'"
    await refuse(walk(tmp_path, step="said = said.upper()"), reason)
    await refuse(walk(tmp_path).model_copy(update={"prompt": "{question}!"}), "environment 'walk'.*character '!'")
    shipped = EnvironmentConfig(name="way", kind="grid_world")
    tokenizer = narrow_tokenizer(ModelConfig(source="tiny"))
    with pytest.raises(ConfigError, match="environment 'way', task 0: the tiny model cannot read"):
        await examine([shipped], tokenizer=tokenizer)
    await examine([shipped.model_copy(update={"params": {"style": "char"}})], tokenizer=tokenizer)
    assert narrow_tokenizer(ModelConfig(source="smollm2")) is None


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("open(__file__)", r"FileNotFoundError).*params\.path.*(at action 1"),
        ("open('/tmp/walk', 'w')", r"Error).*params\.path.*(at action 1"),
        ("subprocess.run(['true'])", r"Error).*starts no process.*(at action 1"),
        ("socket.create_connection(('127.0.0.1', 9))", r"Error).*no network.*(at action 1"),
        ("x = bytearray(2**31)", r"MemoryError: more than sandbox\.memory_bytes).*(at action 1"),
    ],
)
async def test_what_the_sandbox_of_a_node_forbids_fails_in_the_check(tmp_path: Path, step: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"environment walk, task 0: the verifier raised .*({reason})"):
        await require_repeatable([walk(tmp_path, step=step)])


async def test_a_loop_is_named_with_its_action_in_seconds(tmp_path: Path) -> None:
    config = walk(tmp_path, step="while self.place == 6: pass")
    reason = r"task 0: an answer took more CPU time than answer_cpu_s 0\.05, at action 2 of \['go 3', 'go 3'\]"
    with pytest.raises(ConfigError, match=reason):
        await require_repeatable([config])


async def test_a_step_of_a_node_that_fails_is_named_by_task_and_action(tmp_path: Path) -> None:
    async with SandboxVerifier(
        (walk(tmp_path, step="while self.place == 6: pass"),), SandboxConfig(timeout_s=60.0)
    ) as verifier:
        await verifier.step("walk", 7, ("go 3",))
        with pytest.raises(RolloutFailed, match="environment walk, task 7, action 2: an answer took more CPU time"):
            await verifier.step("walk", 7, ("go 3", "go 3"))


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (
            "said += os.urandom(8).hex()",
            "the observation after action 1, 'go 3', is '.*at 3.*' in one and '.*' in the other",
        ),
        (
            "if self.number == 1: return Transition(reward=int.from_bytes(os.urandom(6)) / 2**49 + 0.1)",
            "the reward after action 1, 'go 3', is '0",
        ),
    ],
)
async def test_a_difference_is_named_with_action_and_both_values(tmp_path: Path, step: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"episode 0 of task 0 differs between two processes: {what}"):
        await require_repeatable([walk(tmp_path, step=step)], SandboxConfig())


async def test_doctor_finds_what_the_sandbox_forbids_among_the_rest(tmp_path: Path) -> None:
    config = NodeConfig(environments=(walk(tmp_path, step="open('/etc/passwd')"),))
    (finding,) = await _check_environments(config)
    assert not finding.is_ok and finding.is_fatal and "params.path" in finding.detail
