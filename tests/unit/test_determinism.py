"""Environments whose episodes another process would not repeat are found, and those that ship are none of them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from node import doctor
from node.daemon import Daemon
from swarm.cli.main import app
from swarm.config import DirectoryConfig, EnvironmentConfig, ModelConfig, NodeConfig
from swarm.environments import determinism
from swarm.environments.determinism import differences, require_repeatable
from swarm.environments.grid_world import GridWorldEnvironment
from swarm.environments.load import build_environment
from swarm.environments.soundness import require_sound, try_out
from swarm.errors import ConfigError
from swarm.interfaces import Environment
from swarm.testing.builders import InlineVerifier

PLUGIN = """
import datetime, os, random, time
from swarm.environments.environment import AnswerEnvironment, Problem

SEEN = []

class Local(AnswerEnvironment):
    def __init__(self, config):
        super().__init__(config, "local/1")

    def build(self, task_id):
        word = random.Random(task_id).choice(["ada", "ben", "cora"])
        return Problem(question={question}, reference=word)

    def judge(self, problem, answer):
        SEEN.append(answer)
        return {reward}
"""
RIGHT = "float(answer == problem.reference)"
DIFFERENT = {
    "order of a set": ("' '.join({'ada', 'ben', 'cora', 'dan', 'eva'})", RIGHT, "the question"),
    "hash of a text": ("str(hash(word))", RIGHT, "the question"),
    "clock": ("word", "time.time() % 1", "episode"),
    "year": ("word", "datetime.date.today().year / 3000", "episode"),
    "hour": ("word", "time.localtime().tm_hour / 24", "episode"),
    "date and time": ("word", "datetime.datetime.now().day / 31", "episode"),
    "number of the process": ("word", "os.getpid() % 997 / 997", "episode"),
    "address": ("word", "id(SEEN) // 16 % 9973 / 9973", "episode"),
    "unseeded draw": ("word", "random.random()", "episode"),
    "order of episodes": ("word", "min(1.0, len(SEEN) / 1000)", "episode"),
    "what was answered before": ("word", "float(answer in SEEN[:-1])", "episode"),
}


def local(folder: Path, question: str, reward: str) -> EnvironmentConfig:
    name = f"local_{len(list(folder.iterdir()))}"
    (folder / f"{name}.py").write_text(PLUGIN.replace("{question}", question).replace("{reward}", reward))
    return EnvironmentConfig(name=name, kind="plugin", dataset=f"{folder / name}.py:Local", num_tasks=50)


async def test_what_differs_between_processes_is_named_and_the_rest_is_not(tmp_path: Path) -> None:
    configs = {why: local(tmp_path, question, reward) for why, (question, reward, _) in DIFFERENT.items()}
    good = local(tmp_path, "f'say {word}: ' + ' '.join(sorted({'ada', 'ben'}))", RIGHT)
    found = await differences([*configs.values(), good])
    assert good.name not in found
    for why, config in configs.items():
        part = DIFFERENT[why][2]
        assert part in found.get(config.name, ""), f"{why}: {found.get(config.name)}"


async def test_without_other_settings_it_would_find_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "_SETTINGS", (("1", "UTC", 0.0, False),) * 2)
    unseen = ("order of a set", "hash of a text", "year", "hour", "order of episodes", "what was answered before")
    assert await differences(local(tmp_path, *DIFFERENT[why][:2]) for why in unseen) == {}


async def test_a_plugin_that_cannot_be_replayed_is_refused_with_the_fix(tmp_path: Path) -> None:
    question, reward, _ = DIFFERENT["clock"]
    with pytest.raises(ConfigError, match=r"episode 0 of task 0 differs.*task id alone.*exchange = \"own\""):
        await require_repeatable([local(tmp_path, question, reward)])
    with pytest.raises(ConfigError, match="no module"):
        await require_repeatable([EnvironmentConfig(name="x", kind="plugin", dataset="no_such_module:Local")])


async def test_a_package_that_only_pythonpath_finds_is_refused_as_the_verifier_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "only_here"
    package.mkdir()
    (package / "local.py").write_text(PLUGIN.replace("{question}", "word").replace("{reward}", RIGHT))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no module 'only_here'; install .* \(PYTHONPATH does not count\)"):
        await require_repeatable([EnvironmentConfig(name="x", kind="plugin", dataset="only_here.local:Local")])


async def test_a_process_that_dies_says_its_last_words(tmp_path: Path) -> None:
    config = local(tmp_path, "os.write(2, b'out of paper') and os._exit(3)", RIGHT)
    with pytest.raises(ConfigError, match=r"local_0: .* died with exit code 3: out of paper"):
        await require_repeatable([config])


async def test_a_node_with_such_an_environment_starts_only_where_it_runs_alone(tmp_path: Path) -> None:
    environment = local(tmp_path, *DIFFERENT["clock"][:2])
    config = NodeConfig(environments=(environment,), dir=tmp_path / "node", model=ModelConfig(source="tiny"))
    with pytest.raises(ConfigError, match="differs between two processes"):
        async with Daemon(config):
            raise AssertionError("the node started")
    (finding,) = await doctor._check_environments(config)
    assert finding.is_fatal and not finding.is_ok and "episode 0 of task 0" in finding.detail
    alone = config.model_copy(update={"directory": DirectoryConfig(kind="none")})
    (finding,) = await doctor._check_environments(alone)
    assert not finding.is_fatal and not finding.is_ok
    async with Daemon(alone):
        pass


def test_check_refuses_it_for_exchange_and_says_so_for_local_use(tmp_path: Path) -> None:
    environment = local(tmp_path, *DIFFERENT["clock"][:2])
    path = tmp_path / "node.toml"
    path.write_text(f'[[environments]]\nname = "x"\nkind = "plugin"\ndataset = "{environment.dataset}"\n')
    refused = CliRunner().invoke(app, ["check", "--trust", "--config", str(path)], env={"COLUMNS": "400"})
    assert refused.exit_code != 0 and "differs between two processes" in str(refused.exception) + refused.output
    alone = CliRunner().invoke(
        app, ["check", "--trust", "--config", str(path), "--set", "directory.kind=none"], env={"COLUMNS": "300"}
    )
    assert alone.exit_code == 0 and "environment x: episode 0 of task 0 differs" in alone.output


SHIPPED = {
    "calculator": {},
    "look_up": {"style": "char"},
    "grid_world": {"keys": 1},
    "apps": {},
    "dialogue": {},
    "code": {},
    "retry": {"inner": {"kind": "char", "dataset": "reverse"}, "hint": "first"},
}


async def test_environments_that_ship_are_repeatable_and_cost_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [
        EnvironmentConfig.model_validate({"name": kind, "kind": kind, "params": params, "num_tasks": 1000})
        for kind, params in SHIPPED.items()
    ]
    monkeypatch.setattr(determinism, "LOCAL_KINDS", (*SHIPPED, "char"))
    assert await differences(configs) == {}
    monkeypatch.undo()
    monkeypatch.setattr(determinism, "_play_elsewhere", None)
    assert await differences(configs) == {}


async def sound(environment: Environment) -> None:
    await require_sound(environment.name, try_out(environment), InlineVerifier({environment.name: environment}))


async def test_signals_that_episodes_have_and_an_environment_does_not_name_are_refused() -> None:
    """Else a recipe over turns would be refused, or see none of them, without a word on why."""
    environment = build_environment(EnvironmentConfig(name="grid", kind="grid_world"))
    assert isinstance(environment, GridWorldEnvironment)
    await sound(environment)
    environment.signals = frozenset({"turn_rewards"})
    with pytest.raises(ConfigError, match=r"environment grid: .* reward_parts, state_keys, .* does not name"):
        await sound(environment)


@pytest.mark.parametrize("kind", ["calculator", "look_up", "grid_world", "apps", "dialogue", "code", "nim", "notes"])
async def test_environments_that_ship_name_all_their_signals(kind: str) -> None:
    await sound(build_environment(EnvironmentConfig.model_validate({"name": kind, "kind": kind})))


@pytest.mark.parametrize(
    ("question", "reward", "reason"),
    [
        (
            "word",
            "1 / len(answer) / 9",
            r"task 0: the verifier raised ZeroDivisionError: .*_0.py:\d+ in judge\), at action 1 of \[''\]",
        ),
        (
            "word",
            "5.0 * (answer == problem.reference)",
            r"task 0 with the actions \['\w+'\]: action 1 gave the reward 'outcome' 5, which",
        ),
    ],
)
async def test_a_reward_that_raises_or_leaves_its_range_is_refused(
    tmp_path: Path, question: str, reward: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        await require_repeatable([local(tmp_path, question, reward)])


async def test_a_record_without_its_field_is_that_task_alone(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("def score(question, answer, reference): return float(answer == reference)")
    (tmp_path / "all.jsonl").write_text('{"question": "a?", "answer": "a"}\n{"answer": "b"}\n' * 4)
    params = {"path": str(tmp_path / "all.jsonl")}
    config = EnvironmentConfig(name="all", kind="function", dataset=f"{tmp_path / 'score.py'}:score", params=params)
    await require_repeatable([config])


NAMELESS = """
from swarm.episode import Transition
from swarm.environments.environment import NumberedEnvironment, Problem

class Local(NumberedEnvironment):
    signals = frozenset({"reward_parts"})
    def __init__(self, config):
        super().__init__(config, "local/1")
    def build(self, task_id):
        return Problem(question=str(task_id), reference="1")
    def begin(self, problem):
        return self
    def step(self, action):
        return Transition(is_end=True, rewards={"found": 1.0})
"""


async def test_rewards_of_which_none_counts_are_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "nameless.py").write_text(NAMELESS)
    config = EnvironmentConfig(name="local", kind="plugin", dataset=f"{tmp_path / 'nameless.py'}:Local")
    with pytest.raises(ConfigError, match=r"none counts: give it 'outcome', or set reward_weights"):
        await require_repeatable([config])
    await require_repeatable([config.model_copy(update={"reward_weights": {"found": 1.0}})])


def test_check_of_a_run_refuses_what_its_coordinator_would_not_sign(tmp_path: Path) -> None:
    plugin = local(tmp_path, "word", RIGHT)
    path = tmp_path / "coordinator.toml"
    path.write_text(
        f'run_id = "run"\n[node]\nrun_id = "run"\n[[node.environments]]\n'
        f'name = "local"\nkind = "plugin"\ndataset = "{plugin.dataset}"\n'
    )
    refused = CliRunner().invoke(app, ["check", "--config", str(path)], env={"COLUMNS": "400"})
    assert refused.exit_code == 2 and "names no local code" in refused.output.replace("\n", " ")
