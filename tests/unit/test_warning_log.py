"""What a node keeps of its log, and what `swarm why` says with it."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.causes import Gravity, Snapshot, diagnose
from swarm.causes.logged_rules import DOUBT, EXPLAINS, SILENT, SLOW_DTYPE, UPSIDE_DOWN, suspects
from swarm.config import NodeConfig
from swarm.events import ApplyFailed, NodeStarted, WorkerDied
from swarm.telemetry import LoggedWarning, WarningLog, drop_old_warnings, log_as, note_warning, read_warnings
from swarm.telemetry.warning_log import FIRST, MAX_FILE_BYTES, WARNINGS

ROOT = Path(__file__).parents[2]
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


# --- what is said with it ------------------------------------------------------------------------------


def said(*warnings: LoggedWarning, **changes: Any) -> list[tuple[str, str]]:
    """Name and claim of what is found of a node that logged this, notes left out."""
    figures: dict[str, Any] = {"at_s": 1000.0, "last_step_at_s": 1000.0, "started_at_s": 900.0, "pid": 7, "step": 3}
    status = {**figures, **changes.pop("status", {})}
    snapshot = Snapshot(now_s=1000.0, status=status, config=NodeConfig(), warnings=warnings, **changes)
    return [(each.name, each.claim) for each in diagnose(snapshot) if each.gravity is not Gravity.NOTE]


def warned(message: str, fields: str = "", level: str = "WARNING", **changes: Any) -> LoggedWarning:
    figures: dict[str, Any] = {"at_s": 950.0, "logger": "swarm.peers.test", **changes}
    return LoggedWarning(level=level, message=message, fields=fields, **figures)


def test_a_warning_alone_is_no_ailment_and_an_error_is_one() -> None:
    assert said(warned("peer away")) == []
    ((name, claim),) = said(warned("no key", "peer=ab", "ERROR"))
    assert name == "logged_errors" and claim == "the node logged an error: no key: peer=ab"
    assert said(warned("no key", "peer=ab", "ERROR", at_s=800.0)) == [], "of the process before"


def test_a_warning_is_named_where_its_part_explains_what_is_found() -> None:
    alone: dict[str, Any] = {
        "status": {"dials": {"failed": 9, "answered": 0}},
        "events": (NodeStarted(at_s=900.0, node_id="a"),),
    }
    names = [name for name, _ in said(warned("DHT join did not finish"), **alone)]
    assert "cannot_dial" in names and names.index("log_says") > names.index("cannot_dial")
    names = [name for name, _ in said(warned("DHT join did not finish", level="ERROR"), **alone)]
    assert names[0] == "log_says", "an error is likely the cause"
    other = warned("a batch could not be made", level="ERROR", logger="swarm.loops.generate_loop")
    assert "log_says" not in [name for name, _ in said(other, **alone)], "of another part"


def test_what_ended_the_worker_is_named_by_the_error_that_it_logged() -> None:
    died = WorkerDied(at_s=960.0, exit_code=1)
    failed = warned("worker failed", "ValueError: shapes differ", "ERROR", logger="node.worker")
    ((name, claim), *_) = said(failed, events=(died,))
    assert name == "worker_dies" and claim.endswith(": ValueError: shapes differ")
    starved = warned("worker failed", "torch.OutOfMemoryError: CUDA out of memory", "ERROR", logger="node.worker")
    assert said(starved, events=(died,))[0][0] == "out_of_memory"


def test_a_doubt_before_the_start_is_named_where_answers_have_no_signal() -> None:
    own = {"num_put": 120, "num_with_signal": 0, "num_unscored": 0, "error": ""}
    doubt = warned(DOUBT, "environment own, task 0: the reference 'ab' is worth 0, an empty answer 1", logger="")
    assert said(doubt) == []
    ((name, claim), *_) = said(doubt, status={"own_since_step": own})
    assert name == "reference_worth_nothing" and "worth 0" in claim
    old = warned(DOUBT, "environment own", logger="", at_s=100.0)
    assert said(old, status={"own_since_step": own})[0][0] == "all_wrong", "of an earlier start"


def test_a_reward_that_pays_less_for_a_right_answer_is_named_before_anything_is_seen_of_it() -> None:
    doubt = warned(UPSIDE_DOWN, "environment own, task 0: the reference 'ab' is worth 0, an empty answer 0.75")
    assert [name for name, _ in said(doubt)] == ["reward_is_upside_down"]
    own = {"num_put": 120, "num_with_signal": 0, "num_unscored": 0, "error": ""}
    assert said(doubt, status={"own_since_step": own})[0][0] == "reward_is_upside_down"
    old = warned(UPSIDE_DOWN, "the same", at_s=100.0)
    assert said(old) == [], "mended, and started again"


def test_bfloat16_without_hardware_is_named_where_it_was_measured() -> None:
    slow = warned(SLOW_DTYPE, "dtype=bfloat16 (compute_dtype asks for it: 31.2 GFLOP/s in float32, 3.1 in bfloat16)")
    ((name, claim),) = said(slow)
    assert name == "slow_compute_dtype" and "no hardware" in claim and "31.2 GFLOP/s in float32" in claim


def test_what_a_rule_tells_better_is_not_told_as_a_line_of_the_log() -> None:
    refused = ApplyFailed(
        at_s=960.0, policy_id="c" * 64, step=3, digest="d" * 64, error="published tensor: got float32"
    )
    words = "a version could not be loaded; trying again after a pause"
    noted = warned(words, "step=3", "ERROR", logger="swarm.loops.update_weights")
    following: dict[str, Any] = {
        "policy": "bb" * 32, "candidates": [], "trainers_without_weights": [], "served_step": None, "head_step": 4,
        "is_trainer_connected": True, "credit": 1, "state": "watching", "last_error": "", "num_applied": 0,
    }  # fmt: skip
    found: dict[str, Any] = {"events": (refused,), "status": {"following": following}}
    assert [name for name, _ in said(noted, **found)] == ["versions_refused"]
    other = warned("a version was odd", "step=3", "ERROR", logger="swarm.loops.update_weights")
    assert said(other, **found)[0][0] == "log_says", "a line that no rule knows comes first"


def test_every_message_that_rules_tell_better_is_one_that_is_logged() -> None:
    written = "".join(path.read_text() for part in ("swarm", "node") for path in (ROOT / part).rglob("*.py"))
    assert [message for message in SILENT - {DOUBT, UPSIDE_DOWN, SLOW_DTYPE} if written.count(f'"{message}"') < 2] == []


def test_weights_of_rewards_are_named_where_a_right_answer_is_worth_less() -> None:
    doubt = warned(UPSIDE_DOWN, "environment own, task 0: the reference 'ab' is worth 0.55, an empty answer 0.9")
    several = {"name": "own", "kind": "function", "dataset": "reward.py:score"}
    weighted = NodeConfig.model_validate(
        {"environments": [{**several, "reward_weights": {"right": 0.1, "short": 0.9}}]}
    )
    fixes = [
        diagnose(Snapshot(now_s=1000.0, status={"started_at_s": 900.0}, config=config, warnings=(doubt,)))[0].fix
        for config in (NodeConfig(), weighted)
    ]
    assert ["weight to 0" in fix for fix in fixes] == [False, True]


def test_every_part_that_explains_something_is_one_of_the_node() -> None:
    root = Path(__file__).parents[2]
    parts = [part.replace(".", "/") for part in EXPLAINS]
    assert [part for part in parts if not (root / part).is_dir() and not (root / f"{part}.py").is_file()] == []
    assert suspects(Snapshot(now_s=0.0)) == []
