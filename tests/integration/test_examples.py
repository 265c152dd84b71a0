"""The examples run as they are, as their users would run them: with the tiny model, in seconds."""

import asyncio
import importlib.util
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from swarm.config import ModelConfig
from swarm.model.char_folder import write_char_tokenizer
from swarm.model.network import load_model

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

# Arguments with which each is quick, and what it then says.
QUICK = {
    "arithmetic": (("2", "tiny"), r"held out: 0\.\d\d at step 0, \d\.\d\d at step 2\nsaved: .*arithmetic-model"),
    "own_reward": (("10",), r"step 10: reward 0\.\d\d, entropy [\d.]+\n(.*\n)*asked sort:.*\nheld out: \[\(0, "),
    "own_recipe": (("3",), r"recipe +.*own_recipe\.py:RECIPE(.*\n)*held out: \[\(0, .*\), \(3, "),
    "own_environment": (("3",), r"held out: \[\(0, .*\), \(3, "),
    "lora": (("2", "tiny"), r"adapters of rank 4(.*\n)*adapter: .*lora-adapter\nmerged: .*lora-merged"),
    "train_here_generate_there": (("4",), r"2 that only generate(.*\n)*groups by generator: \{'[0-9a-f]{8}': \d+"),
}
ELSEWHERE = {"one_node", "rollouts_for_own_loop", "rollouts_for_trl"}  # below


class Example:
    """Runs an example in this process, whose imports are made, in a directory of its own."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.chdir(directory)
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def run(self, name: str, *arguments: str) -> str:
        """Returns what it prints."""
        path = EXAMPLES / f"{name}.py"
        self._monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
        return self._capsys.readouterr().out


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Example:
    return Example(tmp_path, monkeypatch, capsys)


def test_each_example_is_run_here_and_listed_in_the_docs() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == QUICK.keys() | ELSEWHERE
    listed = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert {name for name in names if f"(../examples/{name}.py)" not in listed} == set()


@pytest.mark.parametrize("name", QUICK)
def test_an_example_runs(name: str, example: Example) -> None:
    arguments, said = QUICK[name]
    out = example.run(name, *arguments)
    assert re.search(said, out), out
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert f"python examples/{name}.py" in text and len(text.splitlines()) <= 70


@pytest.mark.asyncio(loop_scope="session")
async def test_a_loop_of_ones_own_learns_from_a_swarm(swarm: Any, example: Example) -> None:
    out = await asyncio.to_thread(example.run, "rollouts_for_own_loop", await swarm.link(), "3")
    assert re.findall(r"step (\d): 4 groups of 1 nodes, reward 0\.\d\d", out) == ["1", "2", "3"], out


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install trl==1.16.0")
@pytest.mark.filterwarnings("ignore")  # of TRL and transformers about each other
@pytest.mark.asyncio(loop_scope="session")
async def test_trl_learns_from_a_swarm(swarm: Any, example: Example, tmp_path: Path) -> None:
    loaded = load_model(ModelConfig(source="tiny", dtype="float32"))
    network: Any = loaded.network
    network.save_pretrained(tmp_path / "tiny-model")
    write_char_tokenizer(tmp_path / "tiny-model")
    out = await asyncio.to_thread(example.run, "rollouts_for_trl", await swarm.link(), "tiny-model", "3")
    rewards = re.findall(r"^\[(.*)\]$", out, re.MULTILINE)
    assert len(rewards) == 1 and len(rewards[0].split(",")) == 3, out
    assert (tmp_path / "rollouts" / "trl-model" / "model.safetensors").exists()


def test_one_node_learns_and_goes_on_where_it_ended(example: Example) -> None:
    for first in (1, 4):
        out = example.run("one_node", "3", "one-node")
        steps = [int(step) for step in re.findall(r"^step (\d+): reward", out, re.MULTILINE)]
        assert steps == [first, first + 1, first + 2]
        assert re.search(r"held out reverse: 0\.\d+ -> 0\.\d+ in 3 steps", out)
