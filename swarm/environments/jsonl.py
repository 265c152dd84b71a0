"""Problems from a file, judged by their reference or by a function of the user.

The file has one JSON object per line; `hub_datasets` writes one from a Hugging Face dataset.

Invariant: the file is read one bounded line at a time, and a digest in the configuration makes sure that every node of
the run has the same file. A function comes from this node's own configuration and is called in the
sandbox like every other verifier, because the answers may come from peers.
"""

import hashlib
import inspect
import json
import math
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from swarm.config import EnvironmentConfig
from swarm.environments.environment import ANSWER_CPU_S, AnswerEnvironment, Problem
from swarm.environments.params import drawn_from
from swarm.episode import OUTCOME, Message
from swarm.errors import ConfigError
from swarm.plugins import code_version, load_object
from swarm.read_files import parse_json

MAX_LINE_BYTES = 2**20
_ROUNDING = 1e-9

RewardFunction = Callable[..., float | Mapping[str, float]]
"""(question, stripped answer, reference[, whole record]) -> a reward, or several rewards by name."""


class RecordEnvironment(AnswerEnvironment):
    """Questions with a reference answer; reward 1 for the same text up to white space, or the same number, else 0.

    `params.path`, or else `config.dataset`, is a file ending in .jsonl; params.question and params.answer name the
    fields, by default "question" and "answer".
    """

    known_params = frozenset({"path", "question", "answer"})
    is_answer_needed = True  # each record has one
    is_record_needed = False  # by the judge; else a cached problem would keep its whole record in memory

    def __init__(self, config: EnvironmentConfig, verifier: str = "match") -> None:
        """Raises ConfigError for an unknown param, and as `open_records`."""
        unknown = sorted(set(config.params) - self.known_params)
        if unknown:
            known = sorted(self.known_params)
            raise ConfigError(f"environment {config.name}: unknown param {unknown[0]!r}; known: {known}")
        records = open_records(config, str(config.params.get("path") or config.dataset))
        self._record = records.record
        self._question_key = str(config.params.get("question", "question"))
        self._answer_key = str(config.params.get("answer", "answer"))
        named = {**config.params, "path": records.digest}  # another node may have the same file elsewhere
        super().__init__(config, f"{verifier}-{drawn_from(config, named)}/1", records.num_records)

    def build(self, task_id: int) -> Problem:
        record = self._record(task_id)
        needed = (self._question_key, self._answer_key) if self.is_answer_needed else (self._question_key,)
        chat = self._chat(task_id, record.get(self._question_key, record.get("messages")))
        missing = [key for key in needed if key not in record and not (chat and key == self._question_key)]
        if missing:
            known = ", ".join(sorted(record))
            raise LookupError(
                f"environment {self.name}: record {task_id} has no field {missing[0]!r}, it has: {known}; name yours "
                "with params.question and params.answer (--question, --answer)"
            )
        return Problem(
            question=chat[-1].content if chat else self._text(task_id, self._question_key, record[self._question_key]),
            reference=self._text(task_id, self._answer_key, record.get(self._answer_key, "")),
            entry=_Entry(record if self.is_record_needed else {}, chat),
            initial_state=json.dumps([[each.role, each.content] for each in chat]) if chat else "",
        )

    def opening(self, problem: Problem) -> tuple[Message, ...]:
        """The chat of a record with `messages`, its question in the configured prompt; else that of the base class."""
        chat: tuple[Message, ...] = problem.entry.chat
        asked = super().opening(problem)
        if not chat:
            return asked
        system = () if chat[0].role == "system" else tuple(each for each in asked if each.role == "system")
        return (*system, *chat[:-1], *(each for each in asked if each.role != "system"))

    def _text(self, task_id: int, key: str, value: object) -> str:
        if isinstance(value, str | int | float):
            return str(value)
        if value is None and key == self._answer_key and not self.is_answer_needed:
            return ""
        raise LookupError(
            f"environment {self.name}: record {task_id} has {json.dumps(value):.60} as {key!r}, where a text or a "
            "number belongs"
        )

    def _chat(self, task_id: int, messages: object) -> tuple[Message, ...]:
        """Messages up to the last user message, the question; () without one. Raises LookupError if malformed."""
        given = cast("list[Any]", messages) if isinstance(messages, list) else []
        while given and not (isinstance(given[-1], dict) and given[-1].get("role") == "user"):
            given = given[:-1]
        for number, each in enumerate(given):
            if not (isinstance(each, dict) and all(isinstance(each.get(key), str) for key in ("role", "content"))):
                raise LookupError(
                    f"environment {self.name}: record {task_id}, messages[{number}]: expected role and content, both "
                    f"text, got {each!r:.80}; write parts of a message as one text"
                )
        return tuple(Message(role=each["role"], content=each["content"]) for each in given)

    def judge(self, problem: Problem, answer: str) -> float:
        return 1.0 if is_same_answer(answer, problem.reference) else 0.0


class FunctionEnvironment(RecordEnvironment):
    """Problems of a file (params.path), judged by the RewardFunction that `config.dataset` names.

    The function gets "" as the reference of a record without one. It returns a number, or several numbers by name,
    of which `config.reward_weights` makes a weighted sum; `config.reward_range` is scaled to [0, 1]. An attribute
    `answer_cpu_s` of the function sets the CPU seconds that it may take for one answer.
    """

    is_answer_needed = False

    def __init__(self, config: EnvironmentConfig) -> None:
        """Raises ConfigError if the function or problems cannot be loaded, or the function has a wrong signature."""
        if not config.params.get("path"):
            raise ConfigError(f"environment {config.name}: params.path must name the .jsonl file of problems")
        score = load_object(config.dataset)
        if not callable(score):
            raise ConfigError(f"environment {config.name}: {config.dataset} is not a function")
        self._score = cast("RewardFunction", score)
        self.is_record_needed = _takes_record(config, score)
        self._low, self._high = config.reward_range
        self.answer_cpu_s = float(getattr(score, "answer_cpu_s", ANSWER_CPU_S))
        scale = "" if config.reward_range == (0.0, 1.0) else f" {self._low!r}..{self._high!r}"
        weights = "".join(f" {name}={weight!r}" for name, weight in sorted(config.reward_weights.items()))
        self.signals = frozenset({"reward_parts"} if weights else ())
        super().__init__(config, f"function-{code_version(score)}{scale}{weights}")

    def judge(self, problem: Problem, answer: str) -> float:
        return self.rewards(problem, answer)[OUTCOME]

    def rewards(self, problem: Problem, answer: str) -> Mapping[str, float]:
        record = (problem.entry.record,) if self.is_record_needed else ()
        given: object = self._score(problem.question, answer, problem.reference, *record)
        if not isinstance(given, Mapping):
            if self.config.reward_weights:
                names = ", ".join(sorted(self.config.reward_weights))
                raise TypeError(f"{self.config.dataset} returned {given!r:.40}, where reward_weights needs {names}")
            return {OUTCOME: self._rescaled(self._number("", given))}
        named = cast("Mapping[Any, Any]", given)
        parts = {str(name): self._number(f"{name!r}: ", value) for name, value in named.items()}
        weights = self.config.reward_weights
        if not weights:
            raise TypeError(
                f"{self.config.dataset} returned the rewards {', '.join(sorted(parts))}: say what each counts with "
                "reward_weights of the environment (swarm train --reward-weight NAME=WEIGHT), or return one number"
            )
        if missing := sorted(weights.keys() - parts.keys()):
            raise ValueError(
                f"{self.config.dataset} returned no {missing[0]!r}, which reward_weights (--reward-weight) names; it "
                f"returned {', '.join(sorted(parts)) or 'none'}"
            )
        total = math.fsum(weight * parts[name] for name, weight in weights.items())
        terms = " + ".join(f"{weight:g} {name} {parts[name]:g}" for name, weight in weights.items())
        return {**parts, OUTCOME: self._rescaled(total, f"the weighted sum {terms} = ")}

    def _number(self, name: str, given: object) -> float:
        if given is None:
            raise TypeError(f"{self.config.dataset} returned {name or 'nothing: '}end it with `return` and a number")
        if isinstance(given, str):
            raise TypeError(f"{self.config.dataset} returned {name}the text {given!r:.40}, where a number belongs")
        if inspect.iscoroutine(given):
            given.close()
            raise TypeError(f"{self.config.dataset} returned {name}a coroutine: write `def`, not `async def`")
        if inspect.isgenerator(given):
            raise TypeError(f"{self.config.dataset} returned {name}a generator: end it with `return`, not `yield`")
        if isinstance(given, bytes):
            raise TypeError(f"{self.config.dataset} returned {name}the bytes {given!r:.40}, where a number belongs")
        return float(cast("Any", given))

    def _rescaled(self, value: float, of: str = "") -> float:
        """Scales a value from `reward_range` to [0, 1]; `of` describes it. Raises ValueError if it is out of range."""
        share = (value - self._low) / (self._high - self._low)
        for end in (0.0, 1.0):  # a weighted sum may miss it by its rounding
            if abs(share - end) < _ROUNDING:
                return end
        if not 0.0 < share < 1.0:
            raise ValueError(
                f"{self.config.dataset} returned {of}{value:g}, outside of reward_range [{self._low:g}, "
                f"{self._high:g}]: set reward_range of the environment (swarm train --reward-range LOW HIGH) to what "
                f"{'the sum may be, or choose weights that add up to its end' if of else 'it may return'}"
            )
        return share


class _Entry(NamedTuple):
    """A record ({} unless the judge needs it) and its chat (() if the record has a field with the question)."""

    record: Mapping[str, Any]
    chat: tuple[Message, ...]


def _takes_record(config: EnvironmentConfig, score: Callable[..., Any]) -> bool:
    """True if a reward function takes the record, too: it requires a fourth argument, or its fourth is named `record`.

    An optional fourth argument with another name is not passed. False for a class in C, whose signature is unknown.

    Raises:
        ConfigError: the function can be called with neither three nor four arguments.
    """
    try:
        signature = inspect.signature(score)
    except (TypeError, ValueError):  # of a class in C
        return False
    for count in (3, 4):
        try:
            signature.bind(*[""] * count)
        except TypeError:
            continue
        fourth = [*signature.parameters.values()][3:4]
        named = [each.name for each in fourth if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        return count == 4 or named == ["record"]
    raise ConfigError(
        f"environment {config.name}: {config.dataset}{signature} cannot be called; write it as "
        "score(question, answer, reference) or score(question, answer, reference, record), returning a number"
    )


def is_same_answer(answer: str, reference: str) -> bool:
    """True if two texts are equal with every run of white space as one blank, or equal as finite numbers."""
    if " ".join(answer.split()) == " ".join(reference.split()):
        return True
    left, right = number_of(answer), number_of(reference)
    return left is not None and left == right


def number_of(text: str) -> float | None:
    """Reads a text as a finite decimal number, without commas; None for other texts and texts over 40 characters."""
    plain = text.strip().replace(",", "")
    if len(plain) > 40 or not plain.isascii() or "_" in plain:
        return None
    try:
        value = float(plain)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class Records(NamedTuple):
    """Random access to the records of a file."""

    num_records: int
    record: Callable[[int], dict[str, Any]]  # by index; raises LookupError
    digest: str  # SHA-256 of the file in hex


def open_records(config: EnvironmentConfig, where: str) -> Records:
    """Opens a .jsonl file. Raises ConfigError if it is missing or empty, has another digest or an overlong line."""
    if not where:
        raise ConfigError(f"environment {config.name}: dataset must be a path")
    if not where.endswith(".jsonl"):
        raise ConfigError(
            f"environment {config.name}: {where!r} is no .jsonl file, a JSON record in each line; `swarm train --data` "
            "writes one of a folder or hub id of a dataset, as `datasets` does with to_json"
        )
    lines = _JsonLines(config, Path(where).expanduser())
    return Records(len(lines), lines.record, lines.digest)


class _JsonLines:
    """Random access to the lines of a file by their byte offsets (8 bytes of memory each)."""

    def __init__(self, config: EnvironmentConfig, path: Path) -> None:
        self._path = path.resolve()
        self._offsets = array("q")
        self._origin = f"environment {config.name}: {self._path}"
        digest = hashlib.sha256()
        if self._path.exists() and not self._path.is_file():  # a pipe would be waited for
            raise ConfigError(f"{self._origin}: no regular file")
        try:
            with self._path.open("rb") as file:
                self._index(file.readline, digest.update)
        except OSError as error:
            key = "params.path" if config.params.get("path") else "dataset"
            raise ConfigError(f"{self._origin}: {error.strerror}; {key} must be a readable .jsonl file") from error
        self.digest = digest.hexdigest()
        if config.digest and self.digest != config.digest.lower():
            raise ConfigError(f"{self._origin}: SHA-256 is {self.digest}, the run asks for {config.digest}")
        if not self._offsets:
            raise ConfigError(f"{self._origin}: no records")

    def __len__(self) -> int:
        return len(self._offsets)

    def record(self, index: int) -> dict[str, Any]:
        """The record at `index`. Raises LookupError if its line is no JSON object."""
        with self._path.open("rb") as file:
            file.seek(self._offsets[index])
            line = file.readline(MAX_LINE_BYTES + 1)
        try:
            record = parse_json(line)
        except ValueError as error:
            raise LookupError(f"{self._origin}: record {index} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise LookupError(f"{self._origin}: record {index} is not a JSON object")
        return cast("dict[str, Any]", record)

    def _index(self, read_line: Callable[[int], bytes], update: Callable[[bytes], None]) -> None:
        offset = 0
        while line := read_line(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise ConfigError(f"{self._origin}: record {len(self._offsets)} is longer than {MAX_LINE_BYTES} bytes")
            update(line)
            if line.strip():
                self._offsets.append(offset)
            offset += len(line)
