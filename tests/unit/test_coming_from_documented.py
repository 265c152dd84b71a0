"""docs/coming_from.md: the three rewards agree, and our command and the keys that the page names exist."""

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")


def functions() -> list[Any]:
    """The reward functions of the page, in order: of TRL, of verl, ours."""
    found: list[Any] = []
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        for node in ast.parse(block).body:
            if isinstance(node, ast.FunctionDef):
                names: dict[str, Any] = {}
                exec(compile(ast.Module([node], []), "page", "exec"), names)
                found.append(names[node.name])
    return found


@pytest.mark.parametrize(("answer", "worth"), [("It is 42.", 1.0), ("42", 1.0), ("", 0.0), ("42 or 43", 0.0)])
def test_the_three_rewards_agree(answer: str, worth: float) -> None:
    trl, verl, ours = functions()
    assert trl(completions=[[{"role": "assistant", "content": answer}]], answer=["42"], question=["?"]) == [worth]
    assert verl("quiz", answer, "42") == ours("What is 17 + 25?", answer, "42") == worth


def test_our_command_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"sort:{a}{b}=", "answer": "".join(sorted(a + b))} for a in "abcd" for b in "efgh"]
    Path("quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    *_, source = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    Path("my.py").write_text(source)
    (command,) = re.findall(r"^swarm (train quiz .*)$", PAGE, re.MULTILINE)
    arguments = shlex.split(command.replace("-m smollm2", "-m tiny"))
    result = CliRunner().invoke(app, [*arguments, "--only-write"])
    assert result.exit_code == 0 and "worth 1" in result.output, result.output
