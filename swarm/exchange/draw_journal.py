"""What each optimizer step learns from: drawn, journalled, and handed out until its step was reported.

Invariant: a draw is in the journal before anyone sees it, and draws are numbered without gaps, also over restarts. A
resume makes the same draws again; where their groups are gone it says so, and what comes instead has other numbers.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarm.errors import StorageFull
from swarm.events import DiskFull, DrawsAbandoned, GroupsDrawn
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.interfaces import GroupStore
from swarm.node_context import NodeContext
from swarm.peers.coordinator_client import CoordinatorView
from swarm.peers.peer_table import Peers
from swarm.peers.quotas import IntakeQuota
from swarm.types import Digest, Draw, PolicyVersion, StepReport

logger = logging.getLogger(__name__)

STORAGE_RETRY_S = 1.0  # between two attempts to journal a draw on a full disk


@dataclass(eq=False, repr=False)
class DrawJournal:
    """The draws of one node, in order."""

    _context: NodeContext  # `changed` is fired here when a draw made room
    _store: GroupStore  # holds the journal
    _replay: ReplayBuffer  # what is drawn from
    _peers: Peers  # their heads decide how old an external group is
    _coordinator_view: CoordinatorView  # advised bounds and weights
    _intake_quota: IntakeQuota  # grows with each draw

    def __post_init__(self) -> None:
        self._config = self._context.config
        self._lock = asyncio.Lock()
        self._next = 1
        self._checkpoints: deque[int] = deque(maxlen=2)  # first draw after each of the learner's newest two
        self._pending: Draw | None = None
        self.in_hand: frozenset[Digest] = frozenset()  # groups of a draw that is not yet in the journal
        self._has_drawn = False  # a draw was made and its step is not yet reported
        self._guard_max_age_steps: float | None = None  # what the learner's own guard allows
        self.num_local = 0  # groups of the own lineage used up since the process started
        self.num_external = 0  # those of other lineages

    async def restore(self) -> int:
        """Goes on behind the journal; returns how many draws are in it."""
        journal = await self._store.journal(0)
        self._next = journal[-1][0] + 1 if journal else 1
        return len(journal)

    @property
    def comes_first(self) -> bool:
        """A step is under way, or a draw is possible: no time to generate where one follows the other."""
        return self._has_drawn or self._replay.num_local >= self._config.replay.local_groups

    @property
    def needed_from(self) -> int | None:
        """First draw that a resume from the learner's last checkpoint but one makes again.

        The whole journal until the learner has resumed somewhere; None where it makes no checkpoints.
        """
        if not self._config.learner.checkpoint_every:
            return None
        return self._checkpoints[0] if self._checkpoints else 0

    async def draw(self, head: PolicyVersion) -> Draw:
        """The groups of the next step; the same draw again until it was reported."""
        async with self._lock:
            if self._pending is None:
                self._pending = await self._draw(head)
            return self._pending

    async def _draw(self, head: PolicyVersion) -> Draw:
        await self._context.changed.until(lambda: self._round_is_complete(head))
        draw: Draw | None = None
        while draw is None:
            self._replay.limit_age(self._lag_bound())
            draw = self._replay.draw(self._next, head, self._peers.heads.get, self._coordinator_view.source_weights())
            if draw is None:
                self._context.changed.fire()  # what was used up or too old makes room for the generator
                await self._context.changed.wait()
        self._has_drawn = True
        await self._journal(draw)
        self._next = draw.step + 1
        num_local = sum(drawn.scored.is_own_policy(head.policy_id) for drawn in draw.groups)
        self.num_local += num_local + draw.num_zero_variance
        self.num_external += len(draw.groups) - num_local
        self._context.emit(GroupsDrawn.of(draw, self._config.replay, head.policy_id))
        self._context.changed.fire()  # room for the generator
        self._intake_quota.record_draw()
        return draw

    async def _journal(self, draw: Draw) -> None:
        """Records a draw. On a full disk the learner waits, with its groups in hand, until there is room."""
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
        """The journalled draws from `from_step` on, where the learner's checkpoint is.

        Those behind the first whose groups are gone cannot lead to the same weights. They are abandoned, for this
        resume and every later one: their groups count as used up, and the learner goes on with new draws.
        """
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

    def settle(self, report: StepReport) -> None:
        """The step of a draw was made."""
        if self._pending is not None and report.draw_step in (0, self._pending.step):
            self._pending, self._has_drawn = None, False
        every = self._config.learner.checkpoint_every
        if every and report.draw_step and not report.was_skipped and report.version.step % every == 0:
            self._checkpoints.append(report.draw_step + 1)
        self._guard_max_age_steps = report.diagnostics.get("guard_max_age_steps")

    def _round_is_complete(self, head: PolicyVersion) -> bool:
        """Always, unless `replay.barrier` asks to wait for every connected peer's rollouts of this round."""
        return not self._config.replay.barrier or self._peers.have_delivered(head.step)

    def _lag_bound(self) -> int | None:
        """The least age bound of the coordinator's advice and the learner's guard; None: only the configured one."""
        known = (self._coordinator_view.advice.max_age_steps, self._guard_max_age_steps)
        return min((int(bound) for bound in known if bound is not None), default=None)
