"""The commands of the README are there, where a shell finds them, and its sample of a run is as runs are now."""

import re
import shlex
from pathlib import Path

import typer
from typer.main import get_command

from coordinator.cli import app as coordinator_app
from swarm.cli.main import app as swarm_app
from swarm.report.invariants import Invariants

ROOT = Path(__file__).parents[2]
APPS: dict[str, typer.Typer] = {"swarm": swarm_app, "swarm-coordinator": coordinator_app}


def lines() -> list[list[str]]:
    """The words of each line in the README's blocks of commands."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [words for block in blocks for line in block.splitlines() if (words := shlex.split(line, comments=True))]


def test_every_command_has_the_subcommand_and_the_options_that_it_is_given() -> None:
    used = [words for words in lines() if Path(words[0]).name in APPS]
    assert len(used) > 10
    for words in used:
        command = get_command(APPS[Path(words[0]).name]).commands[words[1]]  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        given = {word for word in words if word.startswith("--")}
        assert given <= known or command.context_settings.get("allow_extra_args"), words


def test_every_target_of_make_exists() -> None:
    used = {words[1] for words in lines() if words[0] == "make"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert used and used <= targets


def test_commands_without_a_path_come_after_the_line_that_puts_them_on_the_path() -> None:
    bare = [words[0] in APPS for words in lines()]
    activated = lines().index(["make", "env", "&&", ".", ".venv/bin/activate"])
    assert bare.index(True) > activated


def test_two_nodes_are_never_given_one_directory() -> None:
    joins = [words for words in lines() if words[:2] == ["swarm", "join"]]
    directories = [words[words.index("--dir") + 1] if "--dir" in words else "swarm-node" for words in joins]
    assert len(set(directories)) == len(directories) == 3


def test_the_sample_of_a_run_lists_the_invariants_that_a_run_prints() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())  # long lines of it are wrapped
    printed = [f" ok {verdict.name}" for verdict in Invariants().verdicts()]
    places = [text.find(line) for line in printed]
    assert -1 not in places and places == sorted(places), printed
    assert text.count(" ok ") == len(printed)
