"""Replay buffer: the groups that a step may learn from, within bounds of age, reuse, number and bytes.

Invariant: a draw never holds a group twice, nor one older than the age bounds at that moment, nor one that was used
max_reuse times before, nor more groups of one party than `draw_shares` allows (at least one). One thread, no I/O.

"Local" groups belong to the node's own lineage, whether this node or a follower of its weights generated them
(`ScoredGroup.is_own_policy`). "External" groups belong to other lineages.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from swarm.clock import Clock
from swarm.config import ReplayConfig
from swarm.exchange.draw_shares import DrawPlaces, DrawShares
from swarm.exchange.external_sampler import choose
from swarm.exchange.replay_tables import ReplayEntry, ReplayTables, held_bytes
from swarm.exchange.staleness import age_steps
from swarm.peers.parties import Parties
from swarm.trust_policy import SHARE
from swarm.types import Correction, Digest, Draw, DrawnGroup, DrawPlace, NodeId, PolicyVersion, ScoredGroup
from swarm.weight_sync.credit import CreditLedger

HeadOf = Callable[[NodeId], PolicyVersion | None]

NEARLY_FULL = 0.9  # of the bytes: from here on groups make room for each other


class ReplayBuffer:
    """Local and external groups waiting for a step.

    Args:
        config: bounds of age, reuse, number and bytes.
        policy_id: id of the own lineage.
        seed: seed of the sampler.
        clock: wall clock of the ages.
        shares: bounds of each party's part of the draws; None: those of a private run.
        max_stored_bytes: bound of the groups' bytes in the store, where they have to stay until they are drawn.
    """

    def __init__(
        self,
        config: ReplayConfig,
        policy_id: NodeId,
        seed: int,
        clock: Clock,
        shares: DrawShares | None = None,
        max_stored_bytes: float = math.inf,
    ) -> None:
        self._config, self._policy_id, self._seed, self._clock = config, policy_id, seed, clock
        self._max_age_steps = config.max_age_steps
        self._max_stored_bytes = max_stored_bytes
        self._shares = shares or DrawShares(Parties())
        self._places: list[DrawPlace] = []  # drawn since the last draw that was handed out
        self._held = ReplayTables()
        # Since the last draw, as many as a restart reads: a run whose groups lack signal or come late makes no draw.
        self._zero_variance_digests = deque[Digest](maxlen=config.max_groups)  # used up
        self._too_old_digests = deque[Digest](maxlen=config.max_groups)  # of the own lineage, dropped
        self._turned_away = Counter[NodeId]()  # followers' groups that found no place since room was last freed
        self.num_dropped = Counter[str]()  # groups by reason, since the start

    # --- filling -------------------------------------------------------------------------------

    def add(self, scored: ScoredGroup) -> bool:
        """Adds a group; True if it is held afterwards. External groups that no draw would hand out are only counted."""
        return self._insert(self._entry(scored))

    def restore(self, uses: Mapping[Digest, int], groups: Iterable[ScoredGroup]) -> None:
        """Refills the buffer after a restart. `uses`: number of draws of each group so far; `groups`: oldest first."""
        for scored in groups:
            count = uses.get(scored.digest, 0)
            is_spent = count > 0 and not self.is_wanted(scored)
            if count < self._config.max_reuse and not is_spent:
                self._insert(self._entry(scored, count))

    def limit_age(self, max_age_steps: int | None) -> None:
        """Sets the age bound in steps; None, or a bound above the configured one, means the configured one."""
        configured = self._config.max_age_steps
        self._max_age_steps = configured if max_age_steps is None else max(0, min(configured, max_age_steps))

    @property
    def digests(self) -> frozenset[Digest]:
        """Digests of every group held."""
        return frozenset(self._held.all)

    @property
    def num_local(self) -> int:
        """Number of groups of the own lineage held, fresh or not."""
        return len(self._held.local)

    @property
    def num_for_draws(self) -> int:
        """Number of local groups that make a draw possible; newcomers' groups alone do not."""
        return len(self._held.local) - len(self._held.new_followers)

    @property
    def num_external_of_newcomers(self) -> int:
        """Number of external groups held that count as newcomers' groups."""
        return len(self._held.new_external)

    def num_waiting(self, follower: NodeId) -> int:
        """Number of groups of this follower that are held, or that found no place since room was last freed."""
        return self._held.num_of_follower(follower) + self._turned_away[follower]

    @property
    def num_turned_away(self) -> int:
        """Number of followers' groups that found no place since room was last freed by a draw or a dropped group.

        They count against capacity until then: otherwise a follower whose groups cannot be used would get credit for
        ever, and no draw would be made.
        """
        return self._turned_away.total()

    @property
    def num_groups(self) -> int:
        """Number of groups held, local and external."""
        return len(self._held.all)

    @property
    def num_bytes(self) -> int:
        """Estimated memory, in bytes, of the groups held."""
        return self._held.num_bytes

    @property
    def num_external(self) -> int:
        """Number of groups of other lineages held."""
        return len(self._held.all) - len(self._held.local)

    def discard(self, digest: Digest, reason: str) -> None:
        """Drops a group that is a copy or ends the process, and counts the reason; no effect if it is not held."""
        entry = self._held.all.get(digest)
        if entry is not None:
            self._drop(entry, reason)

    # --- drawing -------------------------------------------------------------------------------

    def draw(
        self,
        step: int,
        head: PolicyVersion,
        head_of: HeadOf,
        source_weights: Mapping[NodeId, float],
        credit: CreditLedger | None = None,
    ) -> Draw | None:
        """Draws the groups of one step and counts them as used; None while too few local ones may be drawn.

        Takes `local_groups` local groups, oldest first (fewer at capacity, if shares exclude the rest), and up to
        `external_groups` external ones. Local groups without signal count toward `local_groups` and are used up without
        being handed out, unless the configuration keeps them. If no group of a draw has signal, its local groups are
        used up, and another draw is tried.

        Args:
            step: number of the step; seeds the sampler.
            head: newest version of our own lineage.
            head_of: newest signed head known of a lineage, or None.
            source_weights: see `external_sampler.sample`.
            credit: ledger that records followers' groups that are too old; no draw waits for groups that it withholds.
        """
        self._drop_old(head, head_of, credit)
        config = self._config
        num_places = config.local_groups + config.external_groups
        places = self._shares.begin(self._held.producers, num_places)
        num_withheld = 0 if credit is None else credit.num_taken_off
        while (window := self._choose_local(places, num_withheld)) is not None:
            with_external = places.fork()
            external = self._choose_external(step, source_weights, with_external)
            with_signal = [entry for entry in window if entry.is_wanted]
            # All rewards equal: every group-relative advantage is zero, so there is nothing to learn from it.
            for entry in window:
                if not entry.is_wanted:
                    self._zero_variance_digests.append(entry.scored.digest)
                    self._drop(entry, "zero_variance_local")
            if with_signal or external:
                self._commit(with_external)
                return self._use(step, with_signal + external, source_weights)
            if not window:
                break
        self._commit(places)
        return None

    def _commit(self, places: DrawPlaces) -> None:
        self._shares.commit(places)
        self._places += places.taken

    def is_wanted(self, scored: ScoredGroup) -> bool:
        """True if a draw would hand the group out."""
        config = self._config
        has_signal = scored.has_signal or (config.keep_turn_signal and scored.has_turn_signal)
        return has_signal or config.keep_zero_variance

    def _choose_local(self, places: DrawPlaces, num_withheld: int) -> list[ReplayEntry] | None:
        """The next `local_groups` local groups, oldest first, with their places taken; None while too few may be drawn.

        Fewer if the buffer is at capacity, so that no more groups can come, and the shares exclude some of its groups.
        """
        count = self._config.local_groups
        if not self._shares.are_bounded and len(self._held.local) < count:
            return None
        local = sorted(self._held.local.values(), key=lambda entry: entry.oldest_step)  # of one step: as they came
        trial, chosen, num_free = places.fork(), list[ReplayEntry](), 0
        while len(chosen) + num_free < count:
            entry = self._oldest_for_place(local, trial)
            if entry is None:
                trial.leave_free(1)
                num_free += 1
                continue
            local.remove(entry)
            chosen.append(entry)
            if not entry.scored.is_made_here:
                trial.take(entry.source, entry.task, entry.is_newcomer)
        if num_free:
            over_share = [entry for entry in local if not entry.is_newcomer]
            if not self._is_at_capacity(num_withheld) or all(entry.is_newcomer for entry in (*chosen, *over_share)):
                return None
            if not chosen:
                chosen, trial = over_share[:1], places.fork()
                trial.take(chosen[0].source, chosen[0].task, is_newcomer=False)
                trial.leave_free(count - 1)
        places.adopt(trial)
        return chosen

    def _oldest_for_place(self, local: list[ReplayEntry], places: DrawPlaces) -> ReplayEntry | None:
        """The oldest group that may take the next place; None if there is none.

        A group without room is tried again at each later place, as older places leave the window: otherwise younger
        groups of its party would be drawn, and the older group would become too old.
        """
        count, has_room = self._config.local_groups, dict[tuple[NodeId, bool], bool]()
        for entry in local:
            if entry.scored.is_made_here:
                return entry
            of = entry.source, entry.is_newcomer
            if of not in has_room:
                has_room[of] = places.has_room_for(*of, of_places=count)
            if has_room[of] and places.has_room_for_task(entry.source, entry.task, entry.is_newcomer):
                return entry
        return None

    def _is_at_capacity(self, num_withheld: int) -> bool:
        """True if the local groups here leave no credit for further groups; see `GenerationCapacity`."""
        if self._share_of_bytes >= NEARLY_FULL:
            return True
        if self._config.barrier and self.num_for_draws + self.num_turned_away >= self._config.local_groups:
            return True
        return len(self._held.local) + self.num_turned_away >= self._most_local - num_withheld

    @property
    def _most_local(self) -> int:
        """Most local groups that may wait under the current age bound."""
        return min(self._usable(self._max_age_steps), self._config.max_groups)

    def most_taken_off(self) -> int:
        """Most local groups that the credit ledger may withhold: the rest suffices for a draw and one more group."""
        return max(0, self._most_local - self._config.local_groups - 1)

    def _choose_external(
        self, step: int, source_weights: Mapping[NodeId, float], places: DrawPlaces
    ) -> list[ReplayEntry]:
        config = self._config
        tables = (self._held.external, self._held.new_external)[: 2 if places.may_take_newcomer else 1]
        held = [
            (party, entry.is_newcomer, entry)
            for table in tables
            for party in table.parties
            for entry in table.of(party)
        ]
        return choose(
            config.sampler,
            held,
            config.external_groups,
            places,
            seed=self._seed,
            step=step,
            source_weights=source_weights,
        )

    def _use(self, step: int, entries: list[ReplayEntry], source_weights: Mapping[NodeId, float]) -> Draw:
        groups: list[DrawnGroup] = []
        for entry in entries:
            entry.uses += 1
            age = entry.age_steps
            assert 0 <= age <= self._max_age_steps, (age, self._max_age_steps)
            is_established = not entry.is_newcomer
            groups.append(DrawnGroup(scored=entry.scored, age_steps=age, use=entry.uses, is_established=is_established))
            if entry.uses >= self._config.max_reuse:
                self._remove(entry)
        self._turned_away.clear()
        zero_variance_digests, too_old_digests = tuple(self._zero_variance_digests), tuple(self._too_old_digests)
        self._zero_variance_digests.clear()
        self._too_old_digests.clear()
        places, self._places = tuple(self._places), []
        return Draw(
            step=step,
            groups=tuple(groups),
            num_zero_variance=len(zero_variance_digests),
            source_weights=dict(source_weights),
            zero_variance_digests=zero_variance_digests,
            too_old_digests=too_old_digests,
            places=places,
        )

    # --- age and capacity ----------------------------------------------------------------------

    def capacity(self, head_step: int, running: int) -> int:
        """Number of groups that may be started now so that none becomes too old to use, >= 0.

        (max_age_steps + 1) * local_groups groups are used up before a group that starts now becomes too old; groups
        that wait or are being generated, here or elsewhere, come first.

        Args:
            head_step: newest step of our own lineage.
            running: number of groups that are being generated, here or with credit of this node.
        """
        oldest_s, oldest_step = self._clock.now_s() - self._config.max_age_s, head_step - self._max_age_steps
        waiting = sum(
            entry.oldest_step >= oldest_step and entry.first_seen_s >= oldest_s for entry in self._held.local.values()
        )
        return max(0, self._most_local - waiting - self.num_turned_away - running)

    def _usable(self, max_age_steps: int) -> int:
        """Number of local groups that the draws within that age can use up."""
        return (max_age_steps + 1) * self._config.local_groups

    def _drop_old(self, head: PolicyVersion, head_of: HeadOf, credit: CreditLedger | None) -> None:
        """Drops every group that is too old now: the guarantee on staleness. Sets the age of the others."""
        oldest_s = self._clock.now_s() - self._config.max_age_s
        for entry in list(self._held.all.values()):
            lineage_head = head if entry.is_own_policy else head_of(entry.policy_id)
            age = age_steps(entry, lineage_head)
            if lineage_head is None and entry.scored.is_made_here:
                self._drop(entry, "no_lineage")
            elif age > self._max_age_steps or entry.first_seen_s < oldest_s:
                self._drop(entry, "too_old")
                if entry.is_own_policy:
                    self._too_old_digests.append(entry.digest)
                    if credit is not None and not entry.scored.is_made_here:
                        credit.record_too_old(entry.source)
            else:
                entry.age_steps = age

    def outlast_pause(self, since_s: float) -> None:
        """Subtracts a pause, from `since_s` (wall clock) until now, from the age of groups of the own lineage."""
        now_s = self._clock.now_s()
        for entry in self._held.local.values():
            entry.first_seen_s += max(0.0, now_s - max(since_s, entry.first_seen_s))

    # --- bounds --------------------------------------------------------------------------------

    def _entry(self, scored: ScoredGroup, uses: int = 0) -> ReplayEntry:
        group = scored.group
        return ReplayEntry(
            digest=scored.digest,
            source=group.producer,
            age_steps=-1,  # until a draw looks at it
            first_seen_s=scored.first_seen_s,
            scored=scored,
            is_own_policy=scored.is_own_policy(self._policy_id),
            party=self._shares.parties.party_of(group.producer),
            num_bytes=held_bytes(scored),
            is_newcomer=self._is_newcomers(scored),
            uses=uses,
            is_wanted=self.is_wanted(scored),
            policy_id=group.policy_id,
            oldest_step=group.oldest_step,
            newest_step=group.newest_step,
            task=(group.env, group.task_id),
        )

    def _is_newcomers(self, scored: ScoredGroup) -> bool:
        """True if a group counts as a newcomer's: its maker, another node, is not established or left out log-probs.

        Only a node that has the policy can give its exact log-probs, in a private run too.
        """
        if scored.is_made_here:
            return False
        is_exact = scored.correction is Correction.EXACT
        return not (is_exact and self._shares.parties.is_established(scored.group.producer))

    def _insert(self, entry: ReplayEntry) -> bool:
        scored = entry.scored
        if scored.digest in self._held.all:
            return True
        if not entry.is_own_policy and not entry.is_wanted:
            self.num_dropped["zero_variance_external"] += 1
            return False
        if entry.num_bytes > self._config.max_bytes or scored.size_bytes > self._max_stored_bytes:
            self.num_dropped["too_large"] += 1
            return False
        if self._has_enough_of_task(entry):
            self.num_dropped["same_task"] += 1
            self._turn_away(entry)
            return False
        self._held.hold(entry)
        self._shares.count_waiting(entry.party, entry.task, 1, is_newcomer=entry.is_newcomer)
        if self._is_main_source(entry):
            self._drop(self._held.followers.oldest(entry.source), "surplus")
            self._turn_away(entry)
        most = self._usable(self._config.max_age_steps)
        while len(self._held.followers) > most:
            self._drop(self._held.followers.oldest_of_longest(), "surplus")
        while len(self._held.new_followers) > max(1, most // SHARE):
            self._drop(self._held.new_followers.oldest_of_longest(), "surplus")
        while len(self._held.all) > self._config.max_groups or self._share_of_bytes > 1.0:
            self._drop(self._held.oldest_to_evict(), "evicted")
        return scored.digest in self._held.all

    def _has_enough_of_task(self, entry: ReplayEntry) -> bool:
        if not self._shares.are_bounded or entry.scored.is_made_here:
            return False
        uses_left = sum(self._config.max_reuse - other.uses for other in self._held.of_same_task(entry))
        left = self._shares.num_left_of_task(entry.source, entry.task, entry.is_newcomer, lambda: self._held.producers)
        return left <= uses_left

    def _is_main_source(self, entry: ReplayEntry) -> bool:
        """True if the entry's follower, one of several, holds more groups than one draw and than half of `_usable`."""
        num_held = len(self._held.followers.of(entry.source)) if entry.is_own_policy else 0
        most = max(self._config.local_groups, self._usable(self._config.max_age_steps) // 2)
        return most < num_held < len(self._held.local)

    def _turn_away(self, entry: ReplayEntry) -> None:
        """Counts a follower's group that found no place; newcomers' groups make no draw possible anyway."""
        if self._shares.are_bounded and entry.is_own_policy and not entry.is_newcomer:
            self._turned_away[entry.source] += 1

    def _remove(self, entry: ReplayEntry) -> None:
        self._held.remove(entry)
        self._shares.count_waiting(entry.party, entry.task, -1, is_newcomer=entry.is_newcomer)

    def _drop(self, entry: ReplayEntry, reason: str) -> None:
        self._remove(entry)
        self.num_dropped[reason] += 1
        if reason != "surplus":
            self._turned_away.clear()  # there is room again, also of its task

    @property
    def fill(self) -> float:
        """Fill of the tighter bound, number of groups or bytes, in [0, 1]."""
        return max(len(self._held.all) / self._config.max_groups, self._share_of_bytes)

    @property
    def _share_of_bytes(self) -> float:
        """Fill of the tighter bound, memory or store."""
        held = self._held
        return max(held.num_bytes / self._config.max_bytes, held.num_stored_bytes / self._max_stored_bytes)
