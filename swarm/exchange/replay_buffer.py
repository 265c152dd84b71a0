"""Replay buffer: the groups that a step may learn from, within bounds of age, reuse, number and bytes.

Invariant: a draw never holds a group twice, nor one older than the age bounds at that moment, nor one
that was used max_reuse times before. Single-threaded and free of I/O; waiting is done by the agent.

Local here are the groups of the node's own lineage, whoever generated them: this node, or one that follows its weights
(`ScoredGroup.is_own_policy`). External ones are of other lineages.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from swarm.clock import Clock
from swarm.config import ReplayConfig
from swarm.exchange.external_sampler import Candidate, sample
from swarm.exchange.staleness import age_steps
from swarm.types import Digest, Draw, DrawnGroup, NodeId, PolicyVersion, ScoredGroup

HeadOf = Callable[[NodeId], PolicyVersion | None]
ByProducer = dict[NodeId, dict[Digest, "_Entry"]]  # each in order of arrival


@dataclass(eq=False, kw_only=True, slots=True)
class _Entry(Candidate):
    """A group with what is asked of it again and again: a draw looks at thousands of entries."""

    scored: ScoredGroup
    is_own_policy: bool
    uses: int
    has_signal: bool
    policy_id: str
    oldest_step: int
    newest_step: int


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
        self.num_bytes = 0  # of the groups held, sealed
        self._zero_variance_digests: list[Digest] = []  # used up since the last draw
        self.num_dropped: Counter[str] = Counter()  # groups by reason, since the start

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
    def num_groups(self) -> int:
        """Local and external groups held."""
        return len(self._all)

    @property
    def num_external(self) -> int:
        """Groups of other lineages held."""
        return len(self._all) - len(self._local)

    def discard(self, digest: Digest) -> None:
        """Drops a group that turned out to be a copy, or a killer; nothing where it is not held."""
        entry = self._all.get(digest)
        if entry is not None:
            self._drop(entry, "copied")

    # --- drawing -------------------------------------------------------------------------------

    def draw(
        self, step: int, head: PolicyVersion, head_of: HeadOf, source_weights: Mapping[NodeId, float]
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
        """
        self._drop_old(head, head_of)
        if len(self._local) < self._config.local_groups:
            return None
        external = self._choose_external(step, source_weights)
        while len(self._local) >= self._config.local_groups:
            window = list(self._local.values())[: self._config.local_groups]
            with_signal = [entry for entry in window if self._is_wanted(entry)]
            # All rewards equal: every group-relative advantage is zero, so there is nothing to learn from it.
            for entry in window:
                if not self._is_wanted(entry):
                    self._zero_variance_digests.append(entry.scored.digest)
                    self._drop(entry, "zero_variance_local")
            if with_signal or external:
                return self._use(step, with_signal + external, source_weights)
            if not window:
                break
        return None

    def _is_wanted(self, entry: _Entry) -> bool:
        return entry.has_signal or self._config.keep_zero_variance

    def _choose_external(self, step: int, source_weights: Mapping[NodeId, float]) -> list[_Entry]:
        held = [entry for group in self._external.values() for entry in group.values()]
        config = self._config
        return sample(
            config.sampler, held, config.external_groups, seed=self._seed, step=step, source_weights=source_weights
        )

    def _use(self, step: int, entries: list[_Entry], source_weights: Mapping[NodeId, float]) -> Draw:
        groups: list[DrawnGroup] = []
        for entry in entries:
            entry.uses += 1
            age = entry.age_steps
            assert 0 <= age <= self._max_age_steps, (age, self._max_age_steps)
            groups.append(DrawnGroup(scored=entry.scored, age_steps=age, use=entry.uses))
            if entry.uses >= self._config.max_reuse:
                self._remove(entry)
        zero_variance_digests, self._zero_variance_digests = tuple(self._zero_variance_digests), []
        return Draw(
            step=step,
            groups=tuple(groups),
            num_zero_variance=len(zero_variance_digests),
            source_weights=dict(source_weights),
            zero_variance_digests=zero_variance_digests,
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
        group = scored.group
        return _Entry(
            digest=scored.digest,
            source=group.producer,
            age_steps=-1,  # until a draw looks at it
            first_seen_s=scored.first_seen_s,
            scored=scored,
            is_own_policy=scored.is_own_policy(self._policy_id),
            uses=uses,
            has_signal=scored.has_signal,
            policy_id=group.policy_id,
            oldest_step=group.oldest_step,
            newest_step=group.newest_step,
        )

    def _insert(self, entry: _Entry) -> bool:
        scored = entry.scored
        if scored.digest in self._all:
            return True
        if not entry.is_own_policy and not self._is_wanted(entry):
            self.num_dropped["zero_variance_external"] += 1
            return False
        if scored.size_bytes > self._max_bytes:
            self.num_dropped["too_large"] += 1
            return False
        self._hold(entry)
        if self._is_main_source(entry):
            self._drop(next(iter(self._followers[entry.source].values())), "surplus")
        while sum(map(len, self._followers.values())) > self._usable(self._config.max_age_steps):
            self._drop(_oldest_of_fullest(self._followers), "surplus")
        while len(self._all) > self._config.max_groups or self.num_bytes > self._max_bytes:
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
        self.num_dropped[reason] += 1

    def _hold(self, entry: _Entry) -> None:
        scored = entry.scored
        if entry.is_own_policy:
            self._local[scored.digest] = entry
        table = self._by_producer(entry)
        if table is not None:
            table.setdefault(scored.group.producer, {})[scored.digest] = entry
        self._all[scored.digest] = entry
        self.num_bytes += scored.size_bytes

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
        self.num_bytes -= scored.size_bytes

    def _by_producer(self, entry: _Entry) -> ByProducer | None:
        """The table that counts a group by who made it; None for what this node made of its own lineage."""
        if not entry.is_own_policy:
            return self._external
        return None if entry.scored.is_made_here else self._followers

    @property
    def fill(self) -> float:
        """Of the tighter of the bounds of groups and bytes, in [0, 1]."""
        return max(len(self._all) / self._config.max_groups, self.num_bytes / self._max_bytes)


def _oldest_of_fullest(sources: ByProducer) -> _Entry:
    return next(iter(max(sources.values(), key=len).values()))
