"""Parameters within the ceilings of a manifest that ask for any work are refused before this process does any."""

import io

import pytest

from swarm.config import EnvironmentConfig
from swarm.environments.first_problem import main, require_first_problems
from swarm.errors import ConfigError


def environment(dataset: str, **params: int) -> EnvironmentConfig:
    return EnvironmentConfig(name="asked", kind="reasoning_gym", dataset=dataset, params=params)


def test_a_question_of_millions_of_characters_is_refused_with_its_parameters() -> None:
    sides = {"min_rows": 1500, "max_rows": 1500, "min_cols": 1500, "max_cols": 1500}
    with pytest.raises(
        ConfigError, match=r"environment asked .*1500.*a question has 4,500,\d+ characters, at most 1,048"
    ):
        require_first_problems([environment("largest_island", **sides)])


def test_episodes_of_the_first_problems_are_played_there_as_they_will_be_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played: list[int] = []
    asked = EnvironmentConfig(name="asked", kind="grid_world").model_dump_json().encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(asked)))
    monkeypatch.setattr("swarm.environments.replay.replay", lambda _, task_id, actions: played.append(task_id))
    main()
    assert {0, 1} <= set(played) and not capsys.readouterr().out


@pytest.mark.sweep
def test_a_problem_that_takes_for_ever_is_refused_with_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.environments.first_problem.CPU_S", 3)
    with pytest.raises(ConfigError, match=r"environment asked .*26.*took more than 3 s of CPU"):
        require_first_problems([environment("tower_of_hanoi", min_disks=26, max_disks=26)])
