"""`swarm check --print` writes the same configuration again, with the source of each value."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from swarm.cli.main import app
from swarm.config import (
    CoordinatorConfig,
    EnvironmentConfig,
    NodeConfig,
    load_config,
    parse_config,
    sources_of,
    to_toml,
)
from swarm.identity import Identity
from swarm.wire.held_manifest import HELD, save_held
from swarm.wire.run_manifest import manifest_of, sign_manifest

EXAMPLES = Path(__file__).parents[2] / "deploy" / "configs"
SPREAD = '''run_id = "run"
roles = [
  "trainer",
  "generator",
]
generator.group_size = 4

[[environments]]
name = "a"
kind = "reasoning_gym"
prompt = """
seed = 3
{question}"""
seed = 5
[environments.params]
min_terms = 2

[[environments]]
kind = "char"
name = "b"
[learner]
'''


def printed(path: Path, *overrides: str) -> str:
    options = [part for each in overrides for part in ("--set", each)]
    found = CliRunner().invoke(app, ["check", "--config", str(path), "--print", *options])
    assert found.exit_code == 0, found.output
    return found.stdout


def source_of(text: str, key: str, number: int = 0) -> str:
    line = [line for line in text.splitlines() if line.startswith(f"{key} = ")][number]
    return line.rpartition("  # ")[2]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_is_printed_as_the_same_configuration(path: Path) -> None:
    kind: type[Any] = CoordinatorConfig if path.stem == "coordinator" else NodeConfig
    config = load_config(kind, path)
    text = printed(path)
    assert parse_config(kind, tomllib.loads(text), "printed") == config
    assert source_of(text, "run_id") == f"{path.name}:{_line(path.read_text(), 'run_id')}"


values = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    params=st.dictionaries(st.text(max_size=5), values, max_size=3),
    prompt=st.text(max_size=20),
    rate=st.floats(min_value=1e-30, max_value=1e30),
)
def test_whatever_texts_and_params_hold_comes_back(params: dict[str, Any], prompt: str, rate: float) -> None:
    environment = EnvironmentConfig(
        name="a", kind="plugin", dataset=prompt, params=params, reward_weights={prompt: 1.0}
    )
    config = NodeConfig(environments=(environment,), learner={"learning_rate": rate})  # pyright: ignore[reportArgumentType]
    text = to_toml(config, {})
    assert parse_config(NodeConfig, tomllib.loads(text), "printed") == config
    assert all(each.isprintable() for line in text.split("\n") for each in line), "a terminal shows all of it"


def _line(text: str, key: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.startswith(f"{key} "))


def test_each_value_names_the_line_on_which_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(SPREAD)
    text = printed(path, "recipe=gspo")
    assert source_of(text, "roles") == "node.toml:2" and source_of(text, "group_size") == "node.toml:6"
    assert source_of(text, "prompt") == "node.toml:11" and source_of(text, "seed", 1) == "node.toml:14", text
    assert source_of(text, "params") == "node.toml:16" and source_of(text, "params", 1) == "default"
    assert source_of(text, "name", 2) == "node.toml:20" and source_of(text, "seed", 2) == "default"
    assert source_of(text, "recipe") == "--set" and source_of(text, "learning_rate") == "default"
    assert parse_config(NodeConfig, tomllib.loads(text), "printed") == load_config(NodeConfig, path, ["recipe=gspo"])


def test_what_is_set_takes_the_place_of_the_file_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(SPREAD)
    sources = sources_of(NodeConfig, path, ['environments=[{name="c", kind="char"}]', "generator.group_size=2"])
    assert sources["environments", 0, "name"] == sources["generator", "group_size"] == "--set"
    assert ("environments", 0, "seed") not in sources and ("environments", 1, "name") not in sources
    assert sources["run_id",] == "node.toml:1"


def test_what_the_newest_manifest_says_is_told_from_what_the_file_says(tmp_path: Path) -> None:
    run = NodeConfig(run_id="run", environments=(EnvironmentConfig(name="a", kind="char", dataset="sort", seed=7),))
    coordinator = Identity.create()
    save_held(tmp_path, sign_manifest(manifest_of(run, "run", "", 0.0), coordinator))
    path = tmp_path / "node.toml"
    path.write_text(
        f'dir = "{tmp_path}"\nrun_id = "run"\n[generator]\nmax_new_tokens = 30\n'
        '[[environments]]\nname = "a"\nkind = "char"\ndataset = "sort"\nseed = 8\n'
    )
    text = printed(path, "replay.local_groups=2")
    assert source_of(text, "fingerprint") == HELD and coordinator.node_id in text
    assert source_of(text, "max_new_tokens") == f"node.toml:4; {HELD} has 8"
    assert source_of(text, "seed", 1) == f"node.toml:9; {HELD} has 7"
    assert source_of(text, "local_groups") == f"--set; {HELD} has 4"
    assert source_of(text, "group_size") == "default"
