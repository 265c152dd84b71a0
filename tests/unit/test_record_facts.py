"""Facts about a file of questions and right answers as a whole."""

import json
from pathlib import Path
from typing import Any

import pytest

from swarm.config import EnvironmentConfig
from swarm.environments.record_facts import RecordFacts, loose, plain, record_facts


def facts_of(path: Path, *records: Any, **fields: str) -> RecordFacts:
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in records))
    config = {"name": "own", "kind": "jsonl", "dataset": str(path), "params": fields}
    found = record_facts(EnvironmentConfig.model_validate(config))
    assert found is not None
    return found


def asked(question: str, answer: Any) -> dict[str, Any]:
    return {"question": question, "answer": answer}


def test_a_question_with_two_right_answers_is_counted_and_one_that_is_repeated_is_not(tmp_path: Path) -> None:
    both = facts_of(tmp_path / "a.jsonl", asked("x", "1"), asked("y", "2"), asked("x", "3"), asked("y", "2.0"))
    assert both.num_contradicting == 2 and both.first_contradiction == (0, 2), "2 and 2.0 are one answer"
    assert both.num_questions == 2 and both.num_records == 4


def test_chats_are_compared_up_to_their_answer(tmp_path: Path) -> None:
    def chat(question: str, answer: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}], "answer": answer}

    assert facts_of(tmp_path / "a.jsonl", chat("x", "1"), chat("x", "2")).num_contradicting == 2
    assert facts_of(tmp_path / "b.jsonl", chat("x", "1"), chat("y", "2")).num_contradicting == 0


@pytest.mark.parametrize(
    ("record", "counted"),
    [
        (asked("x", "1 "), "num_with_blanks"),
        (asked("x", None), "num_null"),
        (asked("x", ["1"]), "num_no_text"),
        ('{"question": "x", "ans', "num_broken"),
        ("[1, 2]", "num_broken"),
    ],
)
def test_each_fault_of_a_record_is_counted(tmp_path: Path, record: Any, counted: str) -> None:
    found = facts_of(tmp_path / "a.jsonl", asked("y", "fine"), record)
    kinds = ("num_with_blanks", "num_null", "num_no_text", "num_broken")
    assert {kind: getattr(found, kind) for kind in kinds} == {kind: int(kind == counted) for kind in kinds}


def test_other_fields_are_read_where_they_are_named(tmp_path: Path) -> None:
    found = facts_of(tmp_path / "a.jsonl", {"q": "x", "a": "12"}, {"q": "y", "a": "12"}, question="q", answer="a")
    assert found.references == ("12", "12") and found.commonest == 2
    assert found.num_questions == 2


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    assert facts_of(tmp_path / "a.jsonl", asked("x", "1")).num_records == 1
    assert facts_of(tmp_path / "a.jsonl", asked("x", "1"), asked("y", "1")).num_records == 2


def test_what_has_no_file_has_no_facts(tmp_path: Path) -> None:
    for kind, dataset in (("char", "sort"), ("jsonl", str(tmp_path / "gone.jsonl"))):
        assert record_facts(EnvironmentConfig.model_validate({"name": "a", "kind": kind, "dataset": dataset})) is None


def test_answers_are_plain_up_to_blanks_and_numbers_and_loose_up_to_case_and_punctuation() -> None:
    assert plain(" a  b ") == plain("a b") and plain("2") == plain("2.0") != plain("20")
    assert loose("Lima.") == loose("lima") != loose("Rome")
