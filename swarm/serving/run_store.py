"""Runs of agents on the disk: their calls as sampled, their rewards, and the groups that they join.

Invariant: data that a method wrote survives a kill of the process once the method returns, and each method is one
transaction. A run is rewarded once, joins one group, and keeps its calls until that group is handed over. All methods
block, and may be called from any thread.
"""

import json
import sqlite3
import threading
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np

from swarm.errors import StorageFull
from swarm.serving.held_out_runs import MeasuredTask
from swarm.serving.run_groups import RecordedCall, RecordedRun
from swarm.sqlite_file import is_damage, is_full, move_aside
from swarm.types import MAX_OUTCOMES, FinishReason, PolicyVersion, Sampling, VersionSpan

MAX_REASONS: Final = 16  # listed by `overview`
KEPT_RUNS: Final = 10_000  # finished runs of each key; older ones are deleted
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS runs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL, -- name of the key
    name TEXT NOT NULL,
    task TEXT NOT NULL, -- empty: no other run is compared with it
    secret BLOB NOT NULL, -- digest of its own key; empty if it has none
    used_s REAL NOT NULL,
    state TEXT NOT NULL,
    note TEXT NOT NULL DEFAULT '', -- why it is not learned from
    num_calls INTEGER NOT NULL DEFAULT 0,
    num_bytes INTEGER NOT NULL DEFAULT 0,
    rewards TEXT NOT NULL DEFAULT '',
    rewarded_s REAL NOT NULL DEFAULT 0,
    oldest_step INTEGER NOT NULL DEFAULT 0,
    in_group INTEGER NOT NULL DEFAULT 0,
    UNIQUE (owner, name)
);
CREATE INDEX IF NOT EXISTS runs_of_task ON runs(state, owner, task);
CREATE TABLE IF NOT EXISTS calls (
    run INTEGER NOT NULL,
    place INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (run, place)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS held_out (
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    task TEXT NOT NULL,
    first_step INTEGER NOT NULL,
    first_reward REAL NOT NULL,
    step INTEGER NOT NULL,
    reward REAL NOT NULL,
    at_s REAL NOT NULL,
    num_rounds INTEGER NOT NULL DEFAULT 0, -- that ended
    is_in_round INTEGER NOT NULL DEFAULT 1,
    UNIQUE (owner, task)
);
CREATE TABLE IF NOT EXISTS groups (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    task TEXT NOT NULL,
    closed_s REAL NOT NULL,
    compute_dtype TEXT NOT NULL
);
"""


class RunState(StrEnum):
    """State of a run, as its owner sees it."""

    OPEN = "open"  # it waits for calls and for its reward
    WAITING = "waiting"  # it has its reward, and waits for other runs of its task
    CLOSED = "closed"  # its group is complete
    LEARNED = "learned"  # its group waits for a step of the learner, or was in one
    REFUSED = "not_learned"
    HELD_OUT = "held_out"  # open, and never learned from
    MEASURED = "measured"  # a held-out run with its reward


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """A run without its calls."""

    number: int
    owner: str
    name: str
    task: str
    state: RunState
    note: str
    num_calls: int
    num_bytes: int
    rewards: Mapping[str, float]
    rewarded_s: float
    oldest_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedGroup:
    """A group of runs that is complete and not handed over."""

    number: int
    task: str
    closed_s: float
    compute_dtype: str


_COLUMNS: Final = "number, owner, name, task, state, note, num_calls, num_bytes, rewards, rewarded_s, oldest_step"


class RunStore:
    """Runs of agents in one SQLite file; a damaged file is moved aside, and a new one begun."""

    def __init__(self, path: Path, now_s: float) -> None:
        """Opens or creates the file. Raises sqlite3.Error if that fails."""
        self._lock = threading.RLock()
        self.moved_aside: Path | None = None
        try:
            self._connection = self._open(path)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self.moved_aside = move_aside(path, now_s)
            self._connection = self._open(path)

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._connection.close()

    def sessions(self) -> dict[bytes, tuple[str, str]]:
        """Digest of each run's own key -> (key, run)."""
        rows = self._rows("SELECT secret, owner, name FROM runs WHERE secret != x''")
        return {secret: (owner, name) for secret, owner, name in rows}

    def open_run(
        self, owner: str, name: str, task: str, secret: bytes, now_s: float, state: RunState = RunState.OPEN
    ) -> tuple[bool, list[bytes]]:
        """Begins a run; returns (False if it exists already, key digests of the runs deleted beyond KEPT_RUNS)."""
        with self._changing():
            over = (owner, RunState.LEARNED, RunState.REFUSED, RunState.MEASURED, KEPT_RUNS)
            chosen = "FROM runs WHERE owner = ? AND state IN (?, ?, ?) ORDER BY number DESC LIMIT -1 OFFSET ?"
            forgotten = [row[0] for row in self._rows(f"SELECT secret {chosen}", over)]
            self._do(f"DELETE FROM runs WHERE number IN (SELECT number {chosen})", over)
            num_new = self._do(
                "INSERT OR IGNORE INTO runs (owner, name, task, secret, used_s, state) VALUES (?, ?, ?, ?, ?, ?)",
                (owner, name, task, secret, now_s, state),
            )
        return num_new > 0, forgotten

    def find(self, owner: str, name: str) -> RunRow | None:
        """The run of a key with this name, or None."""
        rows = self._rows(f"SELECT {_COLUMNS} FROM runs WHERE owner = ? AND name = ?", (owner, name))
        return _row(rows[0]) if rows else None

    def totals(self, owner: str) -> tuple[int, int]:
        """Number of runs of a key that are not over, and bytes of all calls that are kept for it."""
        query = "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM runs WHERE state IN (?, ?, ?, ?) AND owner = ?"
        return self._rows(query, (RunState.OPEN, RunState.HELD_OUT, RunState.WAITING, RunState.CLOSED, owner))[0]

    def overview(self, owner: str) -> tuple[dict[str, int], dict[str, int]]:
        """(state -> number of runs of a key that are kept, the commonest reasons -> runs not learned from)."""
        states = "SELECT state, COUNT(*) FROM runs WHERE owner = ? GROUP BY state ORDER BY state"
        reasons = (
            "SELECT note, COUNT(*) AS n FROM runs WHERE owner = ? AND note != '' GROUP BY note ORDER BY n DESC LIMIT ?"
        )
        return dict(self._rows(states, (owner,))), dict(self._rows(reasons, (owner, MAX_REASONS)))

    def add_call(self, run: int, call: RecordedCall, now_s: float, *, max_calls: int, max_bytes: int) -> bool:
        """Records a call of an open run; False if the run is over.

        Beyond `max_calls` of the run, or `max_bytes` of all that is kept for its key, the run loses its calls, with a
        note why it is not learned from; it still takes its reward.
        """
        body = _packed(call)
        with self._changing():
            query = "SELECT owner, note, num_calls FROM runs WHERE number = ? AND state = ?"
            found = self._rows(query, (run, RunState.OPEN))
            if not found:
                return False
            ((owner, note, num_calls),) = found
            num_bytes = self.totals(owner)[1] + len(body)
            if not note and num_calls >= max_calls:
                note = f"more than {max_calls} calls"
            elif not note and num_bytes > max_bytes:
                note = f"calls of {num_bytes} bytes are kept for this key, more than {max_bytes}"
            if note:
                self._do("UPDATE runs SET note = ?, used_s = ? WHERE number = ?", (note, now_s, run))
                self._drop_calls(run)
                return True
            self._do(
                "UPDATE runs SET num_calls = num_calls + 1, num_bytes = num_bytes + ?, used_s = ? WHERE number = ?",
                (len(body), now_s, run),
            )
            self._do("INSERT INTO calls VALUES (?, ?, ?)", (run, num_calls + 1, body))
        return True

    def calls(self, run: int) -> tuple[RecordedCall, ...]:
        """The calls of a run, in order."""
        return tuple(
            _unpacked(row[0]) for row in self._rows("SELECT body FROM calls WHERE run = ? ORDER BY place", (run,))
        )

    def reward(self, row: RunRow, rewards: Mapping[str, float], oldest_step: int, note: str, now_s: float) -> bool:
        """Gives an open run its reward; the run then waits for its group, or is refused if there is a note.

        Returns:
            False if the run was over already, or got another call since `row` was read: nothing changed then.
        """
        state = RunState.REFUSED if note else RunState.WAITING
        as_read = (row.number, RunState.OPEN, row.num_calls, row.note)  # a call beyond the bounds leaves a note alone
        with self._changing():
            changed = self._do(
                "UPDATE runs SET rewards = ?, oldest_step = ?, rewarded_s = ?, state = ?, note = ? "
                "WHERE number = ? AND state = ? AND num_calls = ? AND note = ?",
                (json.dumps(dict(rewards)), oldest_step, now_s, state, note, *as_read),
            )
            if changed and note:
                self._drop_calls(row.number)
        return bool(changed)

    def count_held_out(self, run: int, step: int, now_s: float) -> bool:
        """Counts a call of an open held-out run, and keeps the first call's step; False if the run is over."""
        statement = (
            "UPDATE runs SET oldest_step = CASE num_calls WHEN 0 THEN ? ELSE oldest_step END, "
            "num_calls = num_calls + 1, used_s = ? WHERE number = ? AND state = ?"
        )
        with self._changing():
            return self._do(statement, (step, now_s, run, RunState.HELD_OUT)) > 0

    def measure(
        self, row: RunRow, rewards: Mapping[str, float], worth: float, now_s: float
    ) -> list[list[MeasuredTask]]:
        """Gives an open held-out run its rewards; returns the rounds that end with it, none if it was over already.

        A new task of a key that has MAX_OUTCOMES tasks is not measured.
        """
        owner, task, step, rounds = row.owner, row.task, row.oldest_step, list[list[MeasuredTask]]()
        statement = "UPDATE runs SET rewards = ?, rewarded_s = ?, state = ? WHERE number = ? AND state = ?"
        values = (json.dumps(dict(rewards)), now_s, RunState.MEASURED, row.number, RunState.HELD_OUT)
        with self._changing():
            if not self._do(statement, values):
                return []
            known = {each.task: each for each in self._tasks(owner)}
            if task in known and known[task].is_in_round:
                rounds.append(self._end_round(owner))
            if task in known or len(known) < MAX_OUTCOMES:
                self._do(
                    "INSERT INTO held_out (owner, task, first_step, first_reward, step, reward, at_s) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (owner, task) DO UPDATE SET "
                    "step = excluded.step, reward = excluded.reward, at_s = excluded.at_s, is_in_round = 1",
                    (owner, task, step, worth, step, worth, now_s),
                )
            tasks = self._tasks(owner)
            if all(each.is_in_round for each in tasks) and any(each.num_rounds for each in tasks):
                rounds.append(self._end_round(owner))
        return rounds

    def quiet_rounds(self, before_s: float, called_s: float) -> list[tuple[str, list[MeasuredTask]]]:
        """Ends and returns the rounds (key, tasks) whose last reward is not after `before_s` (wall clock).

        A key with an open held-out run that was begun, or had a call, since `called_s` is left out.
        """
        query = "SELECT owner FROM held_out WHERE is_in_round GROUP BY owner HAVING MAX(at_s) <= ?"
        with self._changing():
            found = [row[0] for row in self._rows(query, (before_s,))]
            measuring = self._measuring(called_s) if found else set[str]()
            return [(owner, self._end_round(owner)) for owner in found if owner not in measuring]

    def _measuring(self, since_s: float) -> set[str]:
        """Keys with an open held-out run that was begun, or had a call, since `since_s` (wall clock)."""
        query = "SELECT DISTINCT owner FROM runs WHERE state = ? AND used_s >= ?"
        return {row[0] for row in self._rows(query, (RunState.HELD_OUT, since_s))}

    def waiting(self) -> dict[tuple[str, str], list[RunRow]]:
        """Runs that wait for others, in the order of their rewards, by key and task."""
        query = f"SELECT {_COLUMNS} FROM runs WHERE state = ? ORDER BY rewarded_s, number"
        found: dict[tuple[str, str], list[RunRow]] = {}
        for row in map(_row, self._rows(query, (RunState.WAITING,))):
            found.setdefault((row.owner, row.task), []).append(row)
        return found

    def close_group(self, runs: Sequence[int], task: str, compute_dtype: str, now_s: float) -> None:
        """Makes a group of waiting runs; does nothing if any of these runs no longer waits."""
        with self._changing():
            marks = ", ".join("?" * len(runs))
            query = f"SELECT COUNT(*) FROM runs WHERE state = ? AND number IN ({marks})"
            if self._rows(query, (RunState.WAITING, *runs))[0][0] != len(runs):
                return  # another thread was first
            values = (task, now_s, compute_dtype)
            cursor = self._connection.execute(
                "INSERT INTO groups (task, closed_s, compute_dtype) VALUES (?, ?, ?)", values
            )
            for run in runs:
                self._do(
                    "UPDATE runs SET state = ?, in_group = ? WHERE number = ?", (RunState.CLOSED, cursor.lastrowid, run)
                )

    def refuse(self, runs: Sequence[int], state: RunState, note: str) -> None:
        """Refuses the given runs that are in this state, and drops their calls."""
        with self._changing():
            for run in runs:
                values = (RunState.REFUSED, note, run, state)
                if self._do("UPDATE runs SET state = ?, note = ? WHERE number = ? AND state = ?", values):
                    self._drop_calls(run)

    def closed_groups(self) -> list[ClosedGroup]:
        """Groups that are complete and not handed over, oldest first."""
        query = "SELECT number, task, closed_s, compute_dtype FROM groups ORDER BY number"
        return [
            ClosedGroup(number=number, task=task, closed_s=closed_s, compute_dtype=compute_dtype)
            for number, task, closed_s, compute_dtype in self._rows(query)
        ]

    def runs_of(self, group: int) -> list[RecordedRun]:
        """The runs of a group, with their calls."""
        rows = self._rows("SELECT number, rewards FROM runs WHERE in_group = ? ORDER BY number", (group,))
        return [RecordedRun(calls=self.calls(run), rewards=json.loads(rewards)) for run, rewards in rows]

    def settle(self, group: int, note: str = "") -> None:
        """Records that a group was handed over or, if there is a note, refused; drops the calls of its runs."""
        state = RunState.REFUSED if note else RunState.LEARNED
        with self._changing():
            self._do("DELETE FROM calls WHERE run IN (SELECT number FROM runs WHERE in_group = ?)", (group,))
            self._do("UPDATE runs SET state = ?, note = ?, num_bytes = 0 WHERE in_group = ?", (state, note, group))
            self._do("DELETE FROM groups WHERE number = ?", (group,))

    def idle(self, before_s: float, state: RunState = RunState.OPEN) -> list[int]:
        """Runs in this state without a call since `before_s` (wall clock)."""
        query = "SELECT number FROM runs WHERE state = ? AND used_s < ?"
        return [row[0] for row in self._rows(query, (state, before_s))]

    def _tasks(self, owner: str) -> list[MeasuredTask]:
        names = ("task", "first_step", "first_reward", "step", "reward", "at_s", "num_rounds", "is_in_round")
        rows = self._rows(f"SELECT {', '.join(names)} FROM held_out WHERE owner = ? ORDER BY place", (owner,))
        fields: list[dict[str, Any]] = [dict(zip(names, (*row[:-1], bool(row[-1])), strict=True)) for row in rows]
        return [MeasuredTask(**each) for each in fields]

    def _end_round(self, owner: str) -> list[MeasuredTask]:
        tasks = self._tasks(owner)
        statement = "UPDATE held_out SET is_in_round = 0, num_rounds = num_rounds + 1 WHERE owner = ? AND is_in_round"
        self._do(statement, (owner,))
        return tasks

    def _drop_calls(self, run: int) -> None:
        self._do("UPDATE runs SET num_bytes = 0 WHERE number = ?", (run,))
        self._do("DELETE FROM calls WHERE run = ?", (run,))

    def _open(self, path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(_SCHEMA)
        path.chmod(0o600)
        return connection

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def _do(self, statement: str, values: Sequence[Any] = ()) -> int:
        return self._connection.execute(statement, values).rowcount

    @contextmanager
    def _changing(self) -> Generator[None]:
        """One transaction: all or nothing. Raises StorageFull."""
        with self._lock:
            try:
                self._do("BEGIN IMMEDIATE")
                yield
                self._do("COMMIT")
            except BaseException as error:
                if self._connection.in_transaction:
                    self._do("ROLLBACK")
                if isinstance(error, sqlite3.Error) and is_full(error):
                    raise StorageFull(f"runs of agents: {error}") from None
                raise


def _row(values: Sequence[Any]) -> RunRow:
    number, owner, name, task, state, note, num_calls, num_bytes, rewards, rewarded_s, oldest_step = values
    return RunRow(
        number=number,
        owner=owner,
        name=name,
        task=task,
        state=RunState(state),
        note=note,
        num_calls=num_calls,
        num_bytes=num_bytes,
        rewards=json.loads(rewards or "{}"),
        rewarded_s=rewarded_s,
        oldest_step=oldest_step,
    )


def _packed(call: RecordedCall) -> bytes:
    """A call as bytes: the length of its head, the head as JSON, token ids and log-probs."""
    sampling = call.sampling
    head = {
        "prompt": call.prompt_ids.size,
        "tokens": call.token_ids.size,
        "has_logprobs": call.logprobs is not None,
        "spans": [[s.start, s.version.policy_id, s.version.step, s.version.digest.hex()] for s in call.spans],
        "sampling": [sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens],
        "finish": call.finish,
    }
    arrays = [call.prompt_ids.astype("<i4"), call.token_ids.astype("<i4")]
    data = b"".join(each.tobytes() for each in arrays)
    data += b"" if call.logprobs is None else call.logprobs.astype("<f4").tobytes()
    text = json.dumps(head).encode()
    return zlib.compress(len(text).to_bytes(4, "little") + text + data, 1)


def _unpacked(body: bytes) -> RecordedCall:
    data = zlib.decompress(body)
    size = 4 + int.from_bytes(data[:4], "little")
    head = json.loads(data[4:size])
    num_prompt, num_tokens = head["prompt"], head["tokens"]
    ids = np.frombuffer(data, "<i4", num_prompt + num_tokens, size).astype(np.int32)
    logprobs = None
    if head["has_logprobs"]:
        logprobs = np.frombuffer(data, "<f4", num_tokens, size + 4 * ids.size).astype(np.float32)
    temperature, top_p, top_k, max_new_tokens = head["sampling"]
    return RecordedCall(
        prompt_ids=ids[:num_prompt],
        token_ids=ids[num_prompt:],
        logprobs=logprobs,
        spans=tuple(
            VersionSpan(start=start, version=PolicyVersion(policy_id=policy, step=step, digest=bytes.fromhex(digest)))
            for start, policy, step, digest in head["spans"]
        ),
        sampling=Sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=max_new_tokens),
        finish=FinishReason(head["finish"]),
    )
