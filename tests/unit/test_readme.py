"""The commands of README and docs exist, with their options, and README's sample of a run is as runs are now."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from coordinator.cli import app as coordinator_app
from node.cli import app as node_app
from swarm.cli.main import app as swarm_app
from swarm.command_line import DirectoryCommand
from swarm.report.invariants import Invariants
from swarm.trained.intervals import Z_95, independent_interval

ROOT = Path(__file__).parents[2]
APPS: dict[str, typer.Typer] = {"swarm": swarm_app, "swarm-node": node_app, "swarm-coordinator": coordinator_app}
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def lines(page: str = "README.md") -> list[list[str]]:
    """The words of each line in a page's blocks of commands."""
    blocks = re.findall(r"^```sh[^\n]*\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def test_the_pages_have_commands_of_every_program() -> None:
    used = {Path(words[0]).name for page in PAGES for words in lines(page)}
    assert used > set(APPS) and len(lines()) > 10


def test_the_intervals_in_readme_are_of_the_shares_in_its_table() -> None:
    text, count = (ROOT / "README.md").read_text(encoding="utf-8"), {"sums": 57, "products": 22}
    shown = {name: re.findall(r"([.\d]+)→([.\d]+)", text[text.index(f"\n{name}") :])[:4] for name in (" ada", " bell")}
    gains = re.findall(r"\+(\S+) \((\S+) to (\S+)\)\s+on (\w+)", text)
    held_out = [("sums", shown[" ada"][1]), ("products", shown[" ada"][3])]
    held_out += [("sums", shown[" bell"][3]), ("products", shown[" bell"][1])]
    for (env, shares), (gain, low, high, named) in zip(held_out, gains, strict=True):
        n = count[env]
        before, after = (round(float(share) * n) / n for share in shares)
        expected = (after - before, *independent_interval(before, n, after, n, Z_95))
        assert named == env and [float(x) for x in (gain, low, high)] == [round(x, 2) for x in expected]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_has_the_subcommand_and_the_options_that_it_is_given(page: str) -> None:
    for words in lines(page):
        if Path(words[0]).name not in APPS:
            continue
        command: Any = get_command(APPS[Path(words[0]).name])
        for name in words[1:]:
            if not hasattr(command, "commands") or name.startswith("-"):
                break
            command = command.commands[name]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        known |= {"--dir"} if isinstance(command, DirectoryCommand) else set[str]()
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= known or command.context_settings.get("allow_extra_args"), words


@pytest.mark.parametrize("page", PAGES)
def test_every_target_of_make_exists(page: str) -> None:
    used = {words[1] for words in lines(page) if words[0] == "make" and len(words) > 1}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert used <= targets


def test_commands_without_a_path_come_after_the_line_that_puts_them_on_the_path() -> None:
    bare = [words[0] in APPS for words in lines()]
    activated = lines().index(["make", "env", "&&", ".", ".venv/bin/activate"])
    assert bare.index(True) > activated


def test_two_nodes_are_never_given_one_directory() -> None:
    joins = [words for words in lines() if words[:2] == ["swarm", "join"]]
    directories = [words[3] for words in joins]
    assert len(set(directories)) == len(directories) == 3


def test_the_sample_of_a_run_lists_the_invariants_that_a_run_prints() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())  # long lines of it are wrapped
    printed = [f" ok {verdict.name}" for verdict in Invariants().verdicts()]
    places = [text.find(line) for line in printed]
    assert -1 not in places and places == sorted(places), printed
    assert text.count(" ok ") == len(printed)
