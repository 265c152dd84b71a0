"""The method of docs/recipes.md, one file outside the package: checked, shown, and learned by in a running node."""

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from node.daemon import Daemon, write_config
from swarm.cli.main import app
from swarm.config import (
    DirectoryConfig,
    EnvironmentConfig,
    EvaluationConfig,
    ModelConfig,
    NodeConfig,
    load_config,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "recipes.md"


def written(folder: Path) -> str:
    """The code of the document in a file of this folder, and a configuration beside it."""
    code = DOCUMENT.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (folder / "my_method.py").write_text(code, encoding="utf-8")
    config = NodeConfig(
        dir=folder / "node",
        worker="inline",
        environments=(EnvironmentConfig(name="reverse", kind="char", dataset="reverse"),),
        model=ModelConfig(source="tiny", dtype="float32"),
        directory=DirectoryConfig(kind="none"),
        evaluation=EvaluationConfig(num_problems=2),
    )
    write_config(config, folder / "node.toml")
    return code


def test_it_is_short_and_passes_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(written(tmp_path).splitlines()) < 40
    monkeypatch.chdir(tmp_path)
    check = ["check", "--config", "node.toml", "--set", "recipe=my_method:RECIPE"]
    found = CliRunner().invoke(app, [*check, "--set", "learner.recipe_params.weight.width=0.5"])
    assert found.exit_code == 0 and "recipe my_method (ours)" in found.stdout
    assert "groups of another tokenizer: sapo_swarm" in found.stdout
    wrong = CliRunner().invoke(app, [*check, "--set", "learner.recipe_params.weight.width=0.0"])
    assert wrong.exit_code == 2 and "width: 0.0 must be above 0" in wrong.stderr
    shown = CliRunner().invoke(app, ["recipes", "show", "my_method.py:RECIPE"]).stdout
    assert "tokens count the less" in shown and "learner.recipe_params.weight.width=1.0" in shown


async def test_a_node_learns_by_it(tmp_path: Path) -> None:
    written(tmp_path)
    sets = [f"recipe={tmp_path / 'my_method.py'}:RECIPE", "learner.num_steps=2", "replay.keep_zero_variance=true"]
    config = await asyncio.to_thread(load_config, NodeConfig, tmp_path / "node.toml", sets)
    async with Daemon(config) as daemon:
        await daemon.run()  # it ends with the last step
        assert daemon.status()["step"] == 2


def test_a_recipe_of_a_kind_that_cannot_learn_from_it_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    check = ["check", "--config", str(tmp_path / "node.toml"), "--set"]
    for key, kind in (("recipe_text_only", "text_only"), ("recipe_without_logprobs", "no_logprobs")):
        found = CliRunner().invoke(app, [*check, f"learner.{key}=grpo"])
        message = " ".join(found.stderr.split())
        assert found.exit_code == 2 and f"learner.{key}: grpo needs behaviour log-probs, which {kind}" in message
    found = CliRunner().invoke(app, [*check, "learner.recipe_text_only=segment_ratio", "--set", "recipe=grpo"])
    assert found.exit_code == 2 and "generator.byte_lengths = true" in " ".join(found.stderr.split())
    found = CliRunner().invoke(app, [*check, "learner.recipe_text_only=", "--set", "recipe=grpo"])
    assert found.exit_code == 0 and "groups of another tokenizer: refused" in found.stdout
