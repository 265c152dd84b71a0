"""In-memory group store with the contract of the store on disk: the disk of the virtual swarm.

Invariant: a stored group survives its node for as long as this object lives; only a power cut takes back writes, the
newest first, and only those that the real store does not sync.
"""

import errno
import math
import random
import secrets
from collections.abc import Collection
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from swarm.clock import Clock
from swarm.errors import StorageFull, is_disk_full
from swarm.exchange.group_database import GIVEN_UP_USES, MAX_PLACES, MAX_TOMBSTONES, TOMBSTONE_HORIZON_S, is_whole
from swarm.exchange.replay_tables import newest_within
from swarm.flow import BoundedTable
from swarm.interfaces import BeforeWrite
from swarm.types import Cursor, Digest, Draw, DrawPlace, ScoredGroup, SealedGroup

_NOT_ON_DISK: Final = frozenset({"_clock", "_max_bytes", "_before_write", "_states"})


class MemoryGroupStore:
    """`GroupStore` in dictionaries. `close` keeps everything, since the object stands for the disk.

    Example:
        store = MemoryGroupStore(ManualClock(), max_bytes=2**20)
    """

    def __init__(
        self, clock: Clock, max_bytes: int, before_write: BeforeWrite | None = None, epoch: str | None = None
    ) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._before_write = before_write
        self._epoch = secrets.token_hex(8) if epoch is None else epoch
        self._head = Cursor(epoch=self._epoch, sequence=0)
        self._num_bytes = 0
        self._log: dict[int, tuple[Cursor, ScoredGroup, SealedGroup]] = {}  # by sequence, ascending
        self._positions: dict[Digest, Cursor] = {}
        self._tombstones: dict[Digest, float] = {}  # digest -> time of deletion, ascending
        self._draws: dict[int, Draw] = {}
        self._places = BoundedTable[int, tuple[DrawPlace, ...]](MAX_PLACES)  # of the draws, by step
        self._steps_of: dict[Digest, list[int]] = {}  # journalled draws that used a group
        self._maybe_gone: set[int] = set()  # draws whose groups may all be deleted, so that the journal may forget them
        self._given_up: set[Digest] = set()
        self._notes: dict[str, str] = {}
        self._newest_seen_s = -math.inf
        self._is_by_age = True  # the log is in the order of first sight, so that `forget` may stop early
        self._states: list[dict[str, Any]] | None = None  # the synced one, then later ones; None: not recorded

    async def put(self, scored: ScoredGroup, sealed: SealedGroup) -> Cursor:
        self._prepare(sealed.size_bytes)
        if sealed.digest not in self._positions:
            if self._num_bytes + sealed.size_bytes > self._max_bytes:
                message = f"{self._num_bytes} + {sealed.size_bytes} bytes exceed the budget of {self._max_bytes}"
                raise StorageFull(errno.ENOSPC, message)
            self._head = Cursor(epoch=self._epoch, sequence=self._head.sequence + 1)
            self._log[self._head.sequence] = (self._head, scored, sealed)
            self._positions[sealed.digest] = self._head
            self._num_bytes += sealed.size_bytes
            self._is_by_age = self._is_by_age and scored.first_seen_s >= self._newest_seen_s
            self._newest_seen_s = scored.first_seen_s
            self._note_state(is_synced=False)
        return self._positions[sealed.digest]

    async def get(self, digest: Digest) -> SealedGroup | None:
        position = self._positions.get(digest)
        if position is None:
            return None
        sealed = self._log[position.sequence][2]
        return sealed if is_whole(sealed) else None

    async def contains(self, digest: Digest) -> bool:
        """True for held groups, and for deleted ones until their tombstones are dropped."""
        return digest in self._positions or digest in self._tombstones

    async def since(self, cursor: Cursor, limit: int, own_only: bool) -> list[tuple[Cursor, SealedGroup]]:
        after = cursor.sequence if cursor.epoch == self._epoch else 0
        found: list[tuple[Cursor, SealedGroup]] = []
        for position, scored, sealed in reversed(self._log.values()):
            if position.sequence <= after:
                break
            if (scored.is_made_here or not own_only) and is_whole(sealed):
                found.append((position, sealed))
        return found[::-1][:limit]

    async def head(self) -> Cursor:
        """Position of the newest entry; deletions do not move it back."""
        return self._head

    async def record_draw(self, draw: Draw) -> None:
        self._prepare(64 * (len(draw.groups) + len(draw.zero_variance_digests)))
        self._write(draw)
        self._note_state(is_synced=True)

    async def journal(self, from_step: int) -> list[tuple[int, tuple[Digest, ...]]]:
        return [
            (draw.step, tuple(drawn.scored.digest for drawn in draw.groups)) for draw in self._drawn_from(from_step)
        ]

    async def draws(self, from_step: int) -> list[Draw]:
        draws: list[Draw] = []
        for draw in self._drawn_from(from_step):
            if not all([await self.get(drawn.scored.digest) for drawn in draw.groups]):
                break
            draws.append(draw)
        return draws

    async def places(self, limit: int) -> list[DrawPlace]:
        newest: list[DrawPlace] = []
        for step in sorted(self._places, reverse=True):
            newest += reversed(self._places[step])
            if len(newest) >= limit:
                break
        return newest[:limit][::-1]

    async def abandon(self, first_step: int, last_step: int) -> None:
        self._prepare(64 * (last_step + 1 - first_step))
        for step in range(first_step, last_step + 1):
            draw = self._draws.get(step, Draw(step=step, groups=(), num_zero_variance=0))
            self._write(replace(draw, groups=(), zero_variance_digests=_digests_of(draw)))
        self._note_state(is_synced=True)

    async def give_up(self, step: int, digest: Digest) -> None:
        self._prepare(64)
        draw = self._draws.get(step)
        if draw is not None and any(drawn.scored.digest == digest for drawn in draw.groups):
            kept = tuple(drawn for drawn in draw.groups if drawn.scored.digest != digest)
            self._write(replace(draw, groups=kept, zero_variance_digests=(*draw.zero_variance_digests, digest)))
            self._given_up.add(digest)
            self._note_state(is_synced=True)

    async def put_note(self, key: str, text: str) -> None:
        self._prepare(len(key) + len(text))
        self._notes.pop(key, None)
        if text:
            self._notes[key] = text
        self._note_state(is_synced=True)

    async def notes(self) -> dict[str, str]:
        return dict(self._notes)

    async def uses(self) -> dict[Digest, int]:
        uses: dict[Digest, int] = {}
        for draw in self._draws.values():
            for digest in _digests_of(draw):
                uses[digest] = uses.get(digest, 0) + (GIVEN_UP_USES if digest in self._given_up else 1)
        return uses

    async def load_scored(self, limit: int, max_bytes: float = math.inf) -> list[ScoredGroup]:
        return self.newest(limit, max_bytes)

    def newest(self, limit: int, max_bytes: float = math.inf) -> list[ScoredGroup]:
        """The newest groups that are whole, oldest first: at most `limit`, within `max_bytes` of memory."""
        newest = islice(reversed(self._log.values()), limit)
        return newest_within(max_bytes, (scored for _, scored, sealed in newest if is_whole(sealed)))

    async def forget(
        self, before_s: float, max_bytes: int, keep_from_step: int | None = None, keep: Collection[Digest] = ()
    ) -> int:
        victims = self._victims(before_s, max_bytes, keep_from_step, keep)
        now_s = self._clock.now_s()
        for sequence in victims:
            sealed = self._log.pop(sequence)[2]
            self._num_bytes -= sealed.size_bytes
            del self._positions[sealed.digest]
            self._tombstones[sealed.digest] = now_s
            self._maybe_gone.update(self._steps_of.get(sealed.digest, ()))
        self._drop_draws(keep_from_step)
        self._drop_tombstones()
        self._note_state(is_synced=False)
        return len(victims)

    async def close(self) -> None:
        """Does nothing: there is nothing to flush."""

    def position_of(self, digest: str) -> Cursor | None:
        """Position in the log of the group with this digest (hexadecimal); None if the group is not held."""
        return self._positions.get(bytes.fromhex(digest))

    # --- faults of a disk -------------------------------------------------------------------------

    def remember_states(self) -> None:
        """Starts to record the states of the disk, to which `cut_power` can go back."""
        self._states = [self._state()]

    def cut_power(self, rng: random.Random) -> None:
        """Simulates a power cut: drops the newest unsynced writes (none to all) and begins a new log epoch."""
        assert self._states is not None, "remember_states was not called"
        vars(self).update(rng.choice(self._states))
        self.remember_states()
        self._begin_epoch(f"{self._epoch}+")

    def rot(self, rng: random.Random) -> None:
        """Flips a bit in about a quarter of the stored bodies, at least in one."""
        for sequence in [s for s in self._log if rng.random() < 0.25] or list(self._log)[:1]:
            position, scored, sealed = self._log[sequence]
            body = bytearray(sealed.body)
            body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
            self._log[sequence] = (position, scored, replace(sealed, body=bytes(body)))

    def _begin_epoch(self, epoch: str) -> None:
        self._epoch = epoch
        self._head = replace(self._head, epoch=epoch)
        self._log = {s: (replace(at, epoch=epoch), scored, sealed) for s, (at, scored, sealed) in self._log.items()}
        self._positions = {digest: replace(at, epoch=epoch) for digest, at in self._positions.items()}

    def _note_state(self, *, is_synced: bool) -> None:
        if self._states is not None:
            self._states = [*([] if is_synced else self._states), self._state()]

    def _state(self) -> dict[str, Any]:
        """A copy of everything on the disk; groups and draws are never changed in place."""
        state = {name: copy(value) for name, value in vars(self).items() if name not in _NOT_ON_DISK}
        return {**state, "_steps_of": {digest: list(steps) for digest, steps in self._steps_of.items()}}

    # --- inside -----------------------------------------------------------------------------------

    def _prepare(self, size_bytes: int) -> None:
        """Calls `before_write`, with which a fault plan makes the disk full. Raises StorageFull."""
        if self._before_write is None:
            return
        try:
            self._before_write(size_bytes)
        except OSError as error:
            if is_disk_full(error):
                raise StorageFull(errno.ENOSPC, str(error)) from error
            raise

    def _victims(
        self, before_s: float, max_bytes: int, keep_from_step: int | None, keep: Collection[Digest]
    ) -> list[int]:
        """Sequences of the groups that `forget` deletes, oldest first."""
        kept: set[Digest] | None = None
        num_bytes, victims = self._num_bytes, list[int]()
        for sequence, (_, scored, sealed) in self._log.items():
            if scored.first_seen_s >= before_s and num_bytes <= max_bytes:
                if self._is_by_age:
                    break
                continue
            if kept is None:
                kept_draws = [] if keep_from_step is None else self._drawn_from(keep_from_step)
                kept = {*keep, *(digest for draw in kept_draws for digest in _digests_of(draw))}
            if sealed.digest not in kept:
                victims.append(sequence)
                num_bytes -= sealed.size_bytes
        return victims

    def _drawn_from(self, step: int) -> list[Draw]:
        return [self._draws[key] for key in sorted(key for key in self._draws if key >= step)]

    def _write(self, draw: Draw) -> None:
        """Journals a draw in place of an earlier one of the same step."""
        if draw.step in self._draws:
            self._erase(draw.step)
        self._draws[draw.step] = draw
        if draw.places:
            self._places[draw.step] = draw.places
        for digest in _digests_of(draw):
            self._steps_of.setdefault(digest, []).append(draw.step)
        self._maybe_gone.add(draw.step)

    def _erase(self, step: int) -> None:
        for digest in _digests_of(self._draws.pop(step)):
            steps = self._steps_of[digest]
            steps.remove(step)
            if not steps:
                del self._steps_of[digest]

    def _drop_tombstones(self) -> None:
        """Removes the tombstones past the horizon, and the oldest above MAX_TOMBSTONES."""
        horizon_s = self._clock.now_s() - TOMBSTONE_HORIZON_S
        while self._tombstones:
            oldest = next(iter(self._tombstones))
            if self._tombstones[oldest] >= horizon_s and len(self._tombstones) <= MAX_TOMBSTONES:
                break
            del self._tombstones[oldest]

    def _drop_draws(self, keep_from_step: int | None) -> None:
        """Removes draws whose groups are all deleted, except the newest draw and those of `keep_from_step` or later."""
        newest = max(self._draws, default=0)
        for step in sorted(self._maybe_gone):
            if step == newest or (keep_from_step is not None and step >= keep_from_step):
                continue
            self._maybe_gone.discard(step)
            if self._positions.keys().isdisjoint(_digests_of(self._draws[step])):
                self._erase(step)


def _digests_of(draw: Draw) -> tuple[Digest, ...]:
    """Digests of the groups that a draw used up."""
    return (*[drawn.scored.digest for drawn in draw.groups], *draw.zero_variance_digests)
