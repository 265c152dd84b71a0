"""Datasets as problems: written as .jsonl once, by the real library where it is installed."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from node.train_options import TrainOptions, resolve
from swarm.environments.hub_datasets import file_name, write_jsonl
from swarm.environments.load import build_environments
from swarm.errors import ConfigError

ROWS = [{"question": f"sort:{word}=", "answer": "".join(sorted(word))} for word in ("cab", "hag", "bed", "fad", "egg")]
WITH_LIBRARY = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = pytest.importorskip(
        "datasets", reason="needs pip install 'swarm-trainer[datasets]'; make nightly has an environment with it"
    )
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return found


@WITH_LIBRARY
def test_folders_and_files_of_datasets_become_the_same_problems(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = library.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "saved"))
    library.DatasetDict({"train": table, "few": table.select([0])}).save_to_disk(str(tmp_path / "parts"))
    (tmp_path / "parquet").mkdir()
    table.to_parquet(str(tmp_path / "parquet" / "train.parquet"))
    table.to_csv(str(tmp_path / "rows.csv"))
    for source in ("saved", "parts", "parquet", "parquet/train.parquet", "rows.csv"):
        path = write_jsonl(source, tmp_path / "out" / f"{source.replace('/', '_')}.jsonl")
        assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS, source
    assert write_jsonl("parts", tmp_path / "few.jsonl", split="few").read_text().count("\n") == 1
    for source, said in (
        ("parts", r"--data .*parts: .*other.*; --subset and --split"),
        ("nowhere", "--data .*nowhere"),
    ):
        with pytest.raises(ConfigError, match=said):
            write_jsonl(str(tmp_path / source), tmp_path / "none.jsonl", split="other")
    assert not (tmp_path / "none.jsonl").exists()

    options = TrainOptions(directory=tmp_path / "run", model="tiny", data=tmp_path / "parquet")
    (environment,) = build_environments(resolve(options).environments).values()
    assert environment.num_tasks == len(ROWS) and environment.reference(1) == "agh"


def test_a_dataset_is_read_once_and_other_parts_are_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / file_name("openai/gsm8k", "main", "train")
    path.write_text(json.dumps(ROWS[0]) + "\n")
    assert path.name == "openai_gsm8k-main-train.jsonl"
    assert write_jsonl("openai/gsm8k", path, "main", "train") == path
    assert len({file_name("a/b", *part) for part in (("", "train"), ("", "test"), ("c", "train"))}) == 3
    options = TrainOptions(directory=tmp_path, model="tiny", data=Path("openai/gsm8k"), subset="main")
    assert resolve(options).environments[0].params["path"] == str(path)


def test_a_missing_library_is_told_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"--data quizz: no \.jsonl file.*pip install 'swarm-trainer\[datasets\]'"):
        write_jsonl("quizz", tmp_path / "out.jsonl")


def test_a_record_that_cannot_be_decoded_is_told_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def records() -> Iterator[dict[str, str]]:
        yield ROWS[0]
        raise ImportError("To support decoding images, please install 'Pillow'.")

    library: Any = ModuleType("datasets")
    library.load_dataset = lambda *_, **options: records()
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(ConfigError, match=r"--data a/b: To support decoding images, please install 'Pillow'; --subset"):
        write_jsonl("a/b", tmp_path / "made.jsonl")
    assert not list(tmp_path.iterdir())
