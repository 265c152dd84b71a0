"""Dialogue with a scripted user, who must be asked for what is missing before a form can be filled in.

Invariant: the user answers a question with one value, that of the slot named first, so that a question about everything
is worth no more than a question about one slot; a call with every slot of the form ends the episode.
"""

import random
import re
from typing import Any, Final

from swarm.config import EnvironmentConfig
from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.environments.params import Params, verifier_name
from swarm.environments.tool_calls import render_call
from swarm.episode import OUTCOME, Action, Actions, Message, ToolCall, Transition, TurnStatus

TOOL: Final = "book"
_MAX_QUESTION_CHARS: Final = 120  # a question has room, and little else beside it has
_VALUES: Final = {
    "name": "Abbot Baker Cook Dyer Fisher Glover Hunter Joiner Knight Mason Miller Porter Smith Tailor Weaver Wood",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "time": "12:00 13:00 14:00 17:00 18:00 19:00 20:00 21:00",
    "guests": "2 3 4 5 6 7 8 9",
    "place": "window garden bar corner terrace hall balcony cellar",
    "food": "fish pizza soup curry pasta salad noodles stew",
}
_SAID: Final = {
    "name": "My name is {}.",
    "day": "It is for {}.",
    "time": "At {}.",
    "guests": "We are {}.",
    "place": "We want to sit here: {}.",
    "food": "We want to eat {}.",
}
_ASKED: Final = re.compile(r"\b(name|day|time|guests|place|food)\b", re.IGNORECASE | re.ASCII)


class DialogueEnvironment(NumberedEnvironment):
    """Booking a table for a user who leaves things out.

    Params: `slots` (4: number of slots of the form, in the order name, day, time, guests, place, food), `missing` (2:
    slots that the user leaves out), `cost` (0.02: each turn but the last earns minus this), `max_turns` (missing + 4).
    Actions: a question with the word of a slot, or a call of `book` with all slots, which ends the episode. Rewards:
    outcome 1 for the right form; `slots` the share of missing slots that are right; `brief` for a right form the number
    of missing slots over the number of questions, at most 1, for any other form 0.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Reads the parameters. Raises ConfigError for an unknown one, or a value out of its bounds."""
        params = Params(config)
        self._slots = params.integer("slots", 4, 2, len(_VALUES))
        self._missing = params.integer("missing", 2, 1, self._slots)
        self._cost = params.number("cost", 0.02, 0.0, 0.1)
        self.max_turns = params.turns(self._missing + 4)
        self.signals = frozenset({"turn_rewards", "state_keys", "reward_parts"})
        params.finish()
        super().__init__(config, verifier_name(config, 2))

    def build(self, task_id: int) -> Problem:
        """Draws a form, and the slots that the user leaves out."""
        source = random.Random(f"{self.config.seed}:{task_id}")
        form = {slot: source.choice(_VALUES[slot].split()) for slot in list(_VALUES)[: self._slots]}
        missing = sorted(source.sample(sorted(form), self._missing))
        told = " ".join(_SAID[slot].format(value) for slot, value in form.items() if slot not in missing)
        example = render_call(ToolCall(name=TOOL, arguments=dict.fromkeys(form, "...")))
        return Problem(
            question=(
                "You book tables. Ask the guest for what is missing, one thing in a turn, such as: What is the name? "
                f"When you know everything, call\n{example}\n\nGuest: I want to book a table. {told}".strip()
            ),
            reference=render_call(ToolCall(name=TOOL, arguments=form)),
            entry=(form, missing),
            initial_state=f"{form} {missing}",
        )

    def begin(self, problem: Problem) -> "Booking":
        """A new try, before the first question."""
        form, missing = problem.entry
        return Booking(form, missing, self._cost)

    def demonstration(self, task_id: int) -> Actions:
        """Actions that earn every reward in full. Raises LookupError for a task out of range."""
        problem = self.problem(task_id)
        _, missing = problem.entry
        return (*(f"What is the {slot}?" for slot in missing), problem.reference)


class Booking:
    """One try: questions to the user, then a call with the form."""

    def __init__(self, form: dict[str, str], missing: list[str], cost: float) -> None:
        self._form = form
        self._missing = missing
        self._cost = cost
        self._told: set[str] = set()
        self._num_questions = 0

    def step(self, action: Action) -> Transition:
        """Answers a question or a wrong call as the user; a call of `book` with all slots ends the episode."""
        if action.is_malformed:
            return self._say("I cannot read that.", TurnStatus.MALFORMED)
        if not action.calls:
            return self._answer(action.text)
        call, *others = action.calls
        if call.name != TOOL or others:
            return self._say(f"The only thing to call is {TOOL}, once.", TurnStatus.TOOL_ERROR)
        if set(call.arguments) != set(self._form):
            return self._say(f"{TOOL} takes {', '.join(self._form)}.", TurnStatus.TOOL_ERROR)
        right = {slot for slot, value in self._form.items() if _text(call.arguments[slot]) == value.lower()}
        is_right = len(right) == len(self._form)
        rewards = {
            OUTCOME: float(is_right),
            "slots": len(right.intersection(self._missing)) / len(self._missing),
            "brief": is_right * min(1.0, len(self._missing) / max(1, self._num_questions)),
        }
        return Transition(is_end=True, rewards=rewards, state_key="end")

    def _answer(self, question: str) -> Transition:
        self._num_questions += 1
        asked = _ASKED.search(question) if len(question) <= _MAX_QUESTION_CHARS else None
        slot = asked[1].lower() if asked else ""
        if slot not in self._form:
            return self._say("I do not understand. What do you want to know?", TurnStatus.OK)
        self._told.add(slot)
        return self._say(_SAID[slot].format(self._form[slot]), TurnStatus.OK)

    def _say(self, text: str, status: TurnStatus) -> Transition:
        messages = (Message(role="user", content=text),)
        key = " ".join(sorted(self._told))
        return Transition(messages=messages, status=status, reward=-self._cost, state_key=key)


def _text(value: Any) -> str:
    """A value of the form as lower-case text, for a comparison; empty for all but short texts and small numbers."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**6:
        return str(value)
    return value.strip().lower() if isinstance(value, str) and len(value) < 100 else ""
