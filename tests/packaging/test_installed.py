"""The installed distribution: complete, cheap to import, with working commands.

Run by `make test` on the editable install and by `.ci/run` on the wheel (SWARM_TEST_WHEEL=1), both times
with the `pytest` command, so that the package comes from where it was installed and not from the tree.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("swarm", "node", "coordinator")
COMMANDS = {"swarm", "swarm-node", "swarm-coordinator"}


def location(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def run_python(program: str) -> str:
    # -P keeps the working directory off the path; cwd would otherwise hide an incomplete wheel
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_come_from_where_they_were_installed(package: str):
    site = Path(sysconfig.get_path("purelib"))
    expected = site if os.environ.get("SWARM_TEST_WHEEL") else ROOT
    assert location(package) == expected / package


@pytest.mark.parametrize("package", PACKAGES)
def test_every_source_file_is_installed_unchanged(package: str):
    files = [p for p in (ROOT / package).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert files
    for path in files:
        installed = location(package) / path.relative_to(ROOT / package)
        assert installed.is_file(), f"{path.relative_to(ROOT)} is missing from the installed package"
        assert installed.read_bytes() == path.read_bytes()


def test_importing_the_packages_loads_no_heavy_library_and_starts_nothing():
    program = """
import json, sys, threading
import swarm, swarm.cli.main, swarm.types, swarm.interfaces, swarm.config, node.cli, coordinator.cli
heavy = ("torch", "transformers", "grpc", "google.protobuf", "hivemind", "matplotlib", "vllm")
print(json.dumps([[name for name in heavy if name in sys.modules], threading.active_count()]))
"""
    assert json.loads(run_python(program)) == [[], 1]


def test_every_module_imports():
    program = """
import importlib, pkgutil, swarm, node, coordinator
names = [m.name for p in (swarm, node, coordinator) for m in pkgutil.walk_packages(p.__path__, p.__name__ + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""
    assert int(run_python(program)) > 50


def test_the_commands_are_the_three_of_the_project():
    entries = importlib.metadata.distribution("swarm-trainer").entry_points
    assert {entry.name for entry in entries if entry.group == "console_scripts"} == COMMANDS


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_command_explains_itself(name: str):
    command = Path(sysconfig.get_path("scripts")) / name
    done = subprocess.run([command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_the_readme_of_a_package_index_has_no_link_that_leads_nowhere_there():
    text = importlib.metadata.metadata("swarm-trainer")["Description"]
    assert "docs/tutorial.md" in text
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []


def test_the_distribution_carries_its_licence_and_python_range():
    metadata = importlib.metadata.metadata("swarm-trainer")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == "<3.14,>=3.11"
    if os.environ.get("SWARM_TEST_WHEEL"):
        files = importlib.metadata.files("swarm-trainer") or []
        assert any(path.name == "LICENSE" for path in files)
