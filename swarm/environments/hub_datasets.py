"""Conversion of a Hugging Face dataset to a .jsonl file, the format that environments read.

Invariant: `datasets` and its threads stay out of the processes that score answers; these read a plain file, whose
digest shows if two nodes have the same problems.
"""

import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from swarm.errors import ConfigError

_READERS: Final = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".arrow": "arrow"}


def write_jsonl(source: str, path: Path, subset: str = "", split: str = "train") -> Path:
    """Writes a dataset to a file of JSON lines and returns its path; an existing file is kept (blocking, slow).

    Args:
        source: a hub id, a folder (of `save_to_disk`, or with parquet, csv or json files), or one such file.
        path: file to write; its folder is created if needed.
        subset: configuration of the dataset, if it has several.
        split: part of the dataset, if it has several.

    Raises:
        ConfigError: `datasets` is not installed, the dataset or a record cannot be read, or the file cannot be written.
    """
    if path.exists():
        return path
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"--data {source}: no .jsonl file, so read as a dataset, for which `datasets` is missing: pip install "
            "'swarm-trainer[datasets]', or write a file with a JSON record in each line"
        ) from None
    with _explained(source):
        table = _load(datasets, source, subset, split)
    draft = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("w", encoding="utf-8") as file:
            file.writelines(_lines(table, source))
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; make room, or name another --dir") from None
    finally:
        draft.unlink(missing_ok=True)
    return path


def is_dataset(source: str) -> bool:
    """True if `source` has to be read with `datasets`: every name that does not end in .jsonl."""
    return not source.endswith(".jsonl")


def file_name(source: str, subset: str, split: str) -> str:
    """File name for a part of a dataset: source, subset and split in safe characters, the last 120 of them."""
    text = "-".join(filter(None, (source.rstrip("/").removeprefix("/"), subset, split)))
    return f"{''.join(c if c.isalnum() or c in '._-' else '_' for c in text)[-120:]}.jsonl"


def _load(library: Any, source: str, subset: str, split: str) -> Iterable[Mapping[str, Any]]:
    path = Path(source).expanduser()
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        loaded = library.load_from_disk(str(path))
        return loaded[split] if isinstance(loaded, dict) else loaded
    if path.is_file():
        if path.suffix not in _READERS:
            raise ConfigError(f"expected a file ending in .jsonl, {', '.join(_READERS)}")
        return library.load_dataset(_READERS[path.suffix], data_files=str(path), split="train")
    # resolved, since a folder called "parquet" would be taken for the reader of that name
    return library.load_dataset(str(path.resolve()) if path.is_dir() else source, subset or None, split=split)


def _lines(table: Iterable[Mapping[str, Any]], source: str) -> Iterator[str]:
    with _explained(source):  # some records cannot be decoded: that of an image without its library
        for record in table:
            yield json.dumps(dict(record), default=str) + "\n"


@contextmanager
def _explained(source: str) -> Generator[None]:
    try:
        yield
    except Exception as error:  # the library raises many kinds
        said = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"--data {source}: {said.rstrip('.')}; --subset and --split choose a part of a dataset"
        ) from None
