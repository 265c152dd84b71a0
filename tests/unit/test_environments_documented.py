"""docs/environments.md says what the environments do: its examples are played, and its code is run."""

import os
import re
from pathlib import Path
from typing import Any, get_args

from swarm.config import EnvironmentConfig
from swarm.environments.determinism import differences
from swarm.environments.load import build_environment
from swarm.environments.replay import replay
from swarm.episode import Actions
from swarm.plugins import EXTRAS

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
BEGIN, END = "<!-- examples -->\n", "<!-- end of examples -->"
EXAMPLES: tuple[tuple[str, dict[str, Any], Actions], ...] = (
    ("calculator", {}, ()),
    ("calculator", {"call": "line", "operations": "+"}, ()),
    ("retry", {"inner": {"kind": "reasoning_gym", "dataset": "chain_sum"}, "hint": "order"}, ("100", "300", "{right}")),
    ("retry", {"inner": {"kind": "char", "dataset": "reverse"}}, ("wrev", "{right}")),
    ("retry", {"inner": {"kind": "reasoning_gym", "dataset": "chain_sum"}, "example": "chat"}, ()),
    ("look_up", {}, ()),
    ("look_up", {"style": "char"}, ()),
    ("grid_world", {}, ("up", "right", "down", "down")),
    ("grid_world", {"style": "char", "keys": 1}, ()),
    ("apps", {}, ()),
    ("dialogue", {}, ()),
    ("nim", {}, ("a1", "c2", "{right}")),
    ("nim", {"style": "char", "heaps": 2}, ()),
    ("notes", {"parts": 2}, ()),
    ("notes", {"parts": 2, "style": "char"}, ()),
    ("code", {}, ("def f(xs):\n    return ys", "def f(xs):\n    return 0", "{right}")),
)


def example(kind: str, params: dict[str, Any], actions: Actions) -> str:
    """A whole episode of task 3 as text."""
    environment = build_environment(EnvironmentConfig(name="example", kind=kind, params=params))  # type: ignore[arg-type]
    right = environment.reference(3)
    played: Actions = tuple(each.format(right=right) for each in actions)
    played = played or environment.demonstration(3)  # type: ignore[attr-defined]
    outcome = replay(environment, 3, played)
    lines = [f"{message.role}: {message.content}" for message in environment.task(3).messages]
    here = 0
    for action, transition in zip(played, outcome.transitions, strict=True):
        status = "" if transition.status == "ok" else f"   [{transition.status}]"
        earned = f"   [{transition.reward:+.2f}]" if transition.reward else ""
        lines += [f"model: {action}{status}{earned}"]
        lines += [""] * (transition.conversation != here)
        here = transition.conversation
        lines += [f"{message.role}: {message.content}" for message in transition.messages]
    rewards = ", ".join(f"{name} {value:g}" for name, value in outcome.rewards.items())
    title = ", ".join(f"{name} = {value}" for name, value in params.items())
    return (
        f"### `{kind}`{' with ' + title if title else ''}\n\n````text\n"
        + "\n".join([*lines, f"rewards: {rewards}"])
        + "\n````\n"
    )


def test_the_examples_are_what_the_environments_do() -> None:
    page = PAGE.read_text(encoding="utf-8")
    made = "\n" + "\n".join(example(*each) for each in EXAMPLES) + "\n"
    before, _, rest = page.partition(BEGIN)
    shown, _, after = rest.partition(END)
    if os.environ.get("SWARM_WRITE_DOCS"):
        PAGE.write_text(before + BEGIN + made + END + after, encoding="utf-8")
        shown = made
    assert shown == made, "SWARM_WRITE_DOCS=1 python -m pytest tests/unit/test_environments_documented.py"


def test_every_kind_and_parameter_has_its_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = {row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `")}
    assert set(rows) == set(get_args(EnvironmentConfig.model_fields["kind"].annotation))
    swarm = Path(__file__).parents[2] / "swarm"
    for kind in ("calculator", "retry", "look_up", "grid_world", "apps", "dialogue", "code", "nim", "notes"):
        folder = "extras/environments" if kind in EXTRAS else "environments"
        code = (swarm / folder / f"{kind}.py").read_text()
        read = re.findall(r'params\.(?:integer|number|choice|text)\("(\w+)"', code)
        missing = [name for name in [*read, "max_turns"] if f"`{name}`" not in rows[kind]]
        assert read and not missing, (kind, missing)


async def test_the_example_of_several_turns_plays_and_is_repeatable(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8").partition(END)[2], re.DOTALL)
    (tmp_path / "guess.py").write_text(code, encoding="utf-8")
    config = EnvironmentConfig(name="guess", kind="plugin", dataset=f"{tmp_path / 'guess.py'}:Guess")
    guess = build_environment(config)
    right = int(guess.reference(5))
    outcome = replay(guess, 5, (str(right - 1), str(right + 1), "no", str(right)))
    assert [message.content for each in outcome.transitions for message in each.messages] == [
        "higher",
        "lower",
        "higher",
    ]
    assert outcome.reward == 1.0 and len(replay(guess, 5, ("0",) * 9).transitions) == 6
    assert await differences([config]) == {}
