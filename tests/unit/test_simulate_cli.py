"""`swarm simulate` says what cannot work, naming the option, before anything is made or started."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from swarm.cli.main import app

TINY = ("--preset", "tiny")


def simulate(*arguments: object) -> Result:
    """The command on a wide terminal."""
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": "400"})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--mix 0:0", "--mix 0:0: a step would have nothing to learn from"),
        ("--latency-ms=-5", "--latency-ms"),
        ("--slow ada=-4", "--slow ada=-4: FACTOR is at least 1"),
        ("--slow ada=nan", "--slow ada=nan: FACTOR is at least 1"),
        ("--slow coordinator=2", "coordinator: no such node"),
        ("--kill ada", "--kill ada: expected NODE@SECONDS"),
        ("--stop ada@-1", "--stop ada@-1: SECONDS is at least 0"),
        ("--nodes=-1", "--nodes"),
        ("--nodes 0", "--nodes"),
        ("--rounds 0", "--rounds"),
        ("--minutes=-1", "--minutes"),
        ("--minutes nan", "--minutes"),
        ("--seed=-1", "--seed"),
        ("--virtual --nodes=-3", "--nodes"),
        ("--virtual --nodes 1 --kill ada@1 --preset nope", "--preset, --kill: does not apply to --virtual"),
        ("--episodes", "--episodes: applies to --virtual alone"),
        ("--outward=0.7", "--outward: applies to --virtual alone"),
        ("--virtual --restart", "--restart: does not apply to --virtual"),
        ("--preset nope", "--preset nope: unknown"),
        ("--preset nope --compare silo", "--preset nope: unknown"),
        ("--preset echo-tiny --nodes 1", "--nodes 1: --preset echo-tiny needs a trainer and a generator"),
        ("--preset echo-tiny --deterministic", "learner.deterministic: needs the trainer role"),
        ("--preset echo-tiny --compare colocated --kill bell@1", "bell: no such node; the nodes are ada"),
        ("--recipe nope", "learner.recipe: unknown recipe 'nope'"),
        ("--recipe swarm_sampling", "did you mean sapo_swarm,"),
        ("--set guard.safe_recipe=nope", 'guard.safe_recipe: no longer a key, every node has "gspo"'),
        ("--set foo", "--set 'foo': expected key.path=value"),
        ("--set learner.learning_ratex=3", "learner.learning_ratex: unknown key"),
        ("--set learner.lr=1e-3", "learner.lr: unknown key; did you mean learning_rate?"),
        ("--set faults.latency_ms=-1", "faults.latency_ms: Input should be greater than or equal to 0 (got -1)"),
        ("--set dir=/", "a simulation gives each node its own"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing_behind(
    arguments: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = arguments.split()
    if not {"--preset", "--virtual"} & set(given):
        given += TINY
    found = simulate(*given)
    assert found.exit_code == 2, found.output
    assert reason in found.stderr
    assert "pydantic.dev" not in found.stderr
    assert len(found.stderr) < 1600, "not every name there is"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["README.md", "README.md/deeper"])
def test_out_that_cannot_be_made_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    found = simulate(*TINY, "--out", tmp_path / name)
    assert found.exit_code == 2, found.exception
    assert f"--out {tmp_path / name}: cannot be made: Not a directory" in found.stderr


@pytest.mark.parametrize(("preset", "rival"), [("tiny", "silo"), ("echo-tiny", "colocated")])
@pytest.mark.parametrize("earlier", ["swarm", "rival"])
def test_a_run_takes_over_and_deletes_nothing_that_it_did_not_make(
    preset: str, rival: str, earlier: str, tmp_path: Path
) -> None:
    mine = tmp_path / (rival if earlier == "rival" else earlier) / "ada" / "checkpoints" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    found = simulate("--preset", preset, "--compare", rival, "--out", tmp_path)
    assert found.exit_code == 2, found.output
    assert f"--out {tmp_path}: {mine.parts[-4]}/ is not empty" in found.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
