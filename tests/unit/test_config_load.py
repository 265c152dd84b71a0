"""An unreadable configuration is an error of one line with the reason; removed keys are named with their constants."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.manifest_signing import sign_next
from node.sampled_tasks import model_notes
from node.train_options import TrainOptions, resolve
from swarm.cli.main import app
from swarm.config import CoordinatorConfig, LearnerConfig, ModelConfig, NodeConfig, load_config, parse_config
from swarm.errors import ConfigError
from swarm.identity import DOMAIN_MANIFEST, Identity
from swarm.wire.held_manifest import save_held
from swarm.wire.run_manifest import SignedManifest, manifest_of, open_manifest, write_node_toml


@pytest.mark.parametrize(
    ("name", "reason"),
    [("", "Is a directory"), ("node.toml/deeper", "Not a directory"), ("nowhere.toml", "no such file")],
)
def test_what_is_no_readable_file_is_named_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "node.toml").write_text("")
    path = tmp_path / name
    with pytest.raises(ConfigError, match=f"^{path}: .*{reason}$"):
        load_config(NodeConfig, path)
    found = CliRunner().invoke(app, ["check", "--config", str(path)], env={"COLUMNS": "400"})
    is_directory = not name  # stands for the file in it
    assert found.exit_code == (0 if is_directory else 2)
    assert is_directory or "ConfigError:" in found.stderr


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(NodeConfig, path)


def test_the_configuration_of_a_coordinator_given_for_a_node_is_told_from_it(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_text('listen = "127.0.0.1:0"\n[node]\nrun_id = "demo"\n')
    with pytest.raises(ConfigError, match="so it is a coordinator's"):
        load_config(NodeConfig, path)
    assert load_config(CoordinatorConfig, path).node.run_id == "demo"
    found = CliRunner().invoke(app, ["doctor", "--config", str(path)], env={"COLUMNS": "400"})
    assert found.exit_code == 2 and "a table [node], so" in found.stderr, "brackets are no markup"


@pytest.mark.parametrize("port", [-1, 1, 80, 442, 444, 1023, 65_536, 70_000])
def test_a_port_that_nobody_dials_for_a_relay_is_refused_with_the_ones_that_are(port: int, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(f"[exchange]\nrelay_port = {port}")
    with pytest.raises(ConfigError, match=r"relay_port: .*expected 443, 1024 to 65535, or 0 .*got"):
        load_config(NodeConfig, path)


@pytest.mark.parametrize(
    ("table", "key", "constant"),
    [
        (table, key, constant)
        for table, each in NodeConfig.model_fields.items()
        for key, constant in getattr(each.default, "removed", {}).items()
    ],
)
def test_a_removed_key_counts_as_left_out_at_its_constant_and_is_named_with_it_at_another_value(
    table: str, key: str, constant: object, tmp_path: Path
) -> None:
    path = tmp_path / "node.toml"
    path.write_text(f"[{table}]\n{key} = {json.dumps(constant)}\n")
    assert load_config(NodeConfig, path) == NodeConfig()
    assert parse_config(CoordinatorConfig, {"node": {table: {key: constant}}}, "run") == CoordinatorConfig()
    path.write_text(f'[{table}]\n{key} = "another"\n')
    named = f"{table}.{key}: no longer a key, every node has {json.dumps(constant)}; leave it out"
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{path}: {named}')}$"):
        load_config(NodeConfig, path)


def test_a_manifest_of_an_earlier_release_is_taken_and_stays_the_one_that_is_signed(tmp_path: Path) -> None:
    identity = Identity.create()
    config = CoordinatorConfig(dir=tmp_path, run_id="demo")
    manifest = manifest_of(NodeConfig(model=ModelConfig(source="tiny")), "demo", "", 1.0)
    data = json.loads(manifest.to_bytes())
    data["learner"] |= LearnerConfig.removed

    def signed() -> SignedManifest:
        body = json.dumps(data).encode()
        signature = identity.sign(DOMAIN_MANIFEST, body)
        return open_manifest(body, identity.public_key, signature, identity.node_id, "demo")

    held = signed()
    assert held.manifest == manifest
    save_held(tmp_path, held)
    assert sign_next(config, identity, manifest, 2.0).data == held.data, "it says the same"
    data["learner"]["betas"] = [0.9, 0.95]
    with pytest.raises(ConfigError, match=r"manifest: learner\.betas"):
        signed()


@pytest.mark.parametrize(("model", "rate"), [({"source": "tiny"}, 1e-4), ({"lora_rank": 8}, 1e-4), ({}, 1e-5)])
def test_one_rule_gives_the_learning_rate_that_nobody_set(model: dict[str, object], rate: float) -> None:
    """In a file, in what `swarm train` writes, and in the node of a manifest, which others join."""
    section = {"model": model, "environments": [{"name": "sort", "kind": "char", "dataset": "sort"}]}
    own = parse_config(NodeConfig, section, "node.toml")
    options = TrainOptions(
        directory=Path("x"), model=str(model.get("source", "smollm2")), environments=("char:sort",),
        lora_rank=int(str(model.get("lora_rank", 0))),
    )  # fmt: skip
    run = manifest_of(own, "run", "", 0.0)
    assert {own.learner.learning_rate, resolve(options).learner.learning_rate, run.learner.learning_rate} == {rate}
    given = parse_config(NodeConfig, section | {"learner": {"learning_rate": 3e-5}}, "node.toml")
    assert given.learner.learning_rate == 3e-5


def test_a_small_model_says_which_tasks_it_was_shown() -> None:
    def note(source: str, kind: str) -> str:
        section = {"name": "own", "kind": kind, "dataset": "x"}
        config = NodeConfig.model_validate({"model": {"source": source}, "environments": [section]})
        return "".join(model_notes(config, None))

    assert "sort" in note("tiny", "jsonl") and "look_up" in note("tiny-agents", "jsonl")
    assert not note("tiny", "char") and not note("tiny-agents", "look_up") and not note("smollm2", "jsonl")


def test_a_node_toml_for_people_is_short_and_means_the_same(tmp_path: Path) -> None:
    options = TrainOptions(directory=tmp_path / "ada", model="tiny", environments=("char:sort",))
    config = resolve(options)
    write_node_toml(config, path := tmp_path / "ada" / "node.toml")
    text = path.read_text()
    assert load_config(NodeConfig, path) == config
    assert "num_tasks" not in text and "learning_rate = 0.0001" in text
    assert text.startswith("# ") and f"swarm check {path.parent} --print" in text and len(text.splitlines()) < 50
