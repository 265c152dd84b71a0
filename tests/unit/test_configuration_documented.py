"""docs/configuration.md agrees with the models: it is current, its defaults are theirs, its bounds hold."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swarm.config import NodeConfig
from swarm.config.reference_page import markdown

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Section ("" above the first), key, type and bounds, default of each key of node.toml."""
    section = ""
    for line in markdown().partition("## coordinator.toml")[0].splitlines():
        if line.startswith("## ["):
            section = line.strip("#[] ")
        if line.startswith("| `"):
            key, words, default, _ = re.split(r"(?<!\\) \| ", line.removeprefix("| "), maxsplit=3)
            yield section, key.strip("`"), words, default.strip("`")


def in_place(section: str, key: str, value: object) -> dict[str, Any]:
    if section == "environments":
        return {section: [{"name": "a", "kind": "char", key: value}]}
    return {section: {key: value}} if section else {key: value}


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == markdown(), "run `make docs`"


def test_every_key_is_there_with_its_default() -> None:
    known = NodeConfig.model_validate({"environments": [{"name": "a", "kind": "char"}]}).model_dump(mode="json")
    found: dict[str, Any] = {}
    for section, key, _, default in rows():
        value = {"name": "a", "kind": "char"}[key] if default == "required" else tomllib.loads(f"v = {default}")["v"]
        (found.setdefault(section, {}) if section else found)[key] = value
    found["environments"] = [found["environments"]]
    assert found.pop("serve.keys") == {"name": "a", "learn": False}  # of each key, of which there are none
    found["serve"]["keys"] = []
    assert found == known


def test_every_bound_is_the_one_that_is_enforced() -> None:
    num_bounds = 0
    for section, key, words, _ in rows():
        step = 1 if words.startswith("whole") else 0.001
        for name, number in re.findall(r"number (above|of at least|from) ([\d_]+)", words):
            least = float(number) + (step if name == "above" else 0)
            assert not is_refused(section, key, words, least) and is_refused(section, key, words, least - step), key
            num_bounds += 1
        for number in re.findall(r"number from \S+ to ([\d_]+)", words):
            most = float(number)
            assert not is_refused(section, key, words, most) and is_refused(section, key, words, most + step), key
            num_bounds += 1
    assert num_bounds > 60


def is_refused(section: str, key: str, words: str, number: float) -> bool:
    """For itself, and not because of another key."""
    value = int(number) if words.startswith("whole") else number
    try:
        NodeConfig.model_validate(in_place(section, key, {"a": value} if words.startswith("table") else value))
    except ValidationError as error:
        return any(key in each["loc"] for each in error.errors())
    return False
