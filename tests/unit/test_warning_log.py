"""The part of its log that a node keeps for `swarm why`."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.telemetry import WarningLog, drop_old_warnings, log_as, note_warning, read_warnings
from swarm.telemetry.warning_log import FIRST, MAX_FILE_BYTES, WARNINGS

logger = logging.getLogger("swarm.peers.test")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[WarningLog]:
    kept = WarningLog(tmp_path)
    yield kept
    kept.close()


def test_warnings_are_kept_with_fields_and_error_and_what_is_less_is_not(tmp_path: Path, log: WarningLog) -> None:
    logger.info("started")
    logger.warning("peer away", extra={"peer": "ab", "text": "a\nb"})
    try:
        raise ExceptionGroup("outer", [ValueError("out of memory")])
    except ExceptionGroup:
        logger.exception("worker failed")
    first, second = read_warnings(tmp_path)
    assert (first.level, first.message, first.logger) == ("WARNING", "peer away", "swarm.peers.test")
    assert first.fields == "peer=ab text=a\nb" and not first.is_error
    assert second.fields == "ValueError: out of memory" and second.is_error


def test_a_warning_is_no_error_where_a_library_renamed_levels(tmp_path: Path, log: WarningLog) -> None:
    before = logging.getLevelName(logging.WARNING)
    logging.addLevelName(logging.WARNING, "WARN")
    try:
        logger.warning("peer away")
    finally:
        logging.addLevelName(logging.WARNING, before)
    (kept,) = read_warnings(tmp_path)
    assert kept.level == "WARNING" and not kept.is_error


def test_what_repeats_takes_few_lines_and_is_counted(tmp_path: Path, log: WarningLog) -> None:
    for _ in range(1000):
        logger.warning("again")
    counts = [each.count for each in read_warnings(tmp_path)]
    assert counts[:FIRST] == [1, 2, 3] and counts[-1] == 512 and len(counts) < 12


def test_where_nobody_set_up_logging_warnings_are_shown_as_without_it(
    log: WarningLog, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logger.warning("peer away")
    assert capsys.readouterr().err == "peer away\n"


async def test_of_two_nodes_in_one_process_each_keeps_its_own(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    logs = [WarningLog(folder) for folder in folders]

    async def work(folder: Path) -> None:
        log_as(folder)
        await asyncio.to_thread(logger.warning, f"from {folder.name}")

    try:
        await asyncio.gather(*(asyncio.create_task(work(folder)) for folder in folders))
    finally:
        for each in logs:
            each.close()
    logger.warning("after the end")
    assert [[each.message for each in read_warnings(folder)] for folder in folders] == [["from a"], ["from b"]]


def test_a_file_that_has_become_large_loses_its_older_half_and_rubbish_is_left_out(tmp_path: Path) -> None:
    note_warning(tmp_path, "old", "")
    with (tmp_path / WARNINGS).open("a") as file:
        file.write("rubbish\n" * (MAX_FILE_BYTES // 8))
    note_warning(tmp_path, "new", "a" * 5000)
    drop_old_warnings(tmp_path)
    assert (tmp_path / WARNINGS).stat().st_size <= MAX_FILE_BYTES // 2 + 1
    assert [each.message for each in read_warnings(tmp_path)] == ["new"]


def test_a_directory_that_takes_no_file_stops_nothing(tmp_path: Path) -> None:
    log = WarningLog(tmp_path / "gone")
    logger.warning("peer away")
    log.close()
    assert read_warnings(tmp_path / "gone") == []
