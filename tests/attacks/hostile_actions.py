"""Actions that no environment may pay or stumble over: long, deep, mistyped and many calls, and hostile answers.

Invariant: every action is made without knowledge of an environment's state but for its right answer.
"""

import json
import random
from typing import Final

from swarm.environments.tool_calls import CLOSING, OPENING, render_call
from swarm.episode import ToolCall
from tests.attacks.hostile_answers import hostile_answers

_VALUES: Final = (
    "1" * 60, "9" * 100_000, "9" * 12 + ("*" + "9" * 12) * 14, "(" * 100_000, "-" * 199 + "1",
    "(" * 99 + "1" + ")" * 99, "9**9**9**9", "1/0", "0/0", "1e999", "nan", "\u0661+\u0662", "\uff11\uff12", "\u00b2",
    "__import__('os')", "1 if 1 else 2", "1(2)", "1_0", "0x10", "007", "1;2", "\x00", "\ud800", "", " " * 50_000,
    "a" * 50_000 + "!", "../../etc/passwd", "*", "%s", 0, -1, 10**400, 1e308, True, None, [], {}, [[[]]],
    {"a": {"b": []}}, ["x"] * 5000, [None], {"": ""},
)  # fmt: skip


def hostile_actions(
    names: dict[str, tuple[str, ...]], question: str, right: str, others: list[str], seed: int, count: int
) -> list[str]:
    """Texts of turns, in the order of a seed.

    Args:
        names: tools of the environment and their arguments.
        question: the task's last message.
        right: its right answer as text.
        others: right answers of other tasks.
        seed: of choice and order.
        count: of the hostile answers among them.
    """
    rng = random.Random(seed)
    names = names or {"search": ("query",)}
    texts: list[str] = [OPENING, CLOSING, OPENING * 1000, OPENING + "[" * 100_000, f"{OPENING}{{}}{CLOSING}"]
    texts += [f'{OPENING}{{"name": "x", "arguments": {{"a": NaN}}}}{CLOSING}', '{"a":' * 50_000 + "1" + "}" * 50_000]
    for tool, arguments in names.items():
        for value in _VALUES:
            filled: dict[str, object] = dict.fromkeys(arguments, value)
            texts.append(_call(tool, filled))
            texts.append(_call(tool, {**filled, rng.choice([*arguments, "x"]): rng.choice(_VALUES)}))
        texts.append(_call(tool, {}))
        texts.append(_call(tool, {f"x{index}": index for index in range(1000)}))
        texts.append(_call(tool, dict.fromkeys(arguments, right)) * 16)
        texts.append(_call(tool, dict.fromkeys(arguments, right)) * 400)
        texts.append(_call(tool, dict.fromkeys(arguments, question[:2000])))
    texts += [_call("no_such_tool", {"x": 1}), _call("__class__", {}), _call("step", {"action": "1"})]
    answers = hostile_answers(question, right, others, seed, count)
    texts += [*answers, " ".join(others), "\n".join(others), *(f"search {each}" for each in answers[:20])]
    rng.shuffle(texts)
    return texts


def _call(name: str, arguments: dict[str, object]) -> str:
    try:
        return render_call(ToolCall(name=name, arguments=arguments))
    except (ValueError, RecursionError):
        return json.dumps(name)
