"""The event log stays small whatever a peer does, and has every refusal and every event once."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.clock import ManualClock
from swarm.events import Event, GroupRefused, LoopFailed, NodeFinished, NodeRestored, events_of, kind_of
from swarm.report.tally import node_result
from swarm.telemetry import EventLog, EventTail, count_refusals, read_events
from swarm.telemetry.event_log import KEPT_OLD_FILES, MAX_REFUSED_KINDS, REFUSED_EVERY_S, old_file


def refuse(events: EventLog, reason: str = "false_reward", producer: str = "a" * 64) -> None:
    events.write(GroupRefused(reason=reason, producer=producer))


def finished(number: int) -> NodeFinished:
    """Any event with a number."""
    return NodeFinished(step=number)


def numbers_of(events: list[Event]) -> list[int]:
    return [event.step for event in events_of(NodeFinished, events)]


def files_of(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}*"))


def test_a_flood_of_refusals_is_a_few_lines_with_every_one_counted(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "events.jsonl"
    events = EventLog(path, clock)
    for number in range(10_000):
        refuse(events, "false_reward" if number % 2 else "duplicate")
        clock.advance(0.01)  # 100 s in all
    events.close()
    assert count_refusals(read_events(path)) == {"false_reward": 5000, "duplicate": 5000}
    assert len(read_events(path)) <= 4 * (1 + 100 / REFUSED_EVERY_S)


def test_the_first_refusal_is_written_at_once_and_the_rest_when_time_has_passed(tmp_path: Path) -> None:
    clock, path = ManualClock(start_s=0.0), tmp_path / "events.jsonl"
    events = EventLog(path, clock)
    for _ in range(3):
        refuse(events)
    first = GroupRefused(at_s=0.0, reason="false_reward", producer="a" * 64)
    assert read_events(path) == [first]
    clock.advance(REFUSED_EVERY_S)
    events.flush()
    assert read_events(path)[1:] == [replace(first, at_s=REFUSED_EVERY_S, count=2)]
    events.flush()
    assert len(read_events(path)) == 2
    events.close()


def test_a_peer_with_endless_names_is_written_by_reason_alone(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "events.jsonl"
    events = EventLog(path, clock)
    for number in range(5000):
        refuse(events, producer=f"{number:064x}")
    events.close()
    written = read_events(path)
    assert len(written) == MAX_REFUSED_KINDS + 1
    assert events_of(GroupRefused, written)[-1].producer == "" and count_refusals(written) == {"false_reward": 5000}


def test_disk_use_is_bounded_and_no_refusal_is_forgotten_with_its_file(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "events.jsonl"
    events = EventLog(path, clock, max_file_bytes=10_000)
    for number in range(2000):
        events.write(finished(number))
        refuse(events)
        clock.advance(REFUSED_EVERY_S / 3)
        if number == 1000:  # a restart in the middle knows what came before
            events.close()
            events = EventLog(path, clock, max_file_bytes=10_000)
    events.close()
    assert len(files_of(path)) == 1 + KEPT_OLD_FILES
    assert all(file.stat().st_size <= 10_000 for file in files_of(path))
    kept = read_events(path)
    numbers = numbers_of(kept)
    assert numbers == list(range(numbers[0], 2000)), "what is kept is the newest part, in order"
    assert count_refusals(kept) == {"false_reward": 2000}
    result = node_result("ada", "", (), kept, {})
    assert result.refusals == {"false_reward": 2000}


def test_an_event_larger_than_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = EventLog(path, max_file_bytes=1000)
    for _ in range(2):
        events.write(NodeRestored(held=(("x" * 100, True),) * 50))
    events.close()
    assert [kind_of(event) for event in read_events(path)] == ["restored", "earlier", "restored"]


@pytest.mark.parametrize("seed", range(5))
def test_a_reader_beside_a_rotating_log_gets_every_event_once_and_in_order(tmp_path: Path, seed: int) -> None:
    rng, path = random.Random(seed), tmp_path / "events.jsonl"
    events, tail = EventLog(path, max_file_bytes=2000), EventTail(path)
    got: list[Event] = []
    for number in range(600):
        events.write(finished(number))
        if rng.random() < 0.05:
            got += tail.read()
    events.close()
    got += tail.read()
    assert tail.read() == []
    assert numbers_of(got) == list(range(600))


def test_a_reader_that_opens_files_while_they_move_sees_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    events, tail = EventLog(path, max_file_bytes=200), EventTail(path)
    events.write(LoopFailed(loop="0", error=""))
    has_moved = False

    def moving(name: Path, number: int) -> Path:
        nonlocal has_moved
        if number == 1 and not has_moved:  # the newest is open already: it moves now
            has_moved = True
            events.write(LoopFailed(loop="1", error="x" * 190))
        return old_file(name, number)

    monkeypatch.setattr("swarm.telemetry.event_log.old_file", moving)
    first = tail.read()
    monkeypatch.undo()
    assert has_moved and [failure.loop for failure in events_of(LoopFailed, [*first, *tail.read()])] == ["0", "1"]
    events.close()


def test_a_kill_between_the_two_halves_of_a_rotation_loses_no_count(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = EventLog(path)
    for _ in range(7):
        refuse(events)
    events.close()
    path.replace(old_file(path, 1))
    events = EventLog(path)
    refuse(events)
    events.close()
    assert count_refusals(read_events(path)) == {"false_reward": 8}
    assert [kind_of(event) for event in read_events(path)] == ["refused", "refused", "earlier", "refused"]


def test_garbage_among_old_events_does_not_stop_a_node(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    good = json.dumps({"kind": "refused", "reason": "too_old", "producer": ""}, separators=(",", ":"))
    path.write_bytes(b'\0\0\0"kind":"refused"\n' + good.encode() + b"\n")
    events = EventLog(path, max_file_bytes=1)
    refuse(events)
    events.close()
    earlier = json.loads(path.read_bytes().splitlines()[0])
    assert earlier["kind"] == "earlier" and earlier["refused"] == {"too_old": 1}


def test_a_log_that_cannot_be_rotated_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    events = EventLog(path, max_file_bytes=200)
    old_file(path, KEPT_OLD_FILES).mkdir()
    old_file(path, KEPT_OLD_FILES - 1).write_text("")
    for number in range(10):
        events.write(finished(number))
    events.close()
    assert "was not rotated" in caplog.text and events.num_lost == 0
    assert path.read_bytes().count(b"finished") == 10
