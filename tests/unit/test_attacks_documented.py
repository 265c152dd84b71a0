"""docs/attacks.md: every row names tests and mutants that exist, or says that nothing holds."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from run_mutants import read_mutants

ROOT = Path(__file__).parents[2]
BROKEN_OR_PARTLY = [*range(1, 20), *range(21, 25), 28, 31, *range(33, 120)]
FAULTS = [f"F{number}" for number in range(1, 14)]


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@cache
def functions_of(file: str) -> frozenset[str]:
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(ast.parse(text_of(file))) if isinstance(node, definitions))


def rows() -> dict[str, list[str]]:
    """Number -> attack, what holds, tests, mutants."""
    lines = text_of("docs/attacks.md").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| F?\d+ ", line)]
    return {number: rest for number, *rest in cells}


ROWS = rows()
MUTANTS = {mutant.name: {f"tests/{test.partition('[')[0]}" for test in mutant.red} for mutant in read_mutants()}


def test_every_attack_and_every_fault_has_a_row() -> None:
    assert list(ROWS) == [*map(str, BROKEN_OR_PARTLY), *FAULTS]


@pytest.mark.parametrize("number", ROWS)
def test_the_tests_and_mutants_of_a_row_exist(number: str) -> None:
    _, holds, tests, mutants = ROWS[number]
    named = [name.split("::") for name in re.findall(r"`([^`]+)`", tests)]
    if not named:
        assert "**not defended**" in holds and mutants == "-"
        return
    missing = [f"{file}::{test}" for file, test in named if test not in functions_of(file)]
    assert not missing, missing
    words = re.findall(r"`([^`]+)`", mutants)
    assert words, "a test that was never red says little"
    for word in words:  # a mutant of one of these tests; or a rival within one, which the attack beats
        is_of_row = bool(MUTANTS.get(word, set()) & {"::".join(name) for name in named})
        assert is_of_row or any(word in text_of(file) for file, _ in named), word
