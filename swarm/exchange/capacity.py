"""Admission capacity: the number of groups of the own policy that this node and its followers may start.

Invariant: running + granted + waiting <= (max_age_steps + 1) * local_groups, not counting expired credit and the
one-group trials of new followers. Groups of a step under way still count: a group that begins now is a step older when
that step ends. So no group is too old when a draw can take it, if all groups take equally long and begin with the
newest version. If some take longer, the ledger withholds `CreditLedger.num_taken_off` groups from followers, unless
this node generates too: its own generator would begin the withheld groups instead.
"""

from dataclasses import dataclass, field

from swarm.exchange.draw_journal import DrawJournal
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.node_context import NodeContext
from swarm.peers.peer_table import Peers
from swarm.types import Role
from swarm.weight_sync.credit import CreditLedger


@dataclass(eq=False, repr=False)
class GenerationCapacity:
    """Shares admission capacity between the own generator and the followers of a trainer."""

    _context: NodeContext
    _replay: ReplayBuffer  # groups that wait already
    _journal: DrawJournal  # knows whether a step is under way
    _credit_ledger: CreditLedger  # groups that followers may still bring
    _peers: Peers  # the newest step of the own lineage
    _num_running: int = field(default=0, init=False)  # of the own generator, which asks again after each batch

    def __post_init__(self) -> None:
        self._config = self._context.config

    def for_own(self) -> int:
        """Number of groups that the own generator may begin now; 0 while a deterministic learner has a step to make."""
        if self._config.learner.deterministic and self._journal.comes_first:
            return 0  # strictly in turn: the step comes first
        return self._capacity(running=self._credit_ledger.num_outstanding)

    def begin_own_batch(self, count: int) -> int:
        """Records that the own generator may begin `count` groups and starts a batch of them; returns `count`."""
        self._num_running = min(count, self._config.generator.groups_per_batch)
        return count

    def end_own_group(self) -> None:
        """Records that a group of the own batch was made or failed."""
        self._num_running = max(0, self._num_running - 1)

    def for_followers(self) -> int:
        """Number of groups that all followers together may have outstanding now; 0 in a pause.

        With `replay.barrier` these are the groups of one round, from a version's publication to its draw; otherwise as
        many as will not be too old, less a share for the own generator if this node has one.
        """
        if self._context.pause.is_on:
            return 0
        if self._config.replay.barrier:
            waiting = self._replay.num_for_draws + self._replay.num_turned_away + self._num_running
            return 0 if self._journal.comes_first else max(0, self._config.replay.local_groups - waiting)
        capacity = self._capacity(running=self._num_running)
        if Role.GENERATOR not in self._config.roles:
            return capacity
        share = (capacity + self._num_running) // (len(self._credit_ledger.followers) + 1)
        return max(0, capacity - max(0, share - self._num_running))

    def _capacity(self, running: int) -> int:
        in_step = self._config.replay.local_groups if self._journal.is_under_way else 0
        return self._replay.capacity(self._peers.own_head.step, running + in_step)
