"""The source of a reward function that `swarm.train` copies is that of the function, and needs nothing around it."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from node.python_api.training import _source
from swarm.errors import ConfigError

SCORE = """import re
calls = 0


def plain(question, answer, reference):
    import math

    return float(sorted((each for each in answer), key=lambda each: each) == list(reference)) + math.pi * 0


def stateful(question, answer, reference):
    global calls
    calls += 1
    return calls % 2


def outside(question, answer, reference):
    return re.match(reference, answer) is not None
"""


def load(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("mine", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_function_that_uses_its_program_is_refused_by_the_names_of_what_it_uses(tmp_path: Path) -> None:
    mine = load(tmp_path / "mine.py", SCORE)
    assert _source(mine.plain).startswith("def plain(")
    for function, name in ((mine.stateful, "calls"), (mine.outside, "re")):
        with pytest.raises(ConfigError, match=rf"uses {name} of the program around it"):
            _source(function)


@pytest.mark.parametrize("change", [("math.pi * 0", "math.pi * 1"), ("def plain(", "def other(")])
def test_a_file_that_was_edited_after_the_definition_is_not_copied(tmp_path: Path, change: tuple[str, str]) -> None:
    """Else the training would score by a function that the program never had."""
    mine = load(tmp_path / "mine.py", SCORE)
    (tmp_path / "mine.py").write_text(SCORE.replace(*change))
    with pytest.raises(ConfigError, match="edited after the function was defined"):
        _source(mine.plain)
