"""Facts about a file of questions and right answers that no single record shows: contradictions, repetitions, blanks.

Invariant: facts alone, about at most MOST_READ records; `swarm.diagnosis.record_rules` judges which facts do harm.
"""

import json
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, cast

from swarm.config import EnvironmentConfig
from swarm.environments.jsonl import MAX_LINE_BYTES, number_of
from swarm.read_files import parse_json

MOST_READ: Final = 20_000  # records of a file
MAX_FILE_BYTES: Final = 256 * 2**20  # a larger one is not read


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordFacts:
    """Counts over the records of one environment, and their right answers.

    Example: a file with 60 questions, each of them four times with four different right answers, has num_records 240,
    num_questions 60 and num_contradicting 240.
    """

    num_records: int
    num_questions: int  # different ones
    num_contradicting: int = 0  # records whose question has another right answer elsewhere
    first_contradiction: tuple[int, int] = (-1, -1)  # records
    num_with_blanks: int = 0  # right answers with white space before or after them
    num_null: int = 0  # right answers that are null, which only the answer "None" would match
    num_no_text: int = 0  # right answers that are true, false, a list or a table
    num_broken: int = 0  # lines that are no record
    commonest: int = 0  # records with the commonest right answer
    num_marked: int = 0  # right answers whose last word has the commonest word before it, as `#### 18` or `is 18`
    references: tuple[str, ...] = field(default=(), repr=False)  # right answers, by record; "" where there is none


def plain(answer: str) -> str:
    """Canonical form of an answer: its number, or else its text with each run of white space as one blank."""
    number = number_of(answer)
    return " ".join(answer.split()) if number is None else f"{number!r}"


def loose(answer: str) -> str:
    """The case-folded letters and digits of an answer, without punctuation and white space."""
    return "".join(each for each in answer.casefold() if each.isalnum())


def last_word(answer: str) -> str:
    """The last word of an answer of several words; "" if the answer has fewer than two."""
    words = answer.split()
    return words[-1] if len(words) > 1 else ""


def file_of(config: EnvironmentConfig) -> Path | None:
    """Path of the file of problems of an environment of kind jsonl or function; None for other kinds."""
    if config.kind not in ("jsonl", "function"):
        return None
    return Path(str(config.params.get("path") or config.dataset)).expanduser()


def record_facts(config: EnvironmentConfig) -> RecordFacts | None:
    """Facts about the records of an environment (blocking); None without a readable file of at most MAX_FILE_BYTES."""
    path = file_of(config)
    if path is None:
        return None
    try:
        found = path.stat()
        if found.st_size > MAX_FILE_BYTES or not stat.S_ISREG(found.st_mode):
            return None
        fields = str(config.params.get("question", "question")), str(config.params.get("answer", "answer"))
        return _facts(path, found.st_mtime_ns, found.st_size, *fields)
    except OSError:
        return None


@lru_cache(maxsize=8)
def _facts(path: Path, _changed_ns: int, _num_bytes: int, question: str, answer: str) -> RecordFacts | None:
    asked: dict[str, dict[str, int]] = defaultdict(dict)  # question -> right answer -> first record with it
    counts = Counter[str]()  # of questions
    references: list[str] = []
    num_broken = num_null = num_no_text = num_with_blanks = 0
    for record in _records(path):
        if record is None:
            num_broken += 1
            references.append("")
            continue
        given, number = record.get(answer, ""), len(references)
        reference, text = str(given), _question(record, question)
        references.append(reference)
        num_null += given is None
        num_no_text += isinstance(given, bool | list | dict)
        num_with_blanks += reference != reference.strip()
        counts[text] += 1
        if reference:
            asked[text].setdefault(plain(reference), number)
    if not references:
        return None
    contradicted = [text for text, answers in asked.items() if len(answers) > 1]
    pairs = [sorted(asked[text].values())[:2] for text in contradicted]
    return RecordFacts(
        num_records=len(references),
        num_questions=len(counts),
        num_contradicting=sum(counts[text] for text in contradicted),
        first_contradiction=min([(one, other) for one, other in pairs], default=(-1, -1)),
        num_with_blanks=num_with_blanks,
        num_null=num_null,
        num_no_text=num_no_text,
        num_broken=num_broken,
        num_marked=max(Counter(each.split()[-2] for each in references if last_word(each)).values(), default=0),
        commonest=max(Counter(plain(each) for each in references if each).values(), default=0),
        references=tuple(references),
    )


def _records(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yields the first MOST_READ records of a file, and None for each line among them that is no JSON object."""
    with path.open("rb") as file:
        count = 0
        while count < MOST_READ and (line := file.readline(MAX_LINE_BYTES + 1)):
            if not line.strip():
                continue
            count += 1
            try:
                record: object = parse_json(line)
            except ValueError:
                record = None
            yield cast("dict[str, Any]", record) if isinstance(record, dict) else None


def _question(record: dict[str, Any], key: str) -> str:
    """The question of a record, or else its `messages`, as text."""
    if key in record:
        return str(record[key])
    return json.dumps(record.get("messages", ""), sort_keys=True)
