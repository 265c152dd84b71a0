"""Steps made again after their process ended in the middle: counted, and their groups tried alone after two deaths.

Invariant: the digest of a group is on the disk before the group is tried, so that a death of the process names it. A
group is given up only if its trial ended the worker while the agent kept running, or ended the whole node twice; no
group is lost by two deaths that no group caused.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Final

from swarm.errors import StorageFull
from swarm.events import DrawsAbandoned, GroupGivenUp
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.interfaces import GroupStore
from swarm.node_context import NodeContext
from swarm.peers.reputation import Reputation
from swarm.types import Attempt, Digest, short

logger = logging.getLogger(__name__)

TRIED_AT: Final = 3  # beginnings of one step without a reported end, from which on its groups are tried alone
MAX_WHOLE: Final = 8  # beginnings of a step whose groups all passed alone; then the draw is abandoned
_NOTE: Final = "attempts"  # key of the note: `_Step` by step

Write = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]


@dataclass(kw_only=True, slots=True)
class _Step:
    """One step that was begun again; durable."""

    count: int = 1  # beginnings without an end; the first was the draw itself
    trying: str = ""  # digest, hex, of the group that is tried alone
    passed: list[str] = field(default_factory=list[str])  # groups that ended no process alone
    suspects: list[str] = field(default_factory=list[str])  # the whole node ended while one of these was tried
    given_up: list[str] = field(default_factory=list[str])
    num_whole: int = 0  # beginnings after all of its groups had passed


@dataclass(eq=False, repr=False)
class StepAttempts:
    """Beginnings of each journalled step, and the groups that end the process."""

    _context: NodeContext
    _store: GroupStore
    _replay: ReplayBuffer
    _reputation: Reputation

    def __post_init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._begun: int | None = None  # the step that this process began again and did not end

    def restore(self, notes: dict[str, str]) -> None:
        """Restores the counts of earlier processes from the notes of the store."""
        with suppress(ValueError, TypeError, AttributeError):  # of another release: counted anew
            self._steps = {int(step): _Step(**state) for step, state in json.loads(notes.get(_NOTE, "{}")).items()}

    def forget(self, before: int) -> None:
        """Drops the counts of steps before `before`, which no resume will make again."""
        self._steps = {step: state for step, state in self._steps.items() if step >= before}

    async def begin(self, step: int, passed: Digest | None, write: Write) -> Attempt:
        """Counts a beginning of a step, or a group that `passed`; returns the next trial. `write` waits for room."""
        state, is_worker_dead = self._steps.setdefault(step, _Step()), self._begun == step
        self._begun = step
        if passed is not None:
            state.passed.append(passed.hex())
        else:
            state.count += 1
            if state.trying and not is_worker_dead and state.trying not in state.suspects:
                state.suspects.append(state.trying)  # the machine may have failed: it is tried once more
            elif state.trying:
                await self._give_up(step, bytes.fromhex(state.trying), write)
                state.given_up.append(state.trying)
        state.trying = ""
        attempt = Attempt()
        if state.count >= TRIED_AT:
            attempt = await self._next_trial(step, state, write)
        await write(self._save)
        return attempt

    async def _next_trial(self, step: int, state: _Step, write: Write) -> Attempt:
        groups = await self._groups(step)
        given_up = [bytes.fromhex(each) for each in state.given_up]
        untried = [digest for digest in groups if digest.hex() not in state.passed]
        if untried:
            if not state.passed and not state.given_up:
                extra = {"draw": step, "groups": len(groups)}
                logger.error("the process ended twice in one step; its groups are tried one by one", extra=extra)
            state.trying = untried[0].hex()
            return Attempt(trial=untried[0], left_out=frozenset(given_up))
        if groups and state.num_whole >= MAX_WHOLE:
            extra = {"draw": step, "groups": len(groups)}
            logger.error("a draw ends the process though each of its groups does not; it is abandoned", extra=extra)
            await write(lambda: self._store.abandon(step, step))
            self._context.emit(DrawsAbandoned(from_step=step, first=step, last=step))
            return Attempt(left_out=frozenset([*given_up, *groups]))
        state.num_whole += 1
        return Attempt(left_out=frozenset(given_up))

    async def settle(self, step: int) -> None:
        """Forgets a step that was made. On a full disk its count survives a restart, which costs a trial at most."""
        self._begun = None if self._begun == step else self._begun
        if self._steps.pop(step, None) is not None:
            with suppress(StorageFull):
                await self._save()

    async def stop(self, pending: int | None) -> None:
        """Takes back the newest beginning, so that no group is blamed. `pending`: draw whose step was not reported."""
        step = self._begun if self._begun is not None else pending
        if step is None:
            return
        state = self._steps.setdefault(step, _Step())
        state.count, state.trying = max(0, state.count - 1), ""
        with suppress(StorageFull):
            await self._save()

    async def _save(self) -> None:
        states = {step: asdict(state) for step, state in self._steps.items()}
        await self._store.put_note(_NOTE, json.dumps(states) if states else "")

    async def _groups(self, step: int) -> Sequence[Digest]:
        """Digests of the groups that a journalled draw still hands out."""
        return next((digests for number, digests in await self._store.journal(step) if number == step), ())

    async def _give_up(self, step: int, digest: Digest, write: Write) -> None:
        sealed = await self._store.get(digest)
        producer = "" if sealed is None else sealed.producer
        await write(lambda: self._store.give_up(step, digest))
        self._replay.discard(digest, "given_up")
        if producer and producer != self._context.node_id:
            self._reputation.record_given_up(producer)
        extra = {"draw": step, "digest": short(digest), "producer": short(producer)}
        logger.error("a group ended the process alone and is given up; the rest of its draw is used", extra=extra)
        self._context.emit(GroupGivenUp(digest=digest.hex(), producer=producer, draw_step=step))
