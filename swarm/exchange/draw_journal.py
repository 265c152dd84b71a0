"""Draw journal: the groups of each optimizer step, drawn, journalled, and handed out until the step was reported.

Invariant: a draw is in the journal before anyone sees it, and draws are numbered without gaps, unless the journal is
lost. A resume makes the same draws again; if their groups are gone, the loss is logged, and new draws have new numbers.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import cast

from swarm.errors import ConfigError, StorageFull
from swarm.events import DiskFull, DrawsAbandoned, GroupsDrawn
from swarm.exchange.draw_shares import DrawShares
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.exchange.step_attempts import StepAttempts
from swarm.interfaces import GroupStore
from swarm.node_context import NodeContext
from swarm.peers.coordinator_client import CoordinatorView
from swarm.peers.peer_table import Peers
from swarm.peers.quotas import IntakeQuota
from swarm.peers.reputation import Reputation
from swarm.trust_policy import WINDOW
from swarm.types import Attempt, Digest, Draw, PolicyVersion, StepReport
from swarm.weight_sync.credit import CreditLedger

logger = logging.getLogger(__name__)

STORAGE_RETRY_S = 1.0  # between two attempts to journal a draw on a full disk
SAID_AFTER_S = 30.0  # wait with groups that fill no draw before a warning: groups of other nodes may be on the way
_CHECKPOINTS = "checkpoints"  # key of the note with the first draw after each of the newest two


@dataclass(eq=False, repr=False)
class DrawJournal:
    """The draws of one node, made one at a time and journalled in order."""

    _context: NodeContext  # `changed` is fired here when a draw made room
    _store: GroupStore  # holds the journal
    _replay: ReplayBuffer
    _credit_ledger: CreditLedger  # a draw waits for no group that it withholds
    _peers: Peers  # their heads decide how old an external group is
    _coordinator_view: CoordinatorView  # advised bounds and weights
    _intake_quota: IntakeQuota  # grows with each draw
    _reputation: Reputation  # of producers whose groups end the learner's process
    _shares: DrawShares  # each party's places in earlier draws

    def __post_init__(self) -> None:
        self._config = self._context.config
        self._attempts = StepAttempts(self._context, self._store, self._replay, self._reputation)
        self._saved: list[int] = []  # first draw after each of the newest two checkpoints, over restarts
        self._lock = asyncio.Lock()
        self._next = 1
        self._checkpoints: deque[int] = deque(maxlen=2)  # first draw after each of the learner's newest two
        self._pending: Draw | None = None
        self.in_hand: frozenset[Digest] = frozenset()  # groups of a draw that is not yet in the journal
        self._has_drawn = False  # a draw was made and its step is not yet reported
        self._guard_max_age_steps: float | None = None  # what the learner's own guard allows
        self._has_said_who_waits = False
        self.num_local = 0  # groups of the own lineage learned from since the process started
        self.num_external = 0  # groups of other lineages learned from
        self.num_set_aside = 0  # drawn and not learned from

    async def restore(self) -> int:
        """Restores the state after a restart; returns the number of journalled draws."""
        notes = await self._store.notes()
        self._saved = [int(draw) for draw in json.loads(notes.get(_CHECKPOINTS, "[]"))]
        self._attempts.restore(notes)
        journal = await self._store.journal(0)
        self._next = journal[-1][0] + 1 if journal else 1
        self._shares.restore(await self._store.places(WINDOW))
        return len(journal)

    @property
    def is_under_way(self) -> bool:
        """True if a draw was made and its step is not reported: the head will advance without the waiting groups."""
        return self._has_drawn

    @property
    def comes_first(self) -> bool:
        """True if a step is under way or enough groups wait for one; then a generator that takes turns has to wait."""
        return self._has_drawn or self._replay.num_for_draws >= self._config.replay.local_groups

    @property
    def needed_from(self) -> int | None:
        """Number of the first draw that a resume from the older of the learner's newest two checkpoints makes again.

        0, for the whole journal, until the learner has resumed or saved; None if it makes no checkpoints.
        """
        if not self._config.learner.checkpoint_every:
            return None
        return self._checkpoints[0] if self._checkpoints else 0

    async def draw(self, head: PolicyVersion) -> Draw:
        """Waits for the groups of the next step; returns the same draw again until its step was reported."""
        async with self._lock:
            if self._pending is None:
                self._pending = await self._draw(head)
            return self._pending

    async def _draw(self, head: PolicyVersion) -> Draw:
        # with `replay.barrier` once every connected peer's rollouts of this round are here
        await self._context.changed.until(
            lambda: not self._config.replay.barrier or self._peers.have_delivered(head.step)
        )
        draw, since_s = cast("Draw | None", None), self._context.clock.monotonic_s()
        while draw is None:
            await self._context.pause.over()
            self._replay.limit_age(self._lag_bound())
            weights = self._coordinator_view.source_weights()
            draw = self._replay.draw(self._next, head, self._peers.heads.get, weights, self._credit_ledger)
            if draw is None:
                self._say_once_if_only_newcomers_wait(since_s)
                self._context.changed.fire()  # groups used up or too old made room for the generator
                await self._context.changed.wait()
        self._has_drawn = True
        await self._journal(draw)
        self._next = draw.step + 1
        self._context.emit(GroupsDrawn.of(draw, self._config.replay, head.policy_id))
        self._context.changed.fire()  # room for the generator
        self._intake_quota.record_draw()
        return draw

    def _say_once_if_only_newcomers_wait(self, since_s: float) -> None:
        num_newcomers = self._replay.num_local - self._replay.num_for_draws
        is_long = self._context.clock.monotonic_s() >= since_s + SAID_AFTER_S
        if is_long and num_newcomers and not self._replay.num_for_draws and not self._has_said_who_waits:
            self._has_said_who_waits = True
            logger.warning(
                "no step: the groups that wait are of newcomers, or lack log-probs, and fill an eighth of a draw at "
                "most; list or invite your generators (entry.members, swarm-node invite), or say entry.established = "
                "everybody in a closed network; a server of theirs has to give log-probs at generator.temperature "
                "(vLLM: --logprobs-mode processed_logprobs)",
                extra={"waiting": num_newcomers},
            )

    async def _journal(self, draw: Draw) -> None:
        """Records a draw, and waits for room on a full disk; until it is recorded, its groups are `in_hand`."""
        self.in_hand = frozenset(drawn.scored.digest for drawn in draw.groups)
        try:
            await self._write_once_there_is_room(lambda: self._store.record_draw(draw))
        finally:
            self.in_hand = frozenset()

    async def _write_once_there_is_room(self, write: Callable[[], Awaitable[None]]) -> None:
        is_logged = False
        while True:
            try:
                return await write()
            except StorageFull as error:
                if not is_logged:
                    logger.error("store is full; learning waits until there is room", extra={"error": str(error)})
                    self._context.emit(DiskFull(error=str(error)))
                is_logged = True
            await asyncio.sleep(STORAGE_RETRY_S)

    async def redraw(self, from_step: int) -> list[Draw]:
        """Returns the journalled draws from `from_step` on, the first draw that is not in the learner's checkpoint.

        The first draw that lost a group, and all draws after it, cannot lead to the same weights. They are abandoned,
        for this resume and every later one: their groups count as used up, and the learner goes on with new draws.
        Draws without groups are left out. Raises ConfigError if the checkpoints that the learner reported are gone.
        """
        self._refuse_to_go_back(from_step)
        if from_step > self._next:
            lost = {"from": from_step, "journal": self._next}
            logger.error("the draw journal ends before the checkpoint; going on from the checkpoint alone", extra=lost)
            self._next = from_step
        self._attempts.forget(from_step)
        self._checkpoints.clear()
        self._checkpoints.append(from_step)
        draws = await self._store.draws(from_step)
        whole = [draw for i, draw in enumerate(draws) if draw.step == from_step + i and draw.step < self._next]
        first_lost, last = from_step + len(whole), self._next - 1
        if first_lost <= last:
            await self._write_once_there_is_room(lambda: self._store.abandon(first_lost, last))
            if self._pending is not None and self._pending.step >= first_lost:
                self._pending, self._has_drawn = None, False
            lost = {"from": from_step, "first": first_lost, "last": last}
            logger.error("draws since the checkpoint lost their groups; new ones are made instead", extra=lost)
            self._context.emit(DrawsAbandoned(from_step=from_step, first=first_lost, last=last))
        return [draw for draw in whole if draw.groups]

    def _refuse_to_go_back(self, from_step: int) -> None:
        """Raises ConfigError if the checkpoints are gone: the learner would publish other versions of old steps."""
        if self._saved and from_step < self._saved[0]:
            raise ConfigError(
                f"{self._config.dir / 'checkpoints'}: gone, the draws before {self._saved[-1]} were saved there; "
                "put it back, or move groups.sqlite away too to begin again"
            )
        if from_step > 1:
            self._saved = [*(draw for draw in self._saved if draw < from_step), from_step][-2:]

    async def begin_again(self, step: int, passed: Digest | None) -> Attempt:
        """Begins a journalled step again (`LocalExchange.begin_again`); a pending draw loses the groups left out."""
        attempt = await self._attempts.begin(step, passed, self._write_once_there_is_room)
        if attempt.left_out and self._pending is not None and self._pending.step == step:
            kept = tuple(drawn for drawn in self._pending.groups if drawn.scored.digest not in attempt.left_out)
            self._pending = replace(self._pending, groups=kept) if kept else None
            self._has_drawn = self._pending is not None
            self._context.changed.fire()
        return attempt

    async def record_checkpoint(self, next_draw: int, error: str) -> None:
        """Records a checkpoint of all draws before `next_draw`, or only reports the `error` that prevented it."""
        if error:
            self._context.emit(DiskFull(error=f"checkpoint: {error}"))
            return
        if next_draw not in self._checkpoints:
            self._checkpoints.append(next_draw)
        self._saved = [*(draw for draw in self._saved if draw < next_draw), next_draw][-2:]
        try:
            await self._store.put_note(_CHECKPOINTS, json.dumps(self._saved))
        except StorageFull as error_:
            logger.warning("the journal could not note a checkpoint", extra={"error": str(error_)})

    async def stop(self) -> None:
        """Records an orderly end of the node, so that no group of the step under way is blamed."""
        await self._attempts.stop(None if self._pending is None else self._pending.step)

    async def settle(self, report: StepReport) -> None:
        """Records the report of a step, after which `draw` makes a new draw."""
        if self._pending is not None and report.draw_step in (0, self._pending.step):
            self._count(self._pending, report)
            self._pending, self._has_drawn = None, False
        await self._attempts.settle(report.draw_step)
        self._guard_max_age_steps = report.diagnostics.get("guard_max_age_steps")

    def _count(self, draw: Draw, report: StepReport) -> None:
        num_local, num_external = (0, 0) if report.was_skipped else (report.num_local, report.num_external)
        self.num_local += num_local
        self.num_external += num_external
        self.num_set_aside += max(0, len(draw.groups) - num_local - num_external)

    def _lag_bound(self) -> int | None:
        """The smaller age bound, in steps, of the coordinator's advice and the learner's guard; None without either."""
        known = (self._coordinator_view.advice.max_age_steps, self._guard_max_age_steps)
        return min((int(bound) for bound in known if bound is not None), default=None)
