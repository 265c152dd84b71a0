"""Groups and draw journal in the SQLite file of a store: one plain function for each transaction.

Invariant: every record that decides about draws is on the disk when its function returns, and with it every group
stored before; a power cut can lose only later groups. A digest stays known for longer than any group may be used, so a
replay never counts as new. A row that the disk changed never becomes a group, and is sent to no peer. Not
thread-safe: `SqliteGroupStore` makes all calls on one thread.
"""

import errno
import hashlib
import json
import logging
import math
import zlib
from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np

from swarm.episode import EpisodeOutcome, outcomes_from_json, outcomes_to_json
from swarm.errors import StorageFull
from swarm.exchange.checks.reward_recheck import clamp_logprobs
from swarm.exchange.group_file import GroupFile
from swarm.exchange.replay_tables import newest_within
from swarm.types import (
    Correction,
    Digest,
    Draw,
    DrawnGroup,
    DrawPlace,
    Refused,
    ScoredGroup,
    SealedGroup,
    short,
)
from swarm.wire.envelopes import open_group

logger = logging.getLogger(__name__)

GIVEN_UP_USES: Final = 2**30  # count of `uses` for a group that is never to be drawn again
TOMBSTONE_HORIZON_S: Final = 24 * 3600.0  # far beyond any max_age_s: older groups are refused as too old anyway
MAX_TOMBSTONES: Final = 1_000_000
MAX_PLACES: Final = 4096  # steps whose places the journal keeps
_NOTE: Final = "note "  # prefix of the keys of notes in the table of meta data

SEALED_COLUMNS: Final = "g.sequence, g.digest, g.producer, g.public_key, g.signature, g.is_compressed, b.body"
SCORED_COLUMNS: Final = (
    f"{SEALED_COLUMNS}, g.is_made_here, g.rewards, g.correction, g.first_seen_s, g.size_bytes, g.outcomes"
)
_MAX_OPENED_BYTES: Final = 64 * 2**20  # the largest max_group_bytes that a configuration allows
_FROM_GROUPS: Final = "FROM groups g JOIN bodies b USING (sequence)"


class GroupDatabase(GroupFile):
    """Groups, tombstones and the draw journal of one node. Methods block; every writing method raises StorageFull."""

    # --- groups ----------------------------------------------------------------------------------

    def put_all(self, batch: Sequence[tuple[ScoredGroup, SealedGroup]]) -> list[int | StorageFull]:
        """Stores a batch; returns each group's sequence or its StorageFull. Raises StorageFull if the disk is full."""
        results: list[int | StorageFull] = []
        num_bytes = self._num_bytes
        with self._transaction(sum(sealed.size_bytes for _, sealed in batch), is_synced=False):
            for scored, sealed in batch:
                held = self._rows("SELECT sequence FROM groups WHERE digest = ?", (sealed.digest,))
                if held:
                    results.append(int(held[0][0]))
                elif num_bytes + sealed.size_bytes > self._max_bytes:
                    message = f"{num_bytes} + {sealed.size_bytes} bytes exceed the budget of {self._max_bytes}"
                    results.append(StorageFull(errno.ENOSPC, message))
                else:
                    results.append(self._insert(scored, sealed))
                    num_bytes += sealed.size_bytes
        self._num_bytes = num_bytes
        return results

    def get(self, digest: Digest) -> SealedGroup | None:
        """The sealed group, or None if it is not held or its body was damaged."""
        rows = self._rows(f"SELECT {SEALED_COLUMNS} {_FROM_GROUPS} WHERE g.digest = ?", (digest,))
        sealed = sealed_of(rows[0]) if rows else None
        return sealed if sealed is not None and is_whole(sealed) else None

    def contains(self, digest: Digest) -> bool:
        """True for groups that are held, and for deleted groups whose tombstones are kept."""
        query = "SELECT 1 FROM groups WHERE digest = ? UNION ALL SELECT 1 FROM tombstones WHERE digest = ? LIMIT 1"
        return bool(self._rows(query, (digest, digest)))

    def since(self, after: int, limit: int, own_only: bool) -> list[tuple[int, SealedGroup]]:
        """Up to `limit` pairs of sequence and group after a sequence, oldest first, without damaged groups."""
        query = (
            f"SELECT {SEALED_COLUMNS} {_FROM_GROUPS} WHERE g.is_made_here IN (1, ?) AND g.sequence > ? "
            "ORDER BY g.sequence LIMIT ?"
        )
        while rows := self._rows(query, (1 if own_only else 0, after, limit)):
            found = [(row[0], sealed) for row in rows for sealed in (sealed_of(row),) if is_whole(sealed)]
            if found:
                return found
            after = rows[-1][0]
        return []

    def head(self) -> int:
        """Sequence of the newest group, 0 before the first; it never goes back when groups are deleted."""
        rows = self._rows("SELECT seq FROM sqlite_sequence WHERE name = 'groups'")
        return rows[0][0] if rows else 0

    def load_scored(self, limit: int, max_bytes: float = math.inf) -> list[ScoredGroup]:
        """The newest groups, at most `limit` and `max_bytes` of memory, oldest first; damaged ones are left out."""
        query = f"SELECT {SCORED_COLUMNS} {_FROM_GROUPS} ORDER BY g.sequence DESC LIMIT ?"
        found = map(scored_of, self._connection.execute(query, (limit,)))
        return newest_within(max_bytes, (scored for scored in found if scored is not None))

    # --- draw journal ----------------------------------------------------------------------------

    def record_draw(self, draw: Draw) -> None:
        """Journals a draw; replaces an earlier draw of the same step."""
        rows = [
            (draw.step, position, drawn.scored.digest, drawn.age_steps, drawn.use, 0, drawn.is_established)
            for position, drawn in enumerate(draw.groups)
        ]
        rows += [
            (draw.step, len(rows) + i, digest, 0, 1, 1, True) for i, digest in enumerate(draw.zero_variance_digests)
        ]
        weights = json.dumps(draw.source_weights)
        with self._transaction(len(weights) + 64 * len(rows)):
            self._connection.execute("DELETE FROM drawn WHERE step = ?", (draw.step,))
            self._connection.execute(
                "INSERT OR REPLACE INTO draws VALUES (?, ?, ?)", (draw.step, draw.num_zero_variance, weights)
            )
            self._connection.executemany("INSERT INTO drawn VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            if draw.places:
                old = draw.step - MAX_PLACES
                self._connection.execute("DELETE FROM places WHERE step = ? OR step <= ?", (draw.step, old))
                places = [(draw.step, i, p.producer, p.is_newcomer, *p.task) for i, p in enumerate(draw.places)]
                columns = "step, position, producer, is_newcomer, env, task_id"
                self._connection.executemany(f"INSERT INTO places ({columns}) VALUES (?, ?, ?, ?, ?, ?)", places)

    def places(self, limit: int) -> list[DrawPlace]:
        """The newest places of the journalled draws, at most `limit`, oldest first."""
        query = "SELECT producer, is_newcomer, env, task_id FROM places ORDER BY step DESC, position DESC LIMIT ?"
        rows = self._rows(query, (limit,))[::-1]
        return [DrawPlace(producer, bool(is_newcomer), (env, task_id)) for producer, is_newcomer, env, task_id in rows]

    def journal(self, from_step: int) -> list[tuple[int, tuple[Digest, ...]]]:
        """Draws from a step on, in order, with the digests of groups handed out and not abandoned or given up since."""
        rows = self._rows(
            "SELECT d.step, w.digest FROM draws d LEFT JOIN drawn w ON w.step = d.step AND NOT w.is_used_up "
            "WHERE d.step >= ? ORDER BY d.step, w.position",
            (from_step,),
        )
        digests: dict[int, list[Digest]] = {}
        for step, digest in rows:
            digests.setdefault(step, []).extend([] if digest is None else [digest])
        return [(step, tuple(found)) for step, found in digests.items()]

    def draws(self, from_step: int) -> list[Draw]:
        """Draws from a step on, with their groups; ends before the first draw that lost a group or is damaged."""
        draws: list[Draw] = []
        query = "SELECT step, num_zero_variance, source_weights FROM draws WHERE step >= ? ORDER BY step"
        for step, num_zero_variance, weights in self._connection.execute(query, (from_step,)).fetchall():
            entries = self._connection.execute(
                "SELECT digest, age_steps, use, is_established, is_used_up FROM drawn WHERE step = ? ORDER BY position",
                (step,),
            ).fetchall()
            with_signal = [(self._scored(entry[0]), *entry[1:4]) for entry in entries if not entry[4]]
            groups = tuple(
                DrawnGroup(scored=scored, age_steps=age, use=use, is_established=bool(is_established))
                for scored, age, use, is_established in with_signal
                if scored is not None
            )
            if len(groups) < len(with_signal):
                logger.warning("journalled draw lost a group", extra={"step": step})
                break
            digests = tuple(entry[0] for entry in entries if entry[4])
            try:
                source_weights = json.loads(weights)
            except ValueError as error:
                logger.warning("journalled draw is damaged", extra={"step": step, "error": str(error)})
                break
            draws.append(
                Draw(
                    step=step,
                    groups=groups,
                    num_zero_variance=num_zero_variance,
                    source_weights=source_weights,
                    zero_variance_digests=digests,
                )
            )
        return draws

    def abandon(self, first_step: int, last_step: int) -> None:
        """Marks the groups of draws as used up, so that none is handed out again; adds missing draws as empty ones."""
        steps = [(step,) for step in range(first_step, last_step + 1)]
        with self._transaction(64 * len(steps)):
            self._connection.execute(
                "UPDATE drawn SET is_used_up = 1 WHERE is_used_up = 0 AND step BETWEEN ? AND ?",
                (first_step, last_step),
            )
            self._connection.executemany("INSERT OR IGNORE INTO draws VALUES (?, 0, '{}')", steps)

    def uses(self) -> dict[Digest, int]:
        """Number of draws of each group that was ever drawn; at least GIVEN_UP_USES for a group that was given up."""
        counts = f"SUM(CASE is_used_up WHEN 2 THEN {GIVEN_UP_USES} ELSE 1 END)"
        return dict(self._rows(f"SELECT digest, {counts} FROM drawn GROUP BY digest"))

    def give_up(self, step: int, digest: Digest) -> None:
        """Removes a group from a journalled draw and from all later draws."""
        with self._transaction(64):
            self._connection.execute("UPDATE drawn SET is_used_up = 2 WHERE step = ? AND digest = ?", (step, digest))

    def put_note(self, key: str, text: str) -> None:
        """Stores a short text under a key; an empty text deletes the note."""
        with self._transaction(len(key) + len(text)):
            if text:
                self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_NOTE + key, text))
            else:
                self._connection.execute("DELETE FROM meta WHERE key = ?", (_NOTE + key,))

    def notes(self) -> dict[str, str]:
        """All notes, by key."""
        rows = self._rows("SELECT key, value FROM meta WHERE substr(key, 1, ?) = ?", (len(_NOTE), _NOTE))
        return {key.removeprefix(_NOTE): text for key, text in rows}

    # --- forgetting ------------------------------------------------------------------------------

    def forget(self, before_s: float, max_bytes: int, keep_from_step: int | None, keep: Collection[Digest] = ()) -> int:
        """Deletes groups first seen before `before_s`, and the oldest beyond `max_bytes`; returns how many.

        Groups in `keep` stay, and so do groups of draws from `keep_from_step` on (None: of no draw).
        """
        from_step, kept = 2**62 if keep_from_step is None else keep_from_step, frozenset(keep)
        victims: list[tuple[int, Digest]] = []
        num_bytes = self._num_bytes
        for sequence, digest, size_bytes, first_seen_s in self._connection.execute(
            "SELECT sequence, digest, size_bytes, first_seen_s FROM groups WHERE digest NOT IN"
            " (SELECT digest FROM drawn WHERE step >= ?) ORDER BY sequence",
            (from_step,),
        ):
            if digest not in kept and (first_seen_s < before_s or num_bytes > max_bytes):
                victims.append((sequence, digest))
                num_bytes -= size_bytes
        with self._transaction(0, is_synced=False):
            self._delete(victims, from_step)
        self._num_bytes = num_bytes
        return len(victims)

    def _delete(self, victims: Sequence[tuple[int, Digest]], keep: int) -> None:
        now_s = self._clock.now_s()
        sequences = [(sequence,) for sequence, _ in victims]
        self._connection.executemany("DELETE FROM bodies WHERE sequence = ?", sequences)  # first: frees pages
        self._connection.executemany("DELETE FROM groups WHERE sequence = ?", sequences)
        self._connection.executemany(
            "INSERT OR REPLACE INTO tombstones VALUES (?, ?)", [(digest, now_s) for _, digest in victims]
        )
        self._connection.execute("DELETE FROM tombstones WHERE deleted_s < ?", (now_s - TOMBSTONE_HORIZON_S,))
        excess = int(self._scalar("SELECT COUNT(*) FROM tombstones")) - MAX_TOMBSTONES
        if excess > 0:
            self._connection.execute(
                "DELETE FROM tombstones WHERE digest IN (SELECT digest FROM tombstones ORDER BY deleted_s LIMIT ?)",
                (excess,),
            )
        # Steps all of whose groups are gone can never be drawn again; the newest step numbers the next one.
        gone = (
            "SELECT step FROM draws WHERE step < ? AND step < (SELECT MAX(step) FROM draws) AND step NOT IN"
            " (SELECT step FROM drawn WHERE digest IN (SELECT digest FROM groups))"
        )
        steps = self._connection.execute(gone, (keep,)).fetchall()
        self._connection.executemany("DELETE FROM drawn WHERE step = ?", steps)
        self._connection.executemany("DELETE FROM draws WHERE step = ?", steps)

    # --- inside ----------------------------------------------------------------------------------

    def _insert(self, scored: ScoredGroup, sealed: SealedGroup) -> int:
        row = scored_columns(scored, sealed)
        query = f"INSERT INTO groups ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
        sequence = self._connection.execute(query, tuple(row.values())).lastrowid
        assert sequence is not None
        self._connection.execute("INSERT INTO bodies VALUES (?, ?)", (sequence, sealed.body))
        return sequence

    def _scored(self, digest: Digest) -> ScoredGroup | None:
        query = f"SELECT {SCORED_COLUMNS} {_FROM_GROUPS} WHERE g.digest = ?"
        row = self._connection.execute(query, (digest,)).fetchone()
        return None if row is None else scored_of(row)


# --- rows as groups -----------------------------------------------------------------------------------


def scored_columns(scored: ScoredGroup, sealed: SealedGroup) -> dict[str, Any]:
    """The columns of a new row of `groups`."""
    return {
        "digest": sealed.digest,
        "producer": sealed.producer,
        "public_key": sealed.public_key,
        "signature": sealed.signature,
        "is_compressed": sealed.is_compressed,
        "is_made_here": scored.is_made_here,
        "rewards": _guarded(np.asarray(scored.rewards, "<f4").tobytes(), scored.correction),
        "correction": str(scored.correction),
        "first_seen_s": scored.first_seen_s,
        "size_bytes": sealed.size_bytes,
        "outcomes": _packed(scored.outcomes) if scored.outcomes else None,
    }


def is_whole(sealed: SealedGroup) -> bool:
    """True if a stored group's body has its digest: peers would charge us for a damaged one. 3.3 us for 4 KiB."""
    if hashlib.sha256(sealed.body).digest() == sealed.digest:
        return True
    logger.warning("stored group is not as it was written, and is not sent", extra={"digest": short(sealed.digest)})
    return False


def sealed_of(row: tuple[Any, ...]) -> SealedGroup:
    """The sealed group in a row of SEALED_COLUMNS, or of SCORED_COLUMNS, which begin with the same columns."""
    _, _, producer, _, _, is_compressed, _ = row[:7]
    # Where a bit of a row's header flipped, a value has another type.
    digest, public_key, signature, body = (row[i] if isinstance(row[i], bytes) else b"" for i in (1, 3, 4, 6))
    return SealedGroup(
        digest=digest,
        producer=str(producer),
        public_key=public_key,
        signature=signature,
        is_compressed=bool(is_compressed),
        body=body,
    )


def scored_of(row: tuple[Any, ...]) -> ScoredGroup | None:
    """The group in a row of SCORED_COLUMNS, with this node's rewards; None if the disk changed the row."""
    sealed = sealed_of(row)
    group = open_group(sealed, _MAX_OPENED_BYTES)
    if isinstance(group, Refused):
        logger.warning("stored group does not open", extra={"digest": short(sealed.digest), "reason": group.reason})
        return None
    is_made_here, blob, name, first_seen_s, size_bytes, packed = row[7:]
    try:
        correction = Correction(name)
        plain: bytes = blob[: 4 * len(group.rollouts)]
        if blob != plain and blob != _guarded(plain, correction):  # without a checksum: of release 0.1.0
            raise ValueError("its checksum is another one")
        rewards = np.frombuffer(plain, "<f4").astype(np.float32)
        first_seen_s = float(first_seen_s)
        outcomes = () if packed is None else _unpacked(packed, len(group.rollouts))
    except (TypeError, ValueError, zlib.error) as error:
        rewards, correction, outcomes = np.zeros(0, np.float32), Correction.EXACT, ()
        logger.warning("stored group has no rewards", extra={"digest": short(sealed.digest), "error": str(error)})
    if len(rewards) != len(group.rollouts) or not np.isfinite(rewards).all():
        return None
    return ScoredGroup(
        digest=sealed.digest,
        group=clamp_logprobs(group),
        rewards=rewards,
        correction=correction,
        is_made_here=bool(is_made_here),
        first_seen_s=first_seen_s,
        size_bytes=size_bytes,
        outcomes=outcomes,
    )


def _guarded(rewards: bytes, correction: Correction) -> bytes:
    """Rewards with a checksum of rewards and correction: no signature covers what this node computed."""
    return rewards + zlib.crc32(rewards + str(correction).encode()).to_bytes(4, "little")


def _packed(outcomes: tuple[EpisodeOutcome, ...]) -> bytes:
    """Outcomes as compressed JSON, in which zlib includes a checksum."""
    return zlib.compress(outcomes_to_json(outcomes))


def _unpacked(data: bytes, count: int) -> tuple[EpisodeOutcome, ...]:
    """The outcomes in a result of `_packed`. Raises TypeError, ValueError or zlib.error if the disk changed it."""
    outcomes = outcomes_from_json(zlib.decompress(data))
    if len(outcomes) != count:
        raise ValueError(f"{len(outcomes)} outcomes of {count} rollouts")
    return outcomes
