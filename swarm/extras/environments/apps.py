"""Small apps behind tool calls: mail, calendar and files, with a state that is checked at the end.

Invariant: the outcome depends on the changes of the state alone: the share of the required changes that were made, less
all other changes over the number of required ones, at least 0; no text of the model counts, and an episode ends with
the word done and nothing else. A turn makes at most 4 calls.
"""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from swarm.config import EnvironmentConfig
from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.environments.params import Params, verifier_name
from swarm.environments.tool_calls import render_call
from swarm.episode import OUTCOME, Action, Actions, Message, ToolCall, Transition, TurnStatus

MAX_CALLS_OF_TURN: Final = 4
_MAX_TEXT_CHARS: Final = 200
_PEOPLE: Final = "Ada Ben Cora Dan Eva Finn Gina Hugo Ida Jack Kate Leo"
_EVENTS: Final = "dentist swimming lunch concert class training market theatre haircut picnic lecture museum"
_FILES: Final = "notes list plan letter poem report draft recipe budget diary ideas words"
_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
KINDS: Final = ("tell", "save", "move", "clear")
_DONE: Final = re.compile(r"done\.?", re.IGNORECASE | re.ASCII)

Calls = tuple[ToolCall, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Desk:
    """Contents of the apps; a change replaces the whole value."""

    mails: tuple[tuple[str, str], ...]  # who wrote, and what
    sent: tuple[tuple[str, str], ...] = ()  # to whom, and what
    events: tuple[tuple[str, str, str], ...] = ()  # title, day, time
    files: tuple[tuple[str, str], ...] = ()  # name, text

    def items(self) -> Counter[tuple[str, ...]]:
        """All items that a call can change, with their counts."""
        named = (("sent", self.sent), ("event", self.events), ("file", self.files))
        return Counter((name, *each) for name, held in named for each in held)


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    """A desk, and the changes to make on it: as a text for the model and as calls."""

    desk: Desk
    text: str
    calls: Calls  # that do it

    def changes(self, desk: Desk) -> Counter[tuple[str, ...]]:
        """Items that `desk` has more than the errand's desk (`+`), and fewer (`-`), with their counts."""
        before, after = self.desk.items(), desk.items()
        made = Counter[tuple[str, ...]]()
        for sign, items in (("+", after - before), ("-", before - after)):
            made.update({(sign, *item): count for item, count in items.items()})
        return made


class AppsEnvironment(NumberedEnvironment):
    """Errands of two to four calls over mail, calendar and files.

    Params: `errand` (all, or one of tell, save, move, clear), `entries` (4: mails, events and files at the beginning,
    of each kind), `max_turns` (8). The turn `done` ends the episode. Rewards: outcome the share of required
    changes that were made, less other changes over the number of required ones, at least 0; `effects` the share alone;
    `tidy` 1 if a required change was made and no other. A turn earns the change of the outcome.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Reads the parameters. Raises ConfigError for an unknown one, or a value out of its bounds."""
        params = Params(config)
        self._errand = params.choice("errand", "all", ("all", *KINDS))
        self._entries = params.integer("entries", 4, 2, 12)
        self.max_turns = params.turns(8)
        self.signals = frozenset({"turn_rewards", "state_keys", "tool_calls", "reward_parts"})
        params.finish()
        super().__init__(config, verifier_name(config, 2))

    def build(self, task_id: int) -> Problem:
        """Draws a desk, and an errand on it."""
        source = random.Random(f"{self.config.seed}:{task_id}")
        errand = _errand(source, self._entries, source.choice(KINDS) if self._errand == "all" else self._errand)
        return Problem(
            question=f"{_explanation()}\n\nTask: {errand.text}",
            reference="\n".join(render_call(call) for call in errand.calls),
            entry=errand,
            initial_state=f"{errand.desk} {errand.text}",
        )

    def begin(self, problem: Problem) -> "DeskEpisode":
        """A new try at the errand, on the desk of the problem."""
        return DeskEpisode(problem.entry)

    def demonstration(self, task_id: int) -> Actions:
        """Actions that earn every reward in full. Raises LookupError for a task out of range."""
        return (*(render_call(call) for call in self.problem(task_id).entry.calls), "done")


def _errand(source: random.Random, count: int, kind: str) -> Errand:
    people, titles, names = (source.sample(each.split(), count) for each in (_PEOPLE, _EVENTS, _FILES))
    codes = [str(number) for number in source.sample(range(1000, 10_000), 2 * count)]
    times = [f"{hour}:00" for hour in source.sample(range(8, 22), count + 1)]
    events = tuple((title, source.choice(_DAYS), time) for title, time in zip(titles, times, strict=False))
    mails = [(who, f"The code is {code}.") for who, code in zip(people, codes, strict=False)]
    files = [(name, code) for name, code in zip(names, codes[count:], strict=True)]
    at = source.randrange(count)
    who, name, (title, _, time) = people[at], names[source.randrange(count)], source.choice(events)
    number = str(at + 1)
    match kind:
        case "tell":
            text = f"Send {who} a mail with the time of the {title}, such as 9:00, and nothing else in it."
            calls = (_call("calendar_list"), _call("mail_send", to=who, text=time))
        case "save":
            copy = f"copy{source.randrange(10, 100)}"
            text = f"Write the code that {who} has sent you into the file {copy}, and nothing else."
            written = _call("file_write", name=copy, text=codes[at])
            calls = (_call("mail_list"), _call("mail_read", number=number), written)
        case "move":
            day, later = source.choice(_DAYS), times[-1]
            files[names.index(name)] = (name, f"{title}: {day} {later}")
            text = f"The file {name} has the new day and time of the {title}. Move it in the calendar."
            removed, added = (
                _call("calendar_remove", title=title),
                _call("calendar_add", title=title, day=day, time=later),
            )
            calls = (_call("file_read", name=name), removed, added)
        case _:
            mails[at] = (who, f"Please delete the file {name}.")
            text = f"Do what {who} asks you by mail, then send {who} a mail with the number {codes[-1]} alone."
            read = (_call("mail_list"), _call("mail_read", number=number))
            calls = (*read, _call("file_delete", name=name), _call("mail_send", to=who, text=codes[-1]))
    return Errand(desk=Desk(mails=tuple(mails), events=events, files=tuple(files)), text=text, calls=calls)


def _call(tool: str, /, **arguments: str) -> ToolCall:
    return ToolCall(name=tool, arguments=arguments)


# --- tools: the desk after a call, and what it says --------------------------------------------------


class _RefusedCall(Exception):
    """Error of a tool call that the tool refuses; the message goes to the model."""


Tool = Callable[[Desk, dict[str, str]], tuple[Desk, str]]


def _mail_list(desk: Desk, _: dict[str, str]) -> tuple[Desk, str]:
    return desk, "\n".join(f"{number}: from {who}" for number, (who, _) in enumerate(desk.mails, 1))


def _mail_read(desk: Desk, given: dict[str, str]) -> tuple[Desk, str]:
    for number, (_, text) in enumerate(desk.mails, 1):
        if given["number"] == str(number):
            return desk, text
    raise _RefusedCall("no such mail")


def _mail_send(desk: Desk, given: dict[str, str]) -> tuple[Desk, str]:
    if given["to"] not in _PEOPLE.split():
        raise _RefusedCall("nobody has that name")
    return replace(desk, sent=(*desk.sent, (given["to"], given["text"]))), "sent"


def _calendar_list(desk: Desk, _: dict[str, str]) -> tuple[Desk, str]:
    return desk, "\n".join(f"{title}: {day} {time}" for title, day, time in desk.events) or "empty"


def _calendar_add(desk: Desk, given: dict[str, str]) -> tuple[Desk, str]:
    if any(title == given["title"] for title, _, _ in desk.events):
        raise _RefusedCall("there is an event of that title")
    return replace(desk, events=(*desk.events, (given["title"], given["day"], given["time"]))), "added"


def _calendar_remove(desk: Desk, given: dict[str, str]) -> tuple[Desk, str]:
    left = tuple(event for event in desk.events if event[0] != given["title"])
    if len(left) == len(desk.events):
        raise _RefusedCall("no such event")
    return replace(desk, events=left), "removed"


def _file_list(desk: Desk, _: dict[str, str]) -> tuple[Desk, str]:
    return desk, "\n".join(name for name, _ in desk.files) or "empty"


def _file_read(desk: Desk, given: dict[str, str]) -> tuple[Desk, str]:
    for name, text in desk.files:
        if name == given["name"]:
            return desk, text
    raise _RefusedCall("no such file")


def _file_write(desk: Desk, given: dict[str, str]) -> tuple[Desk, str]:
    others = tuple(file for file in desk.files if file[0] != given["name"])
    return replace(desk, files=(*others, (given["name"], given["text"]))), "written"


def _file_delete(desk: Desk, given: dict[str, str]) -> tuple[Desk, str]:
    left = tuple(file for file in desk.files if file[0] != given["name"])
    if len(left) == len(desk.files):
        raise _RefusedCall("no such file")
    return replace(desk, files=left), "deleted"


TOOLS: Final[dict[str, tuple[tuple[str, ...], Tool]]] = {
    "mail_list": ((), _mail_list),
    "mail_read": (("number",), _mail_read),
    "mail_send": (("to", "text"), _mail_send),
    "calendar_list": ((), _calendar_list),
    "calendar_add": (("title", "day", "time"), _calendar_add),
    "calendar_remove": (("title",), _calendar_remove),
    "file_list": ((), _file_list),
    "file_read": (("name",), _file_read),
    "file_write": (("name", "text"), _file_write),
    "file_delete": (("name",), _file_delete),
}


class DeskEpisode:
    """One try: calls that read and change the desk, until a turn says done."""

    def __init__(self, errand: Errand) -> None:
        self._errand = errand
        self._required = errand.changes(_after(errand.desk, errand.calls))
        self._desk = errand.desk

    def step(self, action: Action) -> Transition:
        """Makes the calls of an action and returns their results; the word done ends the episode."""
        if action.is_malformed:
            return self._say(["error: the call cannot be read"], TurnStatus.MALFORMED, 0.0)
        if not action.calls:
            if not _DONE.fullmatch(action.text.strip()):
                return self._say(["error: call a tool, or say done and nothing else"], TurnStatus.MALFORMED, 0.0)
            effects, others = self._progress()
            is_tidy = effects > 0 and not others
            rewards = {OUTCOME: self._worth(), "effects": effects, "tidy": float(is_tidy)}
            return Transition(is_end=True, rewards=rewards, state_key="end")
        if len(action.calls) > MAX_CALLS_OF_TURN:
            return self._say([f"error: at most {MAX_CALLS_OF_TURN} calls"], TurnStatus.TOOL_ERROR, 0.0)
        before, status, said = self._worth(), TurnStatus.OK, list[str]()
        for call in action.calls:
            try:
                self._desk, text = _run(self._desk, call)
            except _RefusedCall as refused:
                status, text = TurnStatus.TOOL_ERROR, f"error: {refused}"
            said.append(text)
        return self._say(said, status, self._worth() - before)

    def _progress(self) -> tuple[float, int]:
        """Share of the required changes that were made, and the number of other changes."""
        made = self._errand.changes(self._desk)
        return (self._required & made).total() / self._required.total(), (made - self._required).total()

    def _worth(self) -> float:
        effects, others = self._progress()
        return max(0.0, effects - others / self._required.total())

    def _say(self, texts: list[str], status: TurnStatus, reward: float) -> Transition:
        held = sorted(self._desk.items().items())
        return Transition(
            messages=tuple(Message(role="tool", content=text) for text in texts),
            status=status,
            reward=reward,
            state_key=hashlib.sha256(repr(held).encode("utf-8", "surrogatepass")).hexdigest()[:16],
        )


def _run(desk: Desk, call: ToolCall) -> tuple[Desk, str]:
    known, tool = TOOLS.get(call.name, ((), None))
    if tool is None:
        raise _RefusedCall(f"no such tool; there are {', '.join(TOOLS)}")
    if set(call.arguments) != set(known):
        raise _RefusedCall(f"{call.name} takes {', '.join(known) or 'no arguments'}")
    given: dict[str, str] = {}
    for name in known:
        value: Any = call.arguments[name]
        is_small = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**6
        text = value if isinstance(value, str) else str(value) if is_small else ""
        if not 0 < len(text.strip()) <= _MAX_TEXT_CHARS:
            raise _RefusedCall(f"{name} must be a text of 1 to {_MAX_TEXT_CHARS} characters")
        given[name] = text.strip()
    return tool(desk, given)


def _after(desk: Desk, calls: Calls) -> Desk:
    for call in calls:
        desk, _ = _run(desk, call)
    return desk


def _explanation() -> str:
    tools = "\n".join(f"{name}({', '.join(known)})" for name, (known, _) in TOOLS.items())
    example = render_call(_call("file_read", name="todo"))
    return f"You have these tools:\n{tools}\nCall one like this: {example}\nSay done when the task is done."
