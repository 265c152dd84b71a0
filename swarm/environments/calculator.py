"""Arithmetic with a calculator: the model may call it, reads the result, and answers in plain text.

Invariant: a turn is one call or the answer, and the answer is one number and nothing else, so that neither listing
numbers nor many calls in a turn pays; an expression takes time linear in its length, and none reaches `eval`.
"""

import random
import re
from dataclasses import replace
from typing import Any, Final

from swarm.config import EnvironmentConfig
from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.environments.formulas import exact_value
from swarm.environments.params import Params, verifier_name
from swarm.environments.tool_calls import render_call
from swarm.episode import OUTCOME, Action, Actions, Message, ToolCall, Transition, TurnStatus

TOOL: Final = "calculator"
_MAX_EXPRESSION_CHARS: Final = 200
_MAX_RESULT_CHARS: Final = 60
_LINE: Final = re.compile(r"CALC\(([^\n]{1,200})\)\.?", re.ASCII)
_ANSWER: Final = re.compile(r"(?:answer: ?)?([-+]?[0-9]{1,40})\.?", re.IGNORECASE | re.ASCII)


class CalculatorEnvironment(NumberedEnvironment):
    """Sums, differences and products of random numbers.

    Params: `digits` (2) of each number, `operations` ("+*": those drawn from), `terms` (2), `call` (json: a tool call;
    line: the text `CALC(12 + 34)`, which small models find), `max_turns` (4). Rewards: outcome 1 for the right answer,
    with or without a call; `called` 1 if the tool has given the right value for an expression with an operation in it.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Reads the params. Raises ConfigError for a param that is unknown or out of bounds."""
        params = Params(config)
        self._digits = params.integer("digits", 2, 1, 6)
        self._operations = params.text("operations", "+*", "+-*")
        self._terms = params.integer("terms", 2, 2, 6)
        self._is_line = params.choice("call", "json", ("json", "line")) == "line"
        self.max_turns = params.turns(4)
        self.signals = frozenset({"state_keys", "tool_calls", "reward_parts"})
        params.finish()
        super().__init__(config, verifier_name(config, 1))

    def build(self, task_id: int) -> Problem:
        """Problem with a random expression that differs from the worked example."""
        example = self._draw(random.Random(f"{self.config.seed}:example"))
        source = random.Random(f"{self.config.seed}:{task_id}")
        asked = self._draw(source)
        while asked == example:  # its answer is in the prompt
            asked = self._draw(source)
        return Problem(question=f"{asked} = ?", reference=value_of(asked) or "", entry=example, initial_state=asked)

    def opening(self, problem: Problem) -> tuple[Message, ...]:
        """Instructions and a worked example, the same in every task, then the chat of the base class."""
        example: str = problem.entry
        system = "You compute with the calculator. Call it first, then answer with its result."
        chat = (
            ("system", system),
            ("user", f"{example} = ?"),
            ("assistant", self._call(example)),
            (self._role, value_of(example) or ""),
            ("assistant", f"Answer: {value_of(example)}"),
        )
        return (*(Message(role=role, content=text) for role, text in chat), *super().opening(problem))

    def begin(self, problem: Problem) -> "Calculation":
        """Starts an episode, without any calls so far."""
        return Calculation(problem.reference, self._role, is_line=self._is_line)

    @property
    def _role(self) -> str:
        """Role of the messages with results: user if calls are lines of text, else tool."""
        return "user" if self._is_line else "tool"

    def _call(self, expression: str) -> str:
        if self._is_line:
            return f"CALC({expression})"
        return render_call(ToolCall(name=TOOL, arguments={"expression": expression}))

    def demonstration(self, task_id: int) -> Actions:
        """Actions that earn every reward. Raises as `problem`."""
        problem = self.problem(task_id)
        return self._call(problem.initial_state), f"Answer: {problem.reference}"

    def _draw(self, source: random.Random) -> str:
        least, most = (10 ** (self._digits - 1), 10**self._digits - 1) if self._digits > 1 else (2, 9)
        text = str(source.randint(least, most))
        for _ in range(self._terms - 1):
            text += f" {source.choice(self._operations)} {source.randint(least, most)}"
        return text


class Calculation:
    """One episode: calls of the calculator, then the answer."""

    def __init__(self, right: str, role: str, *, is_line: bool) -> None:
        self._right = right
        self._role = role
        self._is_line = is_line
        self._last = ""  # newest reply of the tool
        self._is_called = False

    def step(self, action: Action) -> Transition:
        """Replies to a call with its result or an error; plain text is the answer and ends the episode."""
        if action.is_malformed:
            return self._say("error: the call cannot be read", TurnStatus.MALFORMED)
        line = _LINE.fullmatch(action.text.strip()) if self._is_line and len(action.text) < 300 else None
        if line is not None:
            return replace(self._evaluate(line[1]), num_calls=1)
        if not action.calls:
            value = number_in(action.text)
            rewards = {OUTCOME: float(value == self._right), "called": float(self._is_called)}
            status = TurnStatus.OK if value else TurnStatus.MALFORMED
            return Transition(is_end=True, rewards=rewards, status=status, state_key="end")
        call, *others = action.calls
        if others:
            return self._say("error: one call at a time", TurnStatus.TOOL_ERROR)
        expression: Any = call.arguments.get("expression")
        if call.name != TOOL:
            return self._say(f"error: the only tool is {TOOL}", TurnStatus.TOOL_ERROR)
        return self._evaluate(expression if isinstance(expression, str) else "")

    def _evaluate(self, expression: str) -> Transition:
        value = value_of(expression)
        if value is None:
            return self._say("error: expected an expression such as 12 + 34", TurnStatus.TOOL_ERROR)
        has_operation = bool(re.search(r"[0-9)]\s*[-+*/]", expression))
        self._is_called = self._is_called or (value == self._right and has_operation)
        return self._say(value, TurnStatus.OK)

    def _say(self, text: str, status: TurnStatus) -> Transition:
        self._last = text
        key = f"{'called' if self._is_called else 'open'}:{self._last}"
        return Transition(messages=(Message(role=self._role, content=text),), status=status, state_key=key)


def value_of(expression: str) -> str | None:
    """Value of an expression over whole numbers with + - * / and brackets: `46`, or `7/2` if it is no whole number.

    None for other texts, texts over 200 characters, a division by zero, and a numerator over 60 or denominator over 9
    digits.
    """
    if len(expression) > _MAX_EXPRESSION_CHARS:
        return None
    exact = exact_value(expression)
    if exact is None or abs(exact[0].numerator) >= 10**_MAX_RESULT_CHARS or exact[0].denominator >= 10**9:
        return None
    return str(exact[0])


def number_in(answer: str) -> str | None:
    """The whole number in an answer with at most `Answer:` before it and a period after it, else None."""
    found = _ANSWER.fullmatch(answer.strip()) if len(answer) < 100 else None
    return str(int(found[1])) if found else None
