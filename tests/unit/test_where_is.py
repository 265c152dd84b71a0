"""Forty questions of strangers, answered by file names alone: docs/where_is.tsv.

The first 24 are those of the review that asked for these names, the other 16 were written by somebody who had not seen
the repository. The words are what they would have typed into a file finder; they are never changed to fit the tree.
"""

import csv
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = ("swarm", "node", "coordinator")
MAX_RANK = 10  # as many as a file finder shows at once
MIN_FOUND = 38


def ranked(words: list[str]) -> list[str]:
    """Files whose path contains a word, those with most words first, then the words in the file's own name first."""
    files = [path.relative_to(ROOT) for place in PLACES for path in (ROOT / place).rglob("*.py")]
    scores = {
        str(path): (sum(word in str(path) for word in words), sum(word in path.stem for word in words))
        for path in files
        if not path.name.startswith("__") and "_pb2" not in path.name
    }
    return sorted(
        (path for path, score in scores.items() if score[0]), key=lambda path: (*(-s for s in scores[path]), path)
    )


def table() -> list[dict[str, str]]:
    with (ROOT / "docs" / "where_is.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def test_every_file_that_answers_a_question_exists() -> None:
    rows = table()
    assert len(rows) == 42
    assert [row["file"] for row in rows if row["file"] != "-" and not (ROOT / row["file"]).is_file()] == []


def test_strangers_find_the_file_by_its_name() -> None:
    missed = {
        row["question"]: row["file"] for row in table() if row["file"] not in ranked(row["words"].split())[:MAX_RANK]
    }
    assert 40 - len(missed) >= MIN_FOUND, missed
