"""docs/commands.md says what `--help` says."""

from pathlib import Path

from swarm.cli.commands_page import markdown

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_every_program_and_every_command_in_a_group_is_there() -> None:
    titles = {line.strip("#` ") for line in markdown().splitlines() if line.startswith("##")}
    assert {"swarm train", "swarm keys new", "swarm-node start", "swarm-coordinator rotate"} < titles
