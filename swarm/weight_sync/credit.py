"""Credit-based flow control: how many groups each generator may start for this trainer, so that none arrives too old.

Invariant: whenever credit is granted, `num_granted - num_delivered - num_expired <= capacity` over all generators that
deliver and are not late (in rounds up to the rounding of equal shares). The total granted on a stream only grows; what
a generator that disconnected or stalls had outstanding is free again. A generator that never delivered gets a trial of
one group outside the capacity, in turn with the others, so that free identities cannot starve proven ones. In an open
run newcomers have an eighth of the capacity together, or one group, with what waits of theirs, trials included. Who
takes far longer than most is late, long before its grants expire: it gets no more, its groups are still taken, and what
it holds is free for others, until as many of its groups as it may have outstanding came in time, one after the other.
Else a few that hold credit and bring nothing stop every step until it expires, or until they are late once more. Less
is granted where groups are too old before a draw takes them, until one in two hundred is. Pure bookkeeping,
single-threaded.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final

from swarm.clock import Clock
from swarm.flow import BoundedTable
from swarm.peers.parties import SHARE, Parties
from swarm.peers.peer_table import MAX_PEERS
from swarm.types import Credit, JsonDict, NodeId

EXPIRY_SHARE: Final = 0.5  # of a group's life: the group of an older grant was lost, or comes too late to matter
TRIAL_SHARE: Final = 0.05  # of a group's life: a trial lasts no longer while other generators wait for theirs
GROUPS_PER_TRIAL: Final = 4  # of capacity for each trial at a time; one trial at least
TOO_OLD_SHARE: Final = 0.005  # of groups, at which what is granted stays as it is
LATE: Final = 3.0  # times what the median party took at most from grant to group
_LEAST_PATIENCE_S: Final = 1.0
_MEMORY: Final = 0.9  # of that time, with each group: it is short while credit grows, and long where weights are loaded


@dataclass(eq=False, slots=True)
class GeneratorRecord:
    """Delivery record of one generator, over all its streams. Times are monotonic, oldest first."""

    max_outstanding: int = 1  # doubles with each useful group, back to 1 with a useless one or when a grant expires
    late_s: deque[float] = field(default_factory=deque[float])  # of ended grants whose groups may still arrive
    left_s: deque[float] = field(default_factory=deque[float])  # grants of ended streams that brought no group yet
    delivery_s: float | None = None  # from a grant to its group, the most lately; None before the first
    too_many: float = 0.0  # groups of the capacity that were too many for its own to be drawn in time, as of late
    num_to_prove: int = 0  # groups that have to come in time, one after the other, until what it holds counts again

    @property
    def is_proven(self) -> bool:
        """Whether a group of it was useful, and no grant expired since."""
        return self.max_outstanding > 1


@dataclass(eq=False, slots=True)
class CreditLine:
    """Credit of one generator while its stream is open."""

    peer: NodeId
    window: int  # groups that it wants to have outstanding at a time
    record: GeneratorRecord
    opened_at_s: float  # wall clock
    party: str  # this and the next: as of its newest group, or the opening
    is_newcomer: bool
    num_granted: int = 0  # groups since the stream was opened
    num_expired: int = 0  # of them: not delivered in time
    outstanding_s: deque[float] = field(default_factory=deque[float])  # monotonic times of open grants, oldest first
    is_trial: bool = False  # the open grant is one
    is_late: bool = False  # its oldest open grant is, as of the last call of `expire`
    is_closed: bool = False  # the stream ended, or the peer opened a newer one

    @property
    def num_outstanding(self) -> int:
        """`num_granted - num_delivered - num_expired`."""
        return len(self.outstanding_s)

    @property
    def num_delivered(self) -> int:
        """Groups that arrived under this credit, admitted or refused."""
        return self.num_granted - self.num_expired - self.num_outstanding

    @property
    def holds_room(self) -> bool:
        """Whether what it has outstanding counts against the capacity: not as a trial, nor where it is or was late."""
        return not (self.is_trial or self.is_late or self.record.num_to_prove)

    @property
    def wants_more(self) -> bool:
        """Whether a generator that delivers has less outstanding than it may, and is not late."""
        return (
            self.record.is_proven
            and not self.is_late
            and self.num_outstanding < min(self.window, self.record.max_outstanding)
        )

    @property
    def awaits_trial(self) -> bool:
        """Whether an unproven generator has nothing outstanding."""
        return not self.record.is_proven and not self.outstanding_s


class CreditLedger:
    """Credit that a trainer granted, by generator.

    The next grant goes to the party with the fewest groups outstanding or waiting for a draw, and of its generators to
    the one with the fewest: a slow one holds at most an equal share of the capacity, a fast one is served as often as
    it delivers, and one that floods, or comes with many keys, does not become the main source. A generator is late when
    its oldest grant is open for LATE times what the median party needs. A grant expires when its group has not arrived
    after a share of a group's life; the generator starts again with a trial. Its group is still taken if it arrives
    before it is too old.

    Args:
        clock: monotonic and wall.
        max_age_s: `replay.max_age_s`, the life of a group.
        max_window: most groups that one generator may have outstanding; also the most late groups of it that are taken
            (expired grants, and grants from before it or this node restarted).
        in_rounds: all generators get equal shares of the free capacity at once whatever their window, newcomers one
            group of it (`replay.barrier`): a round waits for everybody, also for those that deliver nothing.
        num_waiting: groups of a generator that wait for a draw.
        most_taken_off: most groups of the capacity that are not granted since others were too old, by the age bound of
            this moment: what is left has to make a draw, else nobody delivers and nothing is ever given back.
        parties: who is established, and whose keys are one; without them everybody is, and each key for itself.

    Example:
        line = ledger.open(peer, window=8)
        ledger.grant(capacity=20)
        ledger.record_delivery(peer, is_admitted=True)
        ledger.close(line)
    """

    def __init__(
        self,
        clock: Clock,
        max_age_s: float,
        max_window: int,
        in_rounds: bool = False,
        num_waiting: Callable[[NodeId], int] = lambda _: 0,
        parties: Parties | None = None,
        most_taken_off: Callable[[], int] = lambda: 0,
    ) -> None:
        self._clock = clock
        self._max_age_s = max_age_s
        self._expiry_s = EXPIRY_SHARE * max_age_s
        self._trial_s = TRIAL_SHARE * max_age_s
        self._max_window = max(2, max_window)  # more than a trial
        self._in_rounds = in_rounds
        self._num_waiting = num_waiting
        self._parties = parties or Parties()
        self._most_taken_off = most_taken_off
        self._started_s = clock.monotonic_s()
        self._records = BoundedTable[NodeId, GeneratorRecord](MAX_PEERS)  # the one touched last comes last
        self._lines: OrderedDict[NodeId, CreditLine] = OrderedDict()  # open ones; the one served last comes last

    def open(self, peer: NodeId, window: int) -> CreditLine:
        """Opens the credit of a peer's stream and closes that of its older one. A window of 0 is never granted any."""
        record = self._record_of(peer) if window > 0 else GeneratorRecord()
        parties = self._parties
        line = CreditLine(
            peer,
            min(window, self._max_window),
            record,
            opened_at_s=self._clock.now_s(),
            party=parties.party_of(peer),
            is_newcomer=not parties.is_established(peer),
        )
        if window > 0:
            before = self._lines.get(peer)
            if before is not None:
                self.close(before)
            self._lines[peer] = line
        return line

    def close(self, line: CreditLine) -> None:
        """Frees what a stream that ended had outstanding."""
        line.is_closed = True
        if self._lines.get(line.peer) is line:
            del self._lines[line.peer]
            self._add_late(line.record, line.num_outstanding)
            left_s = line.record.left_s
            left_s.extend(list(line.outstanding_s)[: self._max_window - len(left_s)])

    def grant(self, capacity: int) -> None:
        """Expires old grants, then grants what is free and the trials that are due.

        Args:
            capacity: most groups that may be outstanding in all, besides trials; `num_taken_off` are not granted.
        """
        self.expire()
        capacity -= 0 if self._in_rounds else self.num_taken_off
        free = capacity - self.num_outstanding
        established = [line for line in self._lines.values() if not line.is_newcomer]
        for_newcomers = self._for_newcomers(capacity)
        if self._in_rounds:
            if free > 0 and established:
                share = -(-free // len(established))  # rounded up: everybody takes part in every round
                for line in established:
                    self._grant(line, min(share, line.record.max_outstanding - line.num_outstanding))
        else:
            while wanting := self._wanting(established, capacity):
                self._grant(self._next_of(wanting), 1)
            num_new = max(0, self._max_trials(capacity) - sum(line.is_trial for line in established))
            self._try_next(established, num_new)
        self._grant_newcomers(for_newcomers, capacity)

    @property
    def num_taken_off(self) -> int:
        """Groups of the capacity that nobody gets credit for, as so many were too many for the median party: steps that
        go on while a long episode is played would leave its group too old.
        """
        of_party: dict[str, float] = {}
        for line in self._lines.values():
            if line.record.delivery_s is not None and not line.is_newcomer:
                of_party[line.party] = max(line.record.too_many, of_party.get(line.party, 0.0))
        return min(round(median_low(of_party.values())), self._most_taken_off()) if of_party else 0

    def record_too_old(self, producer: NodeId) -> None:
        """A group of it was too old before a draw took it."""
        record = self._record_of(producer)
        record.too_many = min(record.too_many + 1, self._most_taken_off())

    def _max_trials(self, capacity: int) -> int:
        return max(1, capacity // GROUPS_PER_TRIAL) if capacity > 0 else 0

    def _wanting(self, lines: list[CreditLine], capacity: int) -> list[CreditLine]:
        """Who may get one more. Who was late waits for what all have outstanding, and nobody for what it has."""
        num_holding = self.num_outstanding
        num_all = sum(line.num_outstanding for line in self._lines.values() if not (line.is_trial or line.is_late))
        return [line for line in lines if line.wants_more and (num_holding if line.holds_room else num_all) < capacity]

    def _next_of(self, lines: list[CreditLine]) -> CreditLine:
        """Of the party with the fewest groups, the generator with the fewest."""
        loads = Counter[str]()
        for line in self._lines.values():
            loads[line.party] += self._load(line)
        return min(lines, key=lambda line: (loads[line.party], self._load(line)))

    def _load(self, line: CreditLine) -> int:
        return line.num_outstanding + self._num_waiting(line.peer)

    def _newcomers(self) -> list[CreditLine]:
        return [line for line in self._lines.values() if line.is_newcomer]

    def _for_newcomers(self, capacity: int) -> int:
        """Groups that newcomers may get now; negative where they have more than their share already."""
        if self._parties.is_private or capacity <= 0:
            return 0
        return max(1, capacity // SHARE) - sum(map(self._load, self._newcomers()))

    def _grant_newcomers(self, count: int, capacity: int) -> None:
        """In turn, those that deliver before those that are tried."""
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
        """Whether one more group of our lineage by this producer has credit, open or late.

        Args:
            num_judged: groups of it that arrived and are not yet counted as delivered.
        """
        record, line = self._record_of(producer), self._lines.get(producer)
        oldest_s = self._clock.monotonic_s() - self._max_age_s
        while record.late_s and record.late_s[0] < oldest_s:
            record.late_s.popleft()
        return num_judged < len(record.late_s) + (0 if line is None else line.num_outstanding)

    def record_delivery(self, producer: NodeId, *, is_admitted: bool, is_useful: bool = True) -> None:
        """Settles one grant with a group that arrived.

        A refused group may be sent again. It ends what its producer had proven, as one does that was admitted and is
        not useful (steps have hardly a place for it): else a member could fill the credit of others with groups that
        nobody learns from, and steps would be made of what is left.
        """
        record, line = self._record_of(producer), self._lines.get(producer)
        if is_admitted and record.left_s:
            record.left_s.popleft()
        if line is not None:
            line.party, line.is_newcomer = self._parties.party_of(producer), not self._parties.is_established(producer)
        if line is not None and line.outstanding_s:
            granted_s = line.outstanding_s.popleft()
            taken_s = self._clock.monotonic_s() - granted_s
            if is_admitted:
                is_late = taken_s > self.patience_s
                record.num_to_prove = self._max_window if is_late else max(0, record.num_to_prove - 1)
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
        record.max_outstanding = min(2 * record.max_outstanding, self._max_window) if is_proof else 1

    def predates_stream(self, producer: NodeId, created_at_s: float) -> bool:
        """Whether a group was made before its producer's stream was opened, hence without credit of this stream."""
        line = self._lines.get(producer)
        return line is not None and created_at_s < line.opened_at_s

    def expire(self) -> bool:
        """Ends the grants that were not delivered in time, and notes who is late. True where others get room by it."""
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
            has_left_some = bool(left_s) and left_s[0] < late_s  # a new stream makes no grant younger
            if has_left_some:
                left_s.clear()
            if has_left_some or (line.is_late and not was_late):
                line.record.num_to_prove = self._max_window
                num_late += 1
        return num_expired + num_late > 0

    @property
    def patience_s(self) -> float:
        """Seconds from a grant until its group is late, at most until it expires; a round waits for everybody.

        Fewer than half of the parties cannot move it beyond what the others take.
        """
        fastest: dict[str, float] = {}
        for line in self._lines.values():
            taken_s = line.record.delivery_s
            if taken_s is not None and not line.is_newcomer:
                fastest[line.party] = min(taken_s, fastest.get(line.party, taken_s))
        if self._in_rounds or not fastest:
            return self._expiry_s
        return min(self._expiry_s, max(_LEAST_PATIENCE_S, LATE * median_low(fastest.values())))

    @property
    def num_outstanding(self) -> int:
        """`granted - delivered - expired` over all generators whose grants hold room."""
        return sum(line.num_outstanding for line in self._lines.values() if line.holds_room)

    @property
    def followers(self) -> frozenset[NodeId]:
        """Generators with an open stream that asks for credit."""
        return frozenset(self._lines)

    def status(self) -> JsonDict:
        """Groups granted, delivered and expired on the open stream of each follower."""
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
                self._add_late(record, self._max_window)  # what this node granted before it restarted is not known
        self._records[peer] = record
        return record

    def _add_late(self, record: GeneratorRecord, count: int) -> None:
        record.late_s.extend([self._clock.monotonic_s()] * count)
        while len(record.late_s) > self._max_window:
            record.late_s.popleft()


@dataclass(slots=True)
class CreditBalance:
    """The generator's side: groups granted on the trainer's stream, less those that were made and stored since.

    A group that could not be scored or stored never travels, so it does not use up credit. Nor does a group that was
    made before the stream's first message: if it is too old on arrival the trainer does not settle this credit with
    it, and would wait for a group that is never begun. Of such groups there are at most one batch.
    """

    batch: int  # groups that are made at a time
    _credit: Credit | None = field(default=None, init=False)
    _since_s: float = field(default=0.0, init=False)  # wall clock of the first message
    _num_before: int = field(default=0, init=False)  # groups made before it, and stored after it
    _num_stored: int = field(default=0, init=False)

    def reset(self) -> None:
        """A stream was opened or has ended: nothing is granted until the trainer says so."""
        self._credit, self._num_before, self._num_stored = None, 0, 0

    def update(self, credit: Credit, now_s: float) -> None:
        """Takes the trainer's newest message, at this wall-clock time; the granted total never shrinks."""
        if self._credit is None:
            self._since_s = now_s
        granted = credit.granted if self._credit is None else max(credit.granted, self._credit.granted)
        self._credit = Credit(head_step=credit.head_step, granted=granted)

    def record_stored(self, created_at_s: float) -> None:
        """One more group, made at this wall-clock time, was stored, to be sent to the trainer."""
        is_before = self._credit is None or created_at_s < self._since_s
        if is_before and self._num_before < self.batch:  # a clock that was set back does not make everything free
            self._num_before += 1
        else:
            self._num_stored += 1

    @property
    def num_left(self) -> int:
        """Groups that may be started now."""
        return 0 if self._credit is None else max(0, self._credit.granted - self._num_stored)

    @property
    def head_step(self) -> int | None:
        """Newest published step of the trainer by its newest message; None while it is not connected."""
        return None if self._credit is None else self._credit.head_step
