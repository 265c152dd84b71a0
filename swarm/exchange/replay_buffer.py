"""Replay buffer: the groups that a step may learn from, within bounds of age, reuse, number and bytes.

Invariant: a draw never holds a group twice, nor one older than the age bounds at that moment, nor one
that was used max_reuse times before. Single-threaded and free of I/O; waiting is done by the agent.

Local here are the groups of the node's own lineage, whoever generated them: this node, or one that follows its weights
(`ScoredGroup.is_own_policy`). External ones are of other lineages.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from swarm.clock import Clock
from swarm.config import ReplayConfig
from swarm.exchange.external_sampler import sample
from swarm.exchange.staleness import age_steps
from swarm.types import Digest, Draw, DrawnGroup, NodeId, PolicyVersion, ScoredGroup

HeadOf = Callable[[NodeId], PolicyVersion | None]
ByProducer = dict[NodeId, dict[Digest, "_Entry"]]  # each in order of arrival


DROPS: Final = (
    "zero_variance_external",  # no signal, of another lineage
    "zero_variance_local",  # no signal, of the own lineage; used up by a draw
    "too_old",
    "no_lineage",  # made here with a policy of which nothing is known any more
    "evicted",  # for a newer group, by the bounds in groups and bytes
    "surplus",  # more than the draws of one group's life can take of all followers, or of one of several
    "too_large",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayStatistics:
    """A snapshot of the buffer and its totals since the start."""

    num_local: int
    num_external: int
    num_bytes: int
    fill: float  # of the tighter of both bounds, in [0, 1]
    dropped: dict[str, int]  # reason -> groups, one of DROPS
    consumed_ages: dict[int, int]  # age in steps -> groups, at consumption

    @property
    def num_groups(self) -> int:
        """Local and external groups held."""
        return self.num_local + self.num_external


@dataclass(slots=True)
class _Entry:
    scored: ScoredGroup
    is_own_policy: bool
    uses: int = 0
    age_steps: int = -1  # as the last draw found it
    digest: Digest = field(init=False)  # this and what follows: once, a draw looks at thousands of entries
    source: NodeId = field(init=False)
    first_seen_s: float = field(init=False)
    has_signal: bool = field(init=False)
    policy_id: str = field(init=False)
    oldest_step: int = field(init=False)
    newest_step: int = field(init=False)

    def __post_init__(self) -> None:
        self.digest = self.scored.digest
        self.source = self.scored.group.producer
        self.first_seen_s = self.scored.first_seen_s
        self.has_signal = self.scored.has_signal
        self.policy_id = self.scored.group.policy_id
        self.oldest_step = self.scored.group.oldest_step
        self.newest_step = self.scored.group.newest_step


class ReplayBuffer:
    """Local and external groups waiting for a step.

    Example:
        buffer = ReplayBuffer(ReplayConfig(), identity.node_id, seed=0, clock=SystemClock())
        buffer.add(scored)
        draw = buffer.draw(1, head, heads.get, {})
    """

    def __init__(self, config: ReplayConfig, policy_id: NodeId, seed: int, clock: Clock) -> None:
        self._config = config
        self._policy_id = policy_id
        self._seed = seed
        self._clock = clock
        self._max_age_steps = config.max_age_steps
        self._max_bytes = config.max_bytes
        self._local: dict[Digest, _Entry] = {}  # of the own lineage, in order of arrival
        self._followers: ByProducer = {}  # those of them that other nodes made
        self._external: ByProducer = {}  # of other lineages
        self._all: dict[Digest, _Entry] = {}
        self._num_bytes = 0
        self._zero_variance: list[Digest] = []  # used up since the last draw
        self._dropped: Counter[str] = Counter()
        self._consumed_ages: Counter[int] = Counter()

    # --- filling -------------------------------------------------------------------------------

    def add(self, scored: ScoredGroup) -> bool:
        """Takes a group in; True when it is held afterwards. Zero-variance external groups are only counted."""
        return self._insert(self._entry(scored))

    def restore(self, uses: Mapping[Digest, int], groups: Iterable[ScoredGroup]) -> None:
        """Refills the buffer after a restart.

        Args:
            uses: how often each group was drawn, from the journal.
            groups: oldest first.
        """
        for scored in groups:
            count = uses.get(scored.digest, 0)
            is_spent = count > 0 and not scored.has_signal and not self._config.keep_zero_variance
            is_used_up = count >= self._config.max_reuse or is_spent
            if not is_used_up:
                self._insert(self._entry(scored, count))

    def mark_used(self, draw: Draw) -> None:
        """Counts a journalled draw that is made again after a restart without a refill (`restore` counts it too)."""
        for drawn in draw.groups:
            entry = self._all.get(drawn.scored.digest)
            if entry is not None:
                entry.uses = max(entry.uses, drawn.use)
                if entry.uses >= self._config.max_reuse:
                    self._remove(entry)
        for digest in draw.zero_variance:
            entry = self._all.get(digest)
            if entry is not None:
                self._remove(entry)

    def limit_age(self, max_age_steps: int | None) -> None:
        """Tightens the age bound (advice, adaptive guard); never above the configured one (None)."""
        configured = self._config.max_age_steps
        self._max_age_steps = configured if max_age_steps is None else max(0, min(configured, max_age_steps))

    def limit_bytes(self, max_bytes: int) -> None:
        """Tightens the byte bound: what waits here has to stay in a store that may be smaller."""
        self._max_bytes = min(self._config.max_bytes, max_bytes)

    @property
    def digests(self) -> frozenset[Digest]:
        """Of every group held."""
        return frozenset(self._all)

    @property
    def num_local(self) -> int:
        """Groups of the own lineage held, fresh or not."""
        return len(self._local)

    def num_waiting(self, follower: NodeId) -> int:
        """Groups of the own lineage held that another node made."""
        return len(self._followers.get(follower, ()))

    @property
    def max_age_steps(self) -> int:
        """The age bound in force, steps."""
        return self._max_age_steps

    @property
    def num_external(self) -> int:
        """Groups of other lineages held."""
        return len(self._all) - len(self._local)

    # --- drawing -------------------------------------------------------------------------------

    def draw(
        self,
        step: int,
        head: PolicyVersion,
        head_of: HeadOf,
        source_weights: Mapping[NodeId, float],
        num_external_limit: int | None = None,
    ) -> Draw | None:
        """The groups of one step, counted as used; None while too few local ones are fresh.

        Takes I local groups, oldest first, and up to J external ones. Local groups without signal count
        toward I and are used up without being handed out, unless the configuration keeps them. A draw in
        which nothing has signal is used up and the next one tried.

        Args:
            step: the step it is for; seeds the sampler.
            head: newest version of our own lineage.
            head_of: newest signed head known of a lineage.
            source_weights: see `external_sampler.sample`.
            num_external_limit: lowers J for this draw.
        """
        self._drop_old(head, head_of)
        if len(self._local) < self._config.local_groups:
            return None
        num_external = self._config.external_groups
        if num_external_limit is not None:
            num_external = min(num_external, num_external_limit)
        external = self._choose_external(num_external, step, source_weights)
        while len(self._local) >= self._config.local_groups:
            window = list(self._local.values())[: self._config.local_groups]
            with_signal = [entry for entry in window if self._is_wanted(entry)]
            # All rewards equal: every group-relative advantage is zero, so there is nothing to learn from it.
            for entry in window:
                if not self._is_wanted(entry):
                    self._zero_variance.append(entry.scored.digest)
                    self._drop(entry, "zero_variance_local")
            if with_signal or external:
                return self._use(step, with_signal + external, source_weights)
            if not window:
                break
        return None

    def _is_wanted(self, entry: _Entry) -> bool:
        return entry.has_signal or self._config.keep_zero_variance

    def _choose_external(self, count: int, step: int, source_weights: Mapping[NodeId, float]) -> list[_Entry]:
        held = [entry for group in self._external.values() for entry in group.values()]
        return sample(self._config.sampler, held, count, seed=self._seed, step=step, source_weights=source_weights)

    def _use(self, step: int, entries: list[_Entry], source_weights: Mapping[NodeId, float]) -> Draw:
        groups: list[DrawnGroup] = []
        for entry in entries:
            entry.uses += 1
            age = entry.age_steps
            assert 0 <= age <= self._max_age_steps, (age, self._max_age_steps)
            groups.append(DrawnGroup(scored=entry.scored, age_steps=age, use=entry.uses))
            self._consumed_ages[age] += 1
            if entry.uses >= self._config.max_reuse:
                self._remove(entry)
        zero_variance, self._zero_variance = tuple(self._zero_variance), []
        return Draw(
            step=step,
            groups=tuple(groups),
            num_zero_variance=len(zero_variance),
            source_weights=dict(source_weights),
            zero_variance=zero_variance,
        )

    # --- age and capacity ----------------------------------------------------------------------

    def capacity(self, head_step: int, running: int) -> int:
        """How many groups may be started now so that none becomes too old to use, >= 0.

        (max_age_steps + 1) * I groups are used up before a group that starts now exceeds its age; those
        that wait already and those that are being generated come first, wherever that is. 0 when I is 0: nothing
        here will use what is generated.

        Args:
            head_step: newest step of our own lineage.
            running: groups that are being generated, here or with credit of this node.
        """
        oldest_s, oldest_step = self._clock.now_s() - self._config.max_age_s, head_step - self._max_age_steps
        waiting = sum(
            entry.oldest_step >= oldest_step and entry.first_seen_s >= oldest_s for entry in self._local.values()
        )
        usable = min(self._usable(self._max_age_steps), self._config.max_groups)
        return max(0, usable - waiting - running)

    def _usable(self, max_age_steps: int) -> int:
        """Local groups that the draws within that age can use up."""
        return (max_age_steps + 1) * self._config.local_groups

    def _age(self, entry: _Entry, head: PolicyVersion, head_of: HeadOf) -> int | None:
        """See `staleness.age_steps`; None for what this node made with a policy of which nothing is known any more."""
        lineage_head = head if entry.is_own_policy else head_of(entry.policy_id)
        if lineage_head is None and entry.scored.is_made_here:
            return None
        return age_steps(entry, lineage_head)

    def _drop_old(self, head: PolicyVersion, head_of: HeadOf) -> None:
        """The guarantee on staleness: what is too old in steps or seconds at this moment is never drawn."""
        oldest_s = self._clock.now_s() - self._config.max_age_s
        for entry in list(self._all.values()):
            age = self._age(entry, head, head_of)
            if age is None:
                self._drop(entry, "no_lineage")
            elif age > self._max_age_steps or entry.first_seen_s < oldest_s:
                self._drop(entry, "too_old")
            else:
                entry.age_steps = age

    # --- bounds --------------------------------------------------------------------------------

    def _entry(self, scored: ScoredGroup, uses: int = 0) -> _Entry:
        return _Entry(scored=scored, is_own_policy=scored.is_own_policy(self._policy_id), uses=uses)

    def _insert(self, entry: _Entry) -> bool:
        scored = entry.scored
        if scored.digest in self._all:
            return True
        if not entry.is_own_policy and not self._is_wanted(entry):
            self._dropped["zero_variance_external"] += 1
            return False
        if scored.size_bytes > self._max_bytes:
            self._dropped["too_large"] += 1
            return False
        self._hold(entry)
        if self._is_main_source(entry):
            self._drop(next(iter(self._followers[entry.source].values())), "surplus")
        while sum(map(len, self._followers.values())) > self._usable(self._config.max_age_steps):
            self._drop(_oldest_of_fullest(self._followers), "surplus")
        while len(self._all) > self._config.max_groups or self._num_bytes > self._max_bytes:
            self._drop(self._oldest_to_evict(), "evicted")
        return scored.digest in self._all

    def _is_main_source(self, entry: _Entry) -> bool:
        """Whether a follower holds more than half of what can be used, against others; always enough for one draw."""
        num_held = self.num_waiting(entry.source) if entry.is_own_policy else 0
        most = max(self._config.local_groups, self._usable(self._config.max_age_steps) // 2)
        return most < num_held < len(self._local)

    def _oldest_to_evict(self) -> _Entry:
        """The oldest group of the source that holds most: external groups first, then those of followers, and what was
        made here last, so that no peer can displace it."""
        held = self._external or self._followers
        return _oldest_of_fullest(held) if held else next(iter(self._local.values()))

    def _drop(self, entry: _Entry, reason: str) -> None:
        self._remove(entry)
        self._dropped[reason] += 1

    def _hold(self, entry: _Entry) -> None:
        scored = entry.scored
        if entry.is_own_policy:
            self._local[scored.digest] = entry
        table = self._by_producer(entry)
        if table is not None:
            table.setdefault(scored.group.producer, {})[scored.digest] = entry
        self._all[scored.digest] = entry
        self._num_bytes += scored.size_bytes

    def _remove(self, entry: _Entry) -> None:
        scored = entry.scored
        self._local.pop(scored.digest, None)
        table = self._by_producer(entry)
        if table is not None:
            source = table[scored.group.producer]
            del source[scored.digest]
            if not source:
                del table[scored.group.producer]
        del self._all[scored.digest]
        self._num_bytes -= scored.size_bytes

    def _by_producer(self, entry: _Entry) -> ByProducer | None:
        """The table that counts a group by who made it; None for what this node made of its own lineage."""
        if not entry.is_own_policy:
            return self._external
        return None if entry.scored.is_made_here else self._followers

    @property
    def fill(self) -> float:
        """Of the tighter of the bounds of groups and bytes, in [0, 1]."""
        return max(len(self._all) / self._config.max_groups, self._num_bytes / self._max_bytes)

    def statistics(self) -> ReplayStatistics:
        """How full the buffer is, and what happened to everything that came in."""
        return ReplayStatistics(
            num_local=len(self._local),
            num_external=len(self._all) - len(self._local),
            num_bytes=self._num_bytes,
            fill=self.fill,
            dropped=dict(self._dropped),
            consumed_ages=dict(sorted(self._consumed_ages.items())),
        )


def _oldest_of_fullest(sources: ByProducer) -> _Entry:
    return next(iter(max(sources.values(), key=len).values()))
