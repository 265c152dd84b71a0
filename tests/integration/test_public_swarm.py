"""The public swarm of docs/operating.md, copied from there: the file, the commands in their order, a stranger.

What is put in place of the page's words: loopback addresses and free ports, the tiny model, and a task of its letters.
"""

import asyncio
import os
import re
import shlex
import socket
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
from waits import written

from swarm.config import CoordinatorConfig, NodeConfig, load_config, parse_config
from swarm.environments.load import build_environment
from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.simulate.local.processes import Process

PAGE: Final = Path(__file__).parents[2] / "docs" / "operating.md"
MODULES: Final = {"swarm": "swarm.cli.main", "swarm-node": "node.cli", "swarm-coordinator": "coordinator.cli"}
NODE_ID: Final = Identity.from_seed(bytes(32)).node_id
_BLOCK: Final = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.M | re.S)
_TASKS: Final = re.compile(r"^\[\[node\.environments\]\].*?(?=^\[node\.)", re.M | re.S)
_TASK: Final = '[[node.environments]]\nname = "sort"\nkind = "char"\ndataset = "sort"\n\n'


def blocks(text: str) -> tuple[str, str, list[str]]:
    """coordinator.toml, what first/node.toml has, and the commands of each `sh` block of the page's section."""
    section = text.partition("## A public swarm")[2].partition("\n## ")[0]
    found = _BLOCK.findall(section)
    (coordinator,) = (body for _, info, body in found if info.strip() == 'title="coordinator.toml"')
    (node,) = (body for kind, info, body in found if kind == "toml" and not info)
    return coordinator, node, [body.replace("\\\n", " ") for kind, _, body in found if kind == "sh"]


def on_loopback(text: str) -> str:
    """The page with this machine's addresses, and a free port for each of its own."""
    text = text.replace("/dns4/swarm.example.org", "/ip4/127.0.0.1").replace("swarm.example.org", "127.0.0.1")
    for port in ("7700", "7701", "7800", "7801", "7880"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            text = text.replace(port, str(probe.getsockname()[1]))
    return text.replace("0.0.0.0", "127.0.0.1")


def test_the_file_is_valid_as_it_stands_and_its_tasks_can_be_built(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.toml"
    text, _, _ = blocks(PAGE.read_text(encoding="utf-8"))
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"next_key|FIRST_NODE"):
        load_config(CoordinatorConfig, path)
    path.write_text(text.replace("FIRST_NODE", NODE_ID).replace("NEXT_KEY", NODE_ID))
    config = load_config(CoordinatorConfig, path)
    assert config.advertise == "swarm.example.org:7800" and config.node.entry.members == (NODE_ID,)
    for section in config.node.environments:
        build_environment(section)


class Operator:
    """Somebody who types the page in a folder; what stays in a terminal is a process of the test."""

    def __init__(self, swarm: Any) -> None:
        self._swarm = swarm
        self._folder: Path = swarm.directory
        self.link = ""

    async def type(self, commands: str) -> str:
        """Does the commands of a block; what they printed."""
        printed, before = "", list[str]()
        for line in commands.strip().splitlines():
            name, *arguments = shlex.split(line, comments=True)
            if "start" in arguments or ("join" in arguments and "--only-write" not in arguments):
                printed += await self._shell(before)
                before = []
                await self._stay(name, [self.link if each == "LINK" else each for each in arguments])
            else:
                before.append(line)
        return printed + await self._shell(before)

    async def _stay(self, name: str, arguments: list[str]) -> None:
        """Starts it with absolute paths, since the process is in another folder, and waits until it answers."""
        options = [each for each in ("--dir", "--config") if each in arguments]
        at = arguments.index(options[0]) + 1 if options else len(arguments) - 1  # a directory comes last
        path = self._folder / arguments[at]
        arguments[at] = str(path)
        ready, directory = "status.json", path if path.suffix == "" else path.parent
        if name == "swarm-coordinator":
            ready, directory = "coordinator.json", self._folder / name
        process: Process = self._swarm.process(directory.name, directory)
        await process.start(
            [MODULES[name], *arguments, *(["--set", f"dir={directory}"] if "start" in arguments else [])]
        )
        await written(directory / ready, process)

    async def _shell(self, lines: list[str]) -> str:
        """In bash, with the commands of this checkout."""
        if not lines:
            return ""
        python = shlex.quote(sys.executable)
        commands = [f'{name}() {{ {python} -m {module} "$@"; }}' for name, module in MODULES.items()]
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-euc",
            "\n".join([*commands, *lines]),
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(PAGE.parents[1])},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            printed, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, (printed + said).decode()
        return printed.decode()


@pytest.mark.asyncio(loop_scope="session")
async def test_what_the_page_says_brings_up_a_swarm_that_a_stranger_joins(swarm: Any) -> None:
    file, of_first, commands = blocks(on_loopback(PAGE.read_text(encoding="utf-8")))
    file = _TASKS.sub(_TASK, file.replace('"smollm2"', '"tiny"'))
    (swarm.directory / "coordinator.toml").write_text(file)
    operator = Operator(swarm)
    for block in commands:
        operator.link = (await operator.type(block)).strip() or operator.link
    assert operator.link.startswith("swarm://127.0.0.1:")
    written = load_config(NodeConfig, swarm.directory / "first" / "node.toml")
    shown = parse_config(NodeConfig, tomllib.loads(of_first), "the page")
    for section in ("exchange", "directory"):
        for key in getattr(shown, section).model_fields_set:
            assert getattr(getattr(written, section), key) == getattr(getattr(shown, section), key), key
    first, stranger = swarm.processes["first"], swarm.processes["my-node"]
    await swarm.until(lambda: stranger.status().get("num_external_used", 0) > 0, "the stranger learned nothing")
    await swarm.until(lambda: first.status().get("num_external_used", 0) > 0, "nobody learned from the stranger")
    node_id = stranger.status()["node_id"]
    assert first.status()["standing"][node_id] == "newcomer"
