"""The commands that people and scripts run, as processes, with their exit codes and output."""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROOT = Path(__file__).parents[2]


async def test_doctor_says_what_it_checked_with_a_fix_for_every_finding(command: Any) -> None:
    code, out, err = await command("swarm.cli.main", "doctor", "--json")
    findings = json.loads(out)
    assert {"python", "torch", "hivemind", "disk", "memory", "clock", "sandbox"} <= {f["name"] for f in findings}
    assert all(finding["is_ok"] or finding["fix"] for finding in findings)
    assert code == int(any(f["is_fatal"] and not f["is_ok"] for f in findings)), err


async def test_recipes_are_listed_for_people_and_machines(command: Any) -> None:
    code, out, err = await command("swarm.cli.main", "recipes", "list", "--json")
    assert code == 0, err
    assert "sapo_swarm" in {row["name"] for row in json.loads(out)}


async def test_a_new_key_is_shown_and_never_overwritten(command: Any, tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    code, out, err = await command("swarm.cli.main", "keys", "new", path)
    assert code == 0, err
    before = path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0
    code, shown, _ = await command("swarm.cli.main", "keys", "show", path)
    assert code == 0
    assert len(shown.strip()) == 64
    assert shown.strip() in out
    code, _, err = await command("swarm.cli.main", "keys", "new", path)
    assert code == 2
    assert "Traceback" not in err
    assert path.read_bytes() == before


async def test_check_accepts_the_laptop_example_and_names_a_wrong_key(command: Any) -> None:
    laptop = ROOT / "deploy" / "configs" / "laptop.toml"
    code, out, err = await command("swarm.cli.main", "check", "--config", laptop)
    assert code == 0, err
    assert "sapo_swarm" in out
    code, _, err = await command("swarm.cli.main", "check", "--config", laptop, "--set", "replay.max_agee=1")
    assert code == 2
    assert "replay.max_agee: unknown key" in err


async def test_a_node_whose_worker_cannot_work_ends_with_the_reason(command: Any, tmp_path: Path) -> None:
    laptop = ROOT / "deploy" / "configs" / "laptop.toml"
    for kind in ("process", "inline"):
        sets = [f"worker={kind}", f"dir={tmp_path / kind}", "learner.recipe=no_such_recipe", "directory.kind=none"]
        options = [part for key in sets for part in ("--set", key)]
        code, out, err = await command("node.cli", "start", "--config", laptop, *options)
        assert code == 2, (kind, out, err)
        assert "no_such_recipe" in err.splitlines()[-1] or "no_such_recipe" in err, (kind, err)
        assert "ConfigError: " in err
        assert "Traceback" not in err, (kind, err)


async def test_a_directory_has_one_node(swarm: Any, command: Any) -> None:
    (config,) = swarm.configs(1)
    alone = config.model_copy(update={"directory": config.directory.model_copy(update={"kind": "none"})})
    await swarm.node(alone)
    code, _, err = await command("node.cli", "start", "--config", config.dir / "node.toml")
    assert code == 2
    assert "a process runs there already" in err
