"""Problems from a file: JSON lines, or a Hugging Face dataset when `datasets` is installed.

Invariant: the file is read one bounded line at a time, and with a digest in the configuration it is exactly
the file that every other node of the run has.
"""

import hashlib
import importlib
import importlib.util
import json
import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from swarm.config import EnvironmentConfig
from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.errors import ConfigError

MAX_LINE_BYTES = 2**20
_PARAMS = frozenset({"path", "split", "question", "answer"})


class RecordEnvironment(NumberedEnvironment):
    """Questions with a reference answer; reward 1 for the same text up to white space, or the same number.

    `config.dataset` (or params.path) is a file ending in .jsonl, otherwise a directory or hub id for
    `datasets`. params.question and params.answer name the fields, params.split the split (default train).
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Raises ConfigError: no such file, another digest, a line that is too long, no records."""
        unknown = sorted(set(config.params) - _PARAMS)
        if unknown:
            raise ConfigError(f"environment {config.name}: unknown param {unknown[0]!r}; known: {sorted(_PARAMS)}")
        count, self._record = open_records(config, str(config.params.get("path") or config.dataset))
        self._question_key = str(config.params.get("question", "question"))
        self._answer_key = str(config.params.get("answer", "answer"))
        super().__init__(config, "match/1", count)

    def build(self, task_id: int) -> Problem:
        record = self._record(task_id)
        missing = [key for key in (self._question_key, self._answer_key) if key not in record]
        if missing:
            raise LookupError(f"environment {self.name}: record {task_id} has no field {missing[0]!r}")
        return Problem(question=str(record[self._question_key]), reference=str(record[self._answer_key]))

    def judge(self, problem: Problem, answer: str) -> float:
        return 1.0 if is_same_answer(answer, problem.reference) else 0.0


def is_same_answer(answer: str, reference: str) -> bool:
    """Equal after every run of white space became one blank, or equal as finite decimal numbers."""
    if " ".join(answer.split()) == " ".join(reference.split()):
        return True
    left, right = _number(answer), _number(reference)
    return left is not None and left == right


def _number(text: str) -> float | None:
    plain = text.strip().replace(",", "")
    if len(plain) > 40 or not plain.isascii() or "_" in plain:
        return None
    try:
        value = float(plain)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def open_records(config: EnvironmentConfig, where: str) -> tuple[int, Callable[[int], dict[str, Any]]]:
    """(number of records, record by index) of a .jsonl file or a `datasets` source. Raises ConfigError."""
    if not where:
        raise ConfigError(f"environment {config.name}: dataset must be a path")
    if where.endswith(".jsonl"):
        lines = _JsonLines(config, Path(where).expanduser())
        return len(lines), lines.record
    return _open_datasets(config, where)


class _JsonLines:
    """Random access to the lines of a file by their byte offsets (8 bytes of memory each)."""

    def __init__(self, config: EnvironmentConfig, path: Path) -> None:
        self._path = path.resolve()
        self._offsets = array("q")
        self._origin = f"environment {config.name}: {self._path}"
        digest = hashlib.sha256()
        try:
            with self._path.open("rb") as file:
                self._index(file.readline, digest.update)
        except OSError as error:
            raise ConfigError(f"{self._origin}: {error.strerror}; dataset must be a readable .jsonl file") from error
        if config.digest and digest.hexdigest() != config.digest.lower():
            raise ConfigError(f"{self._origin}: SHA-256 is {digest.hexdigest()}, the run asks for {config.digest}")
        if not self._offsets:
            raise ConfigError(f"{self._origin}: no records")

    def __len__(self) -> int:
        return len(self._offsets)

    def record(self, index: int) -> dict[str, Any]:
        """The record with that index. Raises LookupError when the line is no JSON object."""
        with self._path.open("rb") as file:
            file.seek(self._offsets[index])
            line = file.readline(MAX_LINE_BYTES + 1)
        try:
            record = json.loads(line)
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


def _open_datasets(config: EnvironmentConfig, where: str) -> tuple[int, Callable[[int], dict[str, Any]]]:
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(f"environment {config.name}: {where!r} is no .jsonl file; pip install datasets to load it")
    if config.digest:
        raise ConfigError(f"environment {config.name}: digest can be checked for a .jsonl file only")
    library = cast("Any", importlib.import_module("datasets"))
    try:
        if (Path(where) / "dataset_info.json").exists() or (Path(where) / "dataset_dict.json").exists():
            loaded = library.load_from_disk(where)
            split = str(config.params.get("split", "train"))
            table = loaded[split] if isinstance(loaded, dict) else loaded
        else:
            table = library.load_dataset(where, split=str(config.params.get("split", "train")))
    except Exception as error:  # the library raises many kinds
        raise ConfigError(f"environment {config.name}: cannot load {where!r}: {error}") from error
    return len(table), lambda index: dict(table[index])
