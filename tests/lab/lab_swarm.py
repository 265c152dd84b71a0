"""A swarm of real daemons in the laboratory: a coordinator on its "internet", and nodes that join by link anywhere."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from swarm.events import KINDS as EVENT_KINDS
from swarm.events import GroupAdmitted
from tests.lab.laboratory import MASQUERADE, ONLY_443, SHORT_MASQUERADE, STATEFUL, Laboratory
from tests.waits import HANG_S

KINDS: Final = ("open", "nat", "short", "double", "only443", "firewall")
ADMITTED: Final = next(name for name, kind in EVENT_KINDS.items() if kind is GroupAdmitted)
COORDINATOR: Final = """
dir = "{dir}"
run_id = "lab"
listen = "{address}:443"
http_listen = "127.0.0.1:0"
[directory]
listen = "/ip4/{address}/tcp/7701"
[node.model]
source = "tiny"
[[node.environments]]
name = "reverse"
kind = "char"
dataset = "reverse"
[node.generator]
max_new_tokens = 8
[node.learner]
recipe = "grpo"
[node.replay]
local_groups = 2
external_groups = 2
"""


@dataclass
class LabNode:
    """A node that joined."""

    kind: str
    namespace: str
    directory: Path
    process: subprocess.Popen[bytes]
    began_s: float  # monotonic

    def status(self) -> dict[str, Any]:
        """Its newest status; empty before there is one."""
        try:
            return json.loads((self.directory / "status.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def admitted_from(self) -> Counter[str]:
        """Admitted groups by producer."""
        found = Counter[str]()
        with suppress(OSError):
            for line in (self.directory / "events.jsonl").read_text(encoding="utf-8").splitlines():
                event = json.loads(line) if line.endswith("}") else {}
                if event.get("kind") == ADMITTED:
                    found[event["producer"]] += 1
        return found


@dataclass
class LabSwarm:
    """The coordinator, and nodes in networks of their own.

    Example:
        with Laboratory() as lab, LabSwarm(lab, tmp_path) as swarm:
            node = swarm.join("nat")
            swarm.wait(lambda: node.status().get("num_admitted"), "a group is admitted")
    """

    lab: Laboratory
    folder: Path
    nodes: list[LabNode] = field(default_factory=list[LabNode])
    link: str = ""
    _num_networks: int = 0
    _building: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> "LabSwarm":
        self.coordinator = self.lab.host("coordinator")
        config, state = self.folder / "coordinator.toml", self.folder / "coordinator"
        address = self.lab.address_of(self.coordinator)
        config.write_text(COORDINATOR.format(dir=state, address=address), encoding="utf-8")
        self._coordinator = self._start(
            self.coordinator, "coordinator", "swarm-coordinator", "start", "--config", config
        )
        self.wait((state / "coordinator.json").exists, "the coordinator answers")
        self.link = json.loads((state / "coordinator.json").read_text(encoding="utf-8"))["link"]
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*(node.process for node in self.nodes), self._coordinator):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in (*(node.process for node in self.nodes), self._coordinator):
            try:
                process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def join(self, kind: str, name: str = "", *options: str) -> LabNode:
        """Pastes the link in a network of this kind, in a folder of its own."""
        name = name or kind
        return self.join_from(self.network(kind, name), kind, name, *options)

    def join_from(self, namespace: str, kind: str, name: str, *options: str) -> LabNode:
        """The same in a network that there is."""
        process = self._start(namespace, name, "swarm", "join", self.link, "--dir", self.folder / name, *options)
        node = LabNode(kind, namespace, self.folder / name, process, time.monotonic())
        self.nodes.append(node)
        return node

    def wait(self, holds: Callable[[], object], what: str) -> float:
        """Waits for a condition; returns how long it took."""
        began_s = time.monotonic()
        while not holds():
            if time.monotonic() - began_s > HANG_S:
                raise AssertionError(f"not within {HANG_S:g} s: {what}\n{self.logs()}")
            time.sleep(0.1)
        return time.monotonic() - began_s

    def logs(self) -> str:
        """The ends of what all of them wrote."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    def network(self, kind: str, name: str) -> str:
        """A new network of this kind, with a host in it."""
        with self._building:
            self._num_networks += 1
            return self._build(kind, name, self._num_networks)

    def _build(self, kind: str, name: str, number: int) -> str:
        if kind == "open":
            return self.lab.host(name)
        if kind == "firewall":
            return self.lab.routed(name, STATEFUL, subnet=number + 10)
        rules = {"short": SHORT_MASQUERADE, "only443": ONLY_443}.get(kind, MASQUERADE)
        return self.lab.behind_router(name, rules, home=number, is_double=kind == "double")

    def _start(self, namespace: str, name: str, command: str, *arguments: object) -> subprocess.Popen[bytes]:
        program = str(Path(sys.executable).parent / command)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                self.lab.command(namespace, [program, *map(str, arguments)]), stdout=log, stderr=log, env=environment
            )
