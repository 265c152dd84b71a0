"""The fix that `swarm why` prints, taken word by word into node.toml, and whether the ailment is gone then."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks._ailing_node import count, run_nodes
from benchmarks._ailments_known import KNOWN
from swarm.config import NodeConfig, load_config
from swarm.events import Event, StepMade

LINE = re.compile(r"under \[(\w+)\] set (\w+) = ([^\s;]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mending:
    """An ailment whose printed fix is tried."""

    name: str  # of the ailment
    node: str = "node"  # whose configuration the fix changes
    together: tuple[str, ...] = ("node",)  # nodes that run afterwards, the one that was asked about last
    is_new: bool = False  # the fix says to begin anew
    said: str = ""  # the line, where the fix names no single one


MENDINGS = (
    Mending(name="answers are cut off at 2 tokens of 3"),
    Mending(name="learning rate 300 times too high", is_new=True),
    Mending(name="learning rate 100,000 times too low"),
    Mending(name="groups too old by the clock"),
    Mending(name="the group store is full"),
    Mending(
        name="a peer has another max_new_tokens",
        node="bell",
        together=("ada", "bell"),
        said="generator.max_new_tokens=12",
    ),
    Mending(name="a trainer that does not publish", node="ada", together=("ada", "bell"), said="weights.publish=true"),
    Mending(
        name="all peers are newcomers", node="both", together=("ada", "bell"), said='entry.established="everybody"'
    ),
)


def override(fix: str, said: str) -> str:
    """KEY=VALUE of the line that the fix prints. Raises ValueError where it prints none."""
    found = LINE.search(fix)
    if found is None:
        raise ValueError(f"no line in: {fix}")
    return said or f"{found[1]}.{found[2]}={found[3]}"


async def mend(mending: Mending, folder: Path, ask: Callable[[Path], tuple[str, str]]) -> tuple[str, str, str]:
    """Plants, asks, does what is said, runs and asks again.

    Args:
        folder: of its own.
        ask: name and fix of what is found first.

    Returns:
        What was found, the line that was changed, and what is found afterwards.
    """
    (ailment,) = [each for each in KNOWN if each.name == mending.name]
    directory = await ailment.plant(folder)
    name, fix = ask(directory)
    line = mending.said or override(fix, "")
    configs: list[NodeConfig] = []
    for node in mending.together:
        changes = [line] if mending.node in (node, "both") else []
        configs.append(load_config(NodeConfig, folder / node / "node.toml", changes))
        if configs[-1].directory.kind == "dht":  # the first node has a new address
            configs[-1] = configs[-1].model_copy(
                update={"directory": configs[-1].directory.model_copy(update={"bootstrap": ()})}
            )
        if mending.is_new:
            shutil.rmtree(folder / node)
    is_generator = len(configs[-1].roles) == 1
    until = _has_groups if is_generator else count(StepMade, 25, len(configs) - 1)
    await run_nodes(configs, until)
    after, _ = ask(configs[-1].dir)
    return name, line, after


def _has_groups(daemons: list, _: list[list[Event]]) -> bool:  # type: ignore[type-arg]
    """The generator made groups for its trainer."""
    return daemons[-1].agent.own_groups.num_put >= 8
