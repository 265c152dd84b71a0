"""Rules about the disk of a node: whether it takes what is written, and gives it back as it was."""

from typing import Final

from swarm.causes.finding import Diagnosed, Gravity
from swarm.causes.snapshot import Snapshot, shortened
from swarm.events import DiskFull, StoreDamaged, events_of

FULL_FOR_S: Final = 60.0  # since the newest event of a full disk
STATUS_WITHOUT_ROOM: Final = "the status is not written until there is room"


def is_status_without_room(snapshot: Snapshot) -> bool:
    """Whether status.json is old because the disk is full, as the node logged since."""
    at_s = snapshot.value("at_s", 0.0)
    return any(each.message == STATUS_WITHOUT_ROOM and each.at_s >= at_s for each in snapshot.warnings)


def disk_full(snapshot: Snapshot) -> Diagnosed | None:
    """What the node writes finds no room."""
    full = [event for event in events_of(DiskFull, snapshot.events) if "[Errno 2]" not in event.error]  # a folder gone
    newest = full[-1] if full else None
    is_recent = newest is not None and snapshot.at_s - newest.at_s <= FULL_FOR_S
    is_full, num_lost = snapshot.value("is_store_full", False), snapshot.value("num_events_lost", 0)
    has_put_since = newest is not None and any(put.at_s > newest.at_s for put in snapshot.puts)
    is_unwritten = is_status_without_room(snapshot)
    if not (is_full or num_lost or is_unwritten or (is_recent and not has_put_since)):
        return None
    error = "" if newest is None else shortened(newest.error)
    evidence = [f"the newest write that failed: {error} (disk_full in events.jsonl)"] if error else []
    evidence += [f"{num_lost} events could not be written (num_events_lost in status.json)"] if num_lost else []
    evidence += [f"{STATUS_WITHOUT_ROOM} (warnings.jsonl)"] if is_unwritten else []
    evidence += ["groups of this node are dropped (is_store_full in status.json)"] if is_full else []
    if "budget" in error:
        claim = "groups of this node are dropped: the group store has used up exchange.store_bytes"
        fix = snapshot.set_key("exchange.store_bytes", 2 * 2**30, why=" (bytes, more than now)")
    else:
        lost = f"{num_lost} events could not be written" if num_lost else "what the node writes is lost"
        where = "the disk" if error or num_lost or is_unwritten else "the disk, or exchange.store_bytes,"
        claim = ("groups of this node are dropped: " if is_full else f"{lost}: ") + f"{where} has no room; make room"
        fix = f"make room on the disk of {snapshot.directory} (df -h {snapshot.directory}); the node goes on by itself"
    return Diagnosed(name="disk_full", claim=claim, evidence=tuple(evidence), fix=fix, gravity=Gravity.STOPS)


def store_damaged(snapshot: Snapshot) -> Diagnosed | None:
    """The disk changed the group store, which was moved aside."""
    damaged = events_of(StoreDamaged, snapshot.events)
    if not damaged:
        return None
    return Diagnosed(
        name="store_damaged",
        claim="the group store was damaged and moved aside; the node went on with an empty one",
        evidence=tuple(f"{event.moved_to} (store_damaged in events.jsonl)" for event in damaged[-3:]),
        fix="check the disk (smartctl, dmesg); then delete the moved file",
        gravity=Gravity.WASTES,
    )
