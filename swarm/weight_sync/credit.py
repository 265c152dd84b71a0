"""Credit-based flow control: the groups that each generator may start for this trainer, so that none arrives too old.

Pure bookkeeping, single-threaded. Notation: per stream, outstanding = granted - delivered - expired >= 0, and granted
only grows. C is the capacity less `num_taken_off` (in rounds: the capacity).

    sum of outstanding over lines that hold room     <= C at each grant (in rounds: up to the rounding of equal shares)
    outstanding of one generator                     <= min(window, max_outstanding), max_outstanding <= max_window
    max_outstanding                                     x 2 with a useful group, 1 after a useless or expired one
    trials of established generators                 <= max(1, C / GROUPS_PER_TRIAL), one group each, outside C
    outstanding + undrawn groups of all newcomers    <= max(1, C / SHARE), trials included
    age of a grant                                   <= EXPIRY_SHARE x life (trial with others waiting: TRIAL_SHARE)
    late: age of the oldest grant                     > patience_s = LATE x median delivery time of the parties
    num_taken_off                                    <= most_taken_off(); steady at TOO_OLD_SHARE of groups too old

A line holds room unless its grant is a trial, it is late, or it still has to prove itself. A late generator gets no
more grants; its groups are still taken. Once it delivers again, and until max_window of its groups in a row came in
time, its grants hold no room and only fill what all outstanding grants leave. Otherwise a few generators that hold
credit and deliver nothing would stop every step until their grants expire, again and again. The outstanding grants of
an ended stream hold no room; their groups are still taken until they are too old. Trials rotate, so free identities
cannot starve proven ones.

A generator whose newest group lacks log-probs counts as a newcomer, too, in every kind of run: draws have as little
room for its groups as for those of a newcomer.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final

from swarm.clock import Clock
from swarm.flow import BoundedTable
from swarm.peers.parties import Parties
from swarm.peers.peer_table import MAX_PEERS
from swarm.trust_policy import GROUPS_PER_TRIAL, SHARE
from swarm.types import Credit, JsonDict, NodeId

EXPIRY_SHARE: Final = 0.5  # of a group's life: later its group was lost, or comes too late to matter
TRIAL_SHARE: Final = 0.05  # of a group's life: bound of a trial while other generators wait for theirs
TOO_OLD_SHARE: Final = 0.005  # of groups too old at which granted credit stays as it is
LATE: Final = 3.0  # times the median party's longest recent delivery time
_LEAST_PATIENCE_S: Final = 1.0
_MEMORY: Final = 0.9  # decay per group of that time, which is short while credit grows and long when weights are loaded


@dataclass(eq=False, slots=True)
class GeneratorRecord:
    """Delivery record of one generator, over all its streams. Times are monotonic, oldest first."""

    max_outstanding: int = 1
    late_s: deque[float] = field(default_factory=deque[float])  # of ended grants whose groups may still arrive
    left_s: deque[float] = field(default_factory=deque[float])  # grants of ended streams without a group yet
    delivery_s: float | None = None  # longest recent time from a grant to its group; None before the first
    too_many: float = 0.0  # groups by which the capacity was lately too large for its groups to be drawn in time
    num_to_prove: int = 0  # groups in a row that have to come in time before its grants hold room again
    lacks_logprobs: bool = False  # True if its newest admitted group has none

    @property
    def is_proven(self) -> bool:
        """True after a useful group, until a grant expires or a group is refused or useless."""
        return self.max_outstanding > 1


@dataclass(eq=False, slots=True)
class CreditLine:
    """Credit of one generator with an open stream."""

    peer: NodeId
    window: int  # groups that it wants outstanding
    record: GeneratorRecord
    opened_at_s: float  # wall clock
    party: str  # this and `is_newcomer`: as of its newest group, or of the opening
    is_newcomer: bool
    num_granted: int = 0  # groups since the stream was opened
    num_expired: int = 0
    outstanding_s: deque[float] = field(default_factory=deque[float])  # monotonic times of open grants, oldest first
    is_trial: bool = False  # the open grant is a trial
    is_late: bool = False  # as of the last call of `expire`
    is_closed: bool = False  # the stream ended, or the peer opened a newer one

    @property
    def num_outstanding(self) -> int:
        """Number of open grants."""
        return len(self.outstanding_s)

    @property
    def num_delivered(self) -> int:
        """Number of groups that arrived under this credit, admitted or refused."""
        return self.num_granted - self.num_expired - self.num_outstanding

    @property
    def holds_room(self) -> bool:
        """True if the open grants count against the capacity."""
        return not (self.is_trial or self.is_late or self.record.num_to_prove)

    @property
    def wants_more(self) -> bool:
        """True if the generator is proven, is not late, and may have more outstanding."""
        return (
            self.record.is_proven
            and not self.is_late
            and self.num_outstanding < min(self.window, self.record.max_outstanding)
        )

    @property
    def awaits_trial(self) -> bool:
        """True while an unproven generator has no grant outstanding."""
        return not self.record.is_proven and not self.outstanding_s


@dataclass(eq=False, repr=False)
class CreditLedger:
    """Credit that a trainer granted, by generator.

    Except in rounds, the next grant goes to the party with the fewest groups outstanding or undrawn, and within it to
    the generator with the fewest. So a slow generator holds at most an equal share, a fast one gets credit as it
    delivers, and neither a flood of groups nor many identities make a peer the main source.

    Example:
        line = ledger.open(peer, window=8)
        ledger.grant(capacity=20)
        ledger.record_delivery(peer, is_admitted=True)
        ledger.close(line)
    """

    _clock: Clock  # monotonic and wall
    _max_age_s: float  # `replay.max_age_s`, the life of a group
    # Bound of the outstanding groups of one generator, and of its late groups that are still taken: those of expired
    # grants, and of grants from before the generator or this node restarted. At least 2, more than a trial.
    max_window: int
    # Equal shares of the free capacity for all at once, whatever their window (`replay.barrier`): a round waits for
    # everybody, also for generators that deliver nothing.
    in_rounds: bool = False
    num_waiting: Callable[[NodeId], int] = lambda _: 0  # undrawn groups of a generator
    parties: Parties = field(default_factory=Parties)  # by default all are established, each its own party
    # Bound of the groups that are withheld because others were too old: the remaining credit must suffice for a draw,
    # else nobody delivers and withheld credit never returns.
    most_taken_off: Callable[[], int] = int

    def __post_init__(self) -> None:
        self.max_window = max(2, self.max_window)
        self._expiry_s = EXPIRY_SHARE * self._max_age_s
        self._trial_s = TRIAL_SHARE * self._max_age_s
        self._started_s = self._clock.monotonic_s()
        self._records = BoundedTable[NodeId, GeneratorRecord](MAX_PEERS)  # least recently touched first
        self._lines: OrderedDict[NodeId, CreditLine] = OrderedDict()  # open streams, least recently served first

    def open(self, peer: NodeId, window: int) -> CreditLine:
        """Opens the credit of a stream and closes the peer's older one; with a window of 0, does neither."""
        record = self._record_of(peer) if window > 0 else GeneratorRecord()
        parties = self.parties
        line = CreditLine(
            peer,
            min(window, self.max_window),
            record,
            opened_at_s=self._clock.now_s(),
            party=parties.party_of(peer),
            is_newcomer=self._is_newcomer(peer, record),
        )
        if window > 0:
            before = self._lines.get(peer)
            if before is not None:
                self.close(before)
            self._lines[peer] = line
        return line

    def close(self, line: CreditLine) -> None:
        """Ends the credit of a stream: its outstanding grants no longer hold room, and their groups count as late."""
        line.is_closed = True
        if self._lines.get(line.peer) is line:
            del self._lines[line.peer]
            self._add_late(line.record, line.num_outstanding)
            left_s = line.record.left_s
            left_s.extend(list(line.outstanding_s)[: self.max_window - len(left_s)])

    def grant(self, capacity: int) -> None:
        """Expires old grants, then grants free capacity (in groups) and the trials that are due."""
        self.expire()
        capacity -= 0 if self.in_rounds else self.num_taken_off
        free = capacity - self.num_outstanding
        established = [line for line in self._lines.values() if not line.is_newcomer]
        for_newcomers = self._for_newcomers(capacity)
        if self.in_rounds:
            if free > 0 and established:
                share = -(-free // len(established))  # rounded up: everybody takes part in every round
                for line in established:
                    self._grant(line, min(share, line.record.max_outstanding - line.num_outstanding))
        else:
            while wanting := self._wanting(established, capacity):
                self._grant(self._next_of(wanting), 1)
            most_trials = max(1, capacity // GROUPS_PER_TRIAL) if capacity > 0 else 0
            self._try_next(established, max(0, most_trials - sum(line.is_trial for line in established)))
        self._grant_newcomers(for_newcomers, capacity)

    @property
    def num_taken_off(self) -> int:
        """Groups withheld from the capacity: `too_many` of the median party, at most `most_taken_off()`.

        Otherwise groups of long episodes would be too old, after the steps made during those episodes.
        """
        of_party: dict[str, float] = {}
        for line in self._lines.values():
            if line.record.delivery_s is not None and not line.is_newcomer:
                of_party[line.party] = max(line.record.too_many, of_party.get(line.party, 0.0))
        return min(round(median_low(of_party.values())), self.most_taken_off()) if of_party else 0

    def record_too_old(self, producer: NodeId) -> None:
        """Records a group that became too old before a draw took it."""
        record = self._record_of(producer)
        record.too_many = min(record.too_many + 1, self.most_taken_off())

    def _wanting(self, lines: list[CreditLine], capacity: int) -> list[CreditLine]:
        """Lines that may get one more grant.

        A line that has to prove itself again gets a grant only where the open grants of all lines, except trials and
        late lines, leave room; other lines ignore its grants.
        """
        num_holding = self.num_outstanding
        num_all = sum(line.num_outstanding for line in self._lines.values() if not (line.is_trial or line.is_late))
        return [line for line in lines if line.wants_more and (num_holding if line.holds_room else num_all) < capacity]

    def _next_of(self, lines: list[CreditLine]) -> CreditLine:
        """The line with the fewest groups in the party with the fewest groups."""
        loads = Counter[str]()
        for line in self._lines.values():
            loads[line.party] += self._load(line)
        return min(lines, key=lambda line: (loads[line.party], self._load(line)))

    def _load(self, line: CreditLine) -> int:
        return line.num_outstanding + self.num_waiting(line.peer)

    def _is_newcomer(self, peer: NodeId, record: GeneratorRecord) -> bool:
        return record.lacks_logprobs or not self.parties.is_established(peer)

    def _newcomers(self) -> list[CreditLine]:
        return [line for line in self._lines.values() if line.is_newcomer]

    def _for_newcomers(self, capacity: int) -> int:
        """Groups that newcomers may get now; negative if they exceed their share."""
        if capacity <= 0:
            return 0
        return max(1, capacity // SHARE) - sum(map(self._load, self._newcomers()))

    def _grant_newcomers(self, count: int, capacity: int) -> None:
        """Grants groups one by one, first to newcomers that deliver, then to those that wait for a trial."""
        for _ in range(count):
            free = capacity - self.num_outstanding
            newcomers = self._newcomers()
            wanting = [line for line in newcomers if free > 0 and line.wants_more]
            if wanting:
                self._grant(self._next_of(wanting), 1)
            else:
                self._try_next(newcomers, 1)

    def _try_next(self, lines: list[CreditLine], count: int) -> None:
        waiting = [line for line in lines if line.awaits_trial]
        for _ in range(min(count, len(waiting))):
            line = self._next_of(waiting)
            waiting.remove(line)
            line.is_trial = True
            self._grant(line, 1)

    def is_expected(self, producer: NodeId, num_judged: int) -> bool:
        """True if the producer's credit, open or late, covers one more group of our lineage.

        Args:
            num_judged: the producer's groups that arrived and are not counted as delivered yet.
        """
        record, line = self._record_of(producer), self._lines.get(producer)
        oldest_s = self._clock.monotonic_s() - self._max_age_s
        while record.late_s and record.late_s[0] < oldest_s:
            record.late_s.popleft()
        return num_judged < len(record.late_s) + (0 if line is None else line.num_outstanding)

    def record_delivery(self, producer: NodeId, *, is_admitted: bool, is_useful: bool = True) -> None:
        """Settles one grant with a group that arrived; without an open or late grant nothing changes.

        A refused group may be sent again: its grant counts as late. A refused or useless group resets its producer to
        one group at a time; otherwise a member could use up credit with groups that no step learns from.

        Args:
            is_useful: False for a group that hardly any step has a place for.
        """
        record, line = self._record_of(producer), self._lines.get(producer)
        if is_admitted and record.left_s:
            record.left_s.popleft()
        if line is not None:
            line.party, line.is_newcomer = self.parties.party_of(producer), self._is_newcomer(producer, record)
        if line is not None and line.outstanding_s:
            granted_s = line.outstanding_s.popleft()
            taken_s = self._clock.monotonic_s() - granted_s
            if is_admitted:
                is_late = taken_s > self.patience_s
                record.num_to_prove = self.max_window if is_late else max(0, record.num_to_prove - 1)
                record.delivery_s = max(taken_s, _MEMORY * (record.delivery_s or 0.0))
                record.too_many = max(0.0, record.too_many - TOO_OLD_SHARE)
            else:
                self._add_late(record, 1)
            self._end_turn(line)
        elif is_admitted and record.late_s:
            record.late_s.popleft()
        else:
            return
        is_proof = is_admitted and is_useful
        record.max_outstanding = min(2 * record.max_outstanding, self.max_window) if is_proof else 1

    def record_logprobs(self, producer: NodeId, has_logprobs: bool) -> None:
        """Records the presence of log-probs in an admitted group of our lineage; called before `record_delivery`."""
        self._record_of(producer).lacks_logprobs = not has_logprobs

    def predates_stream(self, producer: NodeId, created_at_s: float) -> bool:
        """True if a group was made before its producer's open stream began, so without credit of this stream."""
        line = self._lines.get(producer)
        return line is not None and created_at_s < line.opened_at_s

    def expire(self) -> bool:
        """Ends overdue grants and marks late generators; True if a grant ended or a generator became late."""
        now_s, num_expired = self._clock.monotonic_s(), 0
        trial_s = self._trial_s if any(line.awaits_trial for line in self._lines.values()) else self._expiry_s
        for line in list(self._lines.values()):
            latest_s = now_s - (trial_s if line.is_trial else self._expiry_s)
            while line.outstanding_s and line.outstanding_s[0] < latest_s:
                line.outstanding_s.popleft()
                line.num_expired += 1
                line.record.max_outstanding = 1
                self._add_late(line.record, 1)
                self._end_turn(line)
                num_expired += 1
        late_s, num_late = now_s - self.patience_s, 0
        for line in self._lines.values():
            was_late, line.is_late = line.is_late, bool(line.outstanding_s) and line.outstanding_s[0] < late_s
            left_s = line.record.left_s
            has_left_some = bool(left_s) and left_s[0] < late_s  # opening a new stream makes no grant younger
            if has_left_some:
                left_s.clear()
            if has_left_some or (line.is_late and not was_late):
                line.record.num_to_prove = self.max_window
                num_late += 1
        return num_expired + num_late > 0

    @property
    def patience_s(self) -> float:
        """Seconds after which a grant is late: LATE x the median party's delivery time, at most a grant's lifetime.

        In rounds, and before the first delivery, a grant's lifetime. A minority of the parties cannot raise the median
        beyond the delivery times of the others.
        """
        fastest: dict[str, float] = {}
        for line in self._lines.values():
            taken_s = line.record.delivery_s
            if taken_s is not None and not line.is_newcomer:
                fastest[line.party] = min(taken_s, fastest.get(line.party, taken_s))
        if self.in_rounds or not fastest:
            return self._expiry_s
        return min(self._expiry_s, max(_LEAST_PATIENCE_S, LATE * median_low(fastest.values())))

    @property
    def num_outstanding(self) -> int:
        """Number of open grants that hold room, over all generators."""
        return sum(line.num_outstanding for line in self._lines.values() if line.holds_room)

    @property
    def followers(self) -> frozenset[NodeId]:
        """Generators with an open stream whose window is above 0."""
        return frozenset(self._lines)

    def status(self) -> JsonDict:
        """Groups granted, delivered and expired on each open stream."""
        return {
            peer: {"granted": line.num_granted, "delivered": line.num_delivered, "expired": line.num_expired}
            for peer, line in sorted(self._lines.items())
        }

    def _grant(self, line: CreditLine, count: int) -> None:
        if count > 0:
            line.num_granted += count
            line.outstanding_s.extend([self._clock.monotonic_s()] * count)
            self._lines.move_to_end(line.peer)

    def _end_turn(self, line: CreditLine) -> None:
        line.is_trial = False
        self._lines.move_to_end(line.peer)

    def _record_of(self, peer: NodeId) -> GeneratorRecord:
        line = self._lines.get(peer)
        record = self._records.get(peer) if line is None else line.record
        if record is None:
            record = GeneratorRecord()
            if self._clock.monotonic_s() < self._started_s + self._max_age_s:
                self._add_late(record, self.max_window)  # grants from before a restart of this node are unknown
        self._records[peer] = record
        return record

    def _add_late(self, record: GeneratorRecord, count: int) -> None:
        record.late_s.extend([self._clock.monotonic_s()] * count)
        while len(record.late_s) > self.max_window:
            record.late_s.popleft()


@dataclass(slots=True)
class CreditBalance:
    """A generator's credit: groups granted on the trainer's stream, less the groups made and stored since.

    A group that cannot be scored or stored is never sent and uses no credit. At most `batch` groups made before the
    stream's first message use no credit, either: the trainer settles no grant with a group that arrives too old, and
    would wait for a group that is never started.
    """

    batch: int  # groups that are made together
    _credit: Credit | None = field(default=None, init=False)
    _since_s: float = field(default=0.0, init=False)  # wall clock of the first message
    _num_before: int = field(default=0, init=False)  # groups made before it and stored after it
    _num_stored: int = field(default=0, init=False)

    def reset(self) -> None:
        """Drops the credit of a stream, when the stream ends or a new one begins."""
        self._credit, self._num_before, self._num_stored = None, 0, 0

    def update(self, credit: Credit, now_s: float) -> None:
        """Applies the trainer's credit message, received at `now_s` (wall clock); the total never shrinks."""
        if self._credit is None:
            self._since_s = now_s
        granted = credit.granted if self._credit is None else max(credit.granted, self._credit.granted)
        self._credit = Credit(head_step=credit.head_step, granted=granted)

    def record_stored(self, created_at_s: float) -> None:
        """Counts a stored group that was made at `created_at_s` (wall clock)."""
        is_before = self._credit is None or created_at_s < self._since_s
        if is_before and self._num_before < self.batch:  # bounded, since a clock that was set back must not free all
            self._num_before += 1
        else:
            self._num_stored += 1

    @property
    def num_left(self) -> int:
        """Number of groups that may be started now."""
        return 0 if self._credit is None else max(0, self._credit.granted - self._num_stored)

    @property
    def head_step(self) -> int | None:
        """Newest published step of the trainer by its last message; None before the first message of a stream."""
        return None if self._credit is None else self._credit.head_step
