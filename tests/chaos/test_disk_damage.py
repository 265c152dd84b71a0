"""A store's directory, damaged at random between two lives: what was promised is there, nothing false is handed out.

Model: the store in memory, which gave the same answers to the same calls. What the disk may lose by a power cut, or
by a log that is cut, old or changed, is a tail of what was done: the second life is the model after an earlier call,
after the last synced one or later where the power was cut. Changed pages of the file may cost more, up to a new store.
"""

import asyncio
import os
import random
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from sealed_groups import Entry, make_entry

from swarm.clock import ManualClock
from swarm.errors import ConfigError
from swarm.exchange import group_file
from swarm.exchange.group_store import SqliteGroupStore
from swarm.interfaces import GroupStore
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.types import Cursor, Digest, Draw, DrawnGroup

NUM_LIVES: Final = 6
NUM_DAMAGES: Final = int(os.environ.get("SWARM_DISK_DAMAGES", "60"))
NUM_CALLS: Final = 30
PAGE: Final = 4096

Call = tuple[Any, ...]


def _entry(number: int) -> Entry:
    text = "".join(random.Random(number).choices("abcdefgh", k=400))  # does not compress away
    return make_entry(number, is_made_here=number % 2 == 0, first_seen_s=float(number), texts=(text, text[::-1]))


ENTRIES: Final = [_entry(number) for number in range(40)]
SEALED: Final = {sealed.digest: sealed for _, sealed in ENTRIES}


def _calls(rng: random.Random) -> list[Call]:
    """Calls of one life: groups come in, are drawn from, and the oldest are forgotten."""
    calls: list[Call] = []
    num_put = step = 0
    for _ in range(NUM_CALLS):
        kind = rng.choice(["put", "put", "put", "draw", "draw", "abandon", "forget", "note"])
        if kind == "put" or num_put < 3:
            calls.append(("put", num_put))
            num_put += 1
        elif kind == "draw":
            step += 1
            calls.append(("draw", step, rng.sample(range(num_put), rng.randint(1, 3))))
        elif kind == "abandon" and step:
            calls.append(("abandon", step, step))
        elif kind == "forget":
            calls.append(("forget", float(rng.randint(0, num_put // 3)), max(1, step - 3)))
        else:
            calls.append(("note", f"{rng.random()}"))
    return calls


async def _carry_out(store: GroupStore, call: Call) -> None:
    match call:
        case ("put", number):
            await store.put(*ENTRIES[number])
        case ("draw", step, numbers):
            groups = tuple(DrawnGroup(scored=ENTRIES[number][0], age_steps=1, use=1) for number in numbers)
            await store.record_draw(Draw(step=step, groups=groups, num_zero_variance=0))
        case ("abandon", first, last):
            await store.abandon(first, last)
        case ("forget", before_s, keep_from_step):
            await store.forget(before_s, 10**6, keep_from_step)
        case _:
            await store.put_note("attempts", call[1])


def _is_synced(call: Call) -> bool:
    return call[0] not in ("put", "forget")


async def _contents(store: GroupStore) -> tuple[object, ...]:
    """Everything that a reader can see, but the epoch."""
    draws = await store.draws(0)
    return (
        [(cursor.sequence, sealed) for cursor, sealed in await store.since(Cursor(), 1000, own_only=False)],
        (await store.head()).sequence,
        [await store.contains(digest) for digest in SEALED],
        await store.journal(0),
        await store.uses(),
        await store.notes(),
        [(scored.digest, scored.rewards.tobytes()) for scored in await store.load_scored(1000)],
        [(draw.step, [drawn.scored.digest for drawn in draw.groups]) for draw in draws],
    )


@dataclass(frozen=True, kw_only=True)
class Life:
    """Calls of one life, the state that a reader would have seen after each, and its files then."""

    calls: Sequence[Call]
    contents: Sequence[tuple[object, ...]]  # before the first call, and after each
    wal_bytes: Sequence[int]  # size of the log, likewise
    directory: Path  # as a kill left it after the last call; beside it the log after each


async def _live(directory: Path, seed: int) -> Life:
    rng, clock = random.Random(f"life {seed}"), ManualClock()
    model = MemoryGroupStore(clock, 10**6)
    store = await SqliteGroupStore.open(directory / "running" / "groups.sqlite", clock, 10**6)
    wal = directory / "running" / "groups.sqlite-wal"
    calls, contents = _calls(rng), [await _contents(model)]
    wal_bytes = [wal.stat().st_size]
    for number, call in enumerate(calls, start=1):
        await _carry_out(model, call)
        await _carry_out(store, call)
        contents.append(await _contents(model))
        wal_bytes.append(wal.stat().st_size)
        shutil.copy(wal, directory / f"wal-{number}")
    assert await _contents(store) == contents[-1]
    dead = directory / "dead"
    shutil.copytree(directory / "running", dead, ignore=shutil.ignore_patterns("*-shm"))
    await store.close()
    return Life(calls=calls, contents=contents, wal_bytes=wal_bytes, directory=directory)


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> list[Life]:
    folder = tmp_path_factory.mktemp("lives")
    return [asyncio.run(_live(folder / str(seed), seed)) for seed in range(NUM_LIVES)]


# --- what a disk does -------------------------------------------------------------------------


def _cut_power(life: Life, file: Path, rng: random.Random) -> int:
    """Of the log a synced part is there, and of the rest a beginning: whole pages, a torn one, or rubbish after it."""
    synced = max([0, *(n for n, call in enumerate(life.calls, start=1) if _is_synced(call))])
    wal = file.with_name(file.name + "-wal")
    data = wal.read_bytes()
    size = rng.randint(life.wal_bytes[synced], len(data))
    rest = rng.choice([b"", bytes(len(data) - size), rng.randbytes(len(data) - size)])
    wal.write_bytes(data[:size] + rest)
    return synced


def _cut_log(life: Life, file: Path, rng: random.Random) -> int:
    wal = file.with_name(file.name + "-wal")
    data = wal.read_bytes()
    wal.write_bytes(data[: rng.randrange(len(data))])
    return 0


def _flip_log(life: Life, file: Path, rng: random.Random) -> int:
    _flip(file.with_name(file.name + "-wal"), rng)
    return 0


def _take_old_log(life: Life, file: Path, rng: random.Random) -> int:
    number = rng.randint(1, len(life.calls))
    shutil.copy(life.directory / f"wal-{number}", file.with_name(file.name + "-wal"))
    return number


def _delete_log(life: Life, file: Path, rng: random.Random) -> int:
    file.with_name(file.name + "-wal").unlink()
    return 0


def _flip(file: Path, rng: random.Random) -> None:
    """A bit, or some bytes."""
    data = bytearray(file.read_bytes())
    start, count = rng.randrange(len(data)), rng.choice([1, 1, 16, 512])
    for index in range(start, min(start + count, len(data))):
        data[index] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def _truncate(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    size = rng.randrange(len(data))
    file.write_bytes(data[: size // PAGE * PAGE if rng.random() < 0.5 else size])


def _tear(file: Path, rng: random.Random) -> None:
    """A page of which the second half is another page's, zeros, or rubbish."""
    data = bytearray(file.read_bytes())
    page, other = (rng.randrange(len(data) // PAGE) * PAGE for _ in range(2))
    at, to = page + PAGE // 2, page + PAGE
    data[at:to] = rng.choice([bytes(PAGE // 2), rng.randbytes(PAGE // 2), data[other + PAGE // 2 : other + PAGE]])
    file.write_bytes(data)


def _swap(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    first, second = (rng.randrange(len(data) // PAGE) * PAGE for _ in range(2))
    one, two = bytes(data[first : first + PAGE]), bytes(data[second : second + PAGE])
    data[first : first + PAGE], data[second : second + PAGE] = two, one
    file.write_bytes(data)


LOSSES: Final[Sequence[Callable[[Life, Path, random.Random], int]]] = (
    _cut_power,
    _cut_power,
    _cut_log,
    _flip_log,
    _take_old_log,
    _delete_log,
)
DAMAGES: Final[Sequence[Callable[[Path, random.Random], None]]] = (_flip, _flip, _truncate, _tear, _swap)


async def _second_life(file: Path, look: Callable[[SqliteGroupStore], Awaitable[None]]) -> None:
    store = await SqliteGroupStore.open(file, ManualClock(), 10**6)
    try:
        await look(store)
    finally:
        await store.close()


@pytest.mark.parametrize("seed", range(NUM_DAMAGES))
def test_a_lost_tail_is_all_that_a_cut_old_or_changed_log_costs(lives: list[Life], tmp_path: Path, seed: int) -> None:
    rng = random.Random(f"loss {seed}")
    life, lose = rng.choice(lives), rng.choice(LOSSES)
    shutil.copytree(life.directory / "dead", tmp_path / "node")
    file = tmp_path / "node" / "groups.sqlite"
    least = lose(life, file, rng)

    async def look(store: SqliteGroupStore) -> None:
        assert store.moved_aside is None
        found = await _contents(store)
        assert found in life.contents[least:], f"{lose.__name__}: nothing that ever was since call {least}"

    asyncio.run(_second_life(file, look))


@pytest.mark.parametrize("seed", range(NUM_DAMAGES))
def test_a_changed_file_is_never_believed(lives: list[Life], tmp_path: Path, seed: int) -> None:
    problems = asyncio.run(_after_damage(lives, tmp_path, seed))
    assert not problems, problems


async def _after_damage(lives: list[Life], folder: Path, seed: int) -> list[str]:
    """Groups and draws that a second life hands out and the first never had."""
    rng = random.Random(f"damage {seed}")
    life, damage = rng.choice(lives), rng.choice(DAMAGES)
    shutil.copytree(life.directory / "dead", folder / "node")
    file = folder / "node" / "groups.sqlite"
    whole = await SqliteGroupStore.open(file, ManualClock(), 10**6)
    await whole.close()  # the log is in the file now
    damage(file, rng)
    problems: list[str] = []

    async def look(store: SqliteGroupStore) -> None:
        problems.extend(await _falsehoods(store, life))
        await store.put(*ENTRIES[-1])
        await store.record_draw(
            Draw(step=1000, groups=(DrawnGroup(scored=ENTRIES[-1][0], age_steps=0, use=1),), num_zero_variance=0)
        )
        if [draw.step for draw in await store.draws(1000)] != [1000]:
            problems.append("it does not go on")

    try:
        await _second_life(file, look)
    except ConfigError as error:
        if not any(word in str(error) for word in ("moves the file aside", "move it away")):
            problems.append(f"no sentence: {error}")
    return [f"{damage.__name__}: {problem}" for problem in problems]


async def _falsehoods(store: SqliteGroupStore, life: Life) -> list[str]:
    problems: list[str] = []
    for _, sealed in await store.since(Cursor(), 1000, own_only=False):
        if SEALED.get(sealed.digest) is None or SEALED[sealed.digest].body != sealed.body:
            problems.append("a body that nobody wrote")
    rewards = {scored.digest: scored.rewards.tobytes() for scored, _ in ENTRIES}
    for scored in await store.load_scored(1000):
        if rewards.get(scored.digest) != scored.rewards.tobytes():
            problems.append("other rewards than were written")
    drawn: dict[int, list[list[Digest]]] = {}
    for call in life.calls:
        if call[0] == "draw":
            drawn.setdefault(call[1], []).append([ENTRIES[number][0].digest for number in call[2]])
    for draw in await store.draws(0):
        digests = [each.scored.digest for each in draw.groups]
        if digests and digests not in drawn.get(draw.step, []):
            problems.append(f"draw {draw.step} as it never was")
    return problems


# --- the promises can be broken ---------------------------------------------------------------


def test_a_power_cut_gives_the_log_another_epoch(
    lives: list[Life], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(lives[0].directory / "dead", tmp_path / "node")
    file = tmp_path / "node" / "groups.sqlite"
    epochs: list[str] = []

    async def look(store: SqliteGroupStore) -> None:
        epochs.append((await store.head()).epoch)

    for boot, is_closed in (("", True), ("another start", False), ("a third", True), ("a fourth", True)):
        if boot:
            monkeypatch.setattr(group_file, "boot_id", lambda boot=boot: boot)
        if is_closed:
            asyncio.run(_second_life(file, look))
            continue
        shutil.copytree(lives[0].directory / "dead", tmp_path / "cut")
        asyncio.run(_second_life(tmp_path / "cut" / "groups.sqlite", look))
    same, cut, later, last = epochs
    assert cut != same, "the machine went down while it was open"
    assert later == last == same, "it was closed in order"
