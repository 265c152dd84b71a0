"""Leave to make groups: how many each follower of a trainer may begin, so that nobody generates what will be too old.

Invariant: leave is only given while less is outstanding than there is room for; what was given to a follower is a total
that only grows, and what a follower that vanished, or hangs, had outstanding is free again. Who has brought nothing yet
is tried with one group, beside the room and in turn, so identities that cost nothing take no room from those who
deliver. Pure bookkeeping, single-threaded.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from swarm.clock import Clock
from swarm.peers.peer_table import keep_newest
from swarm.types import Credit, JsonDict, NodeId

PATIENCE_SHARE: Final = 0.5  # of a group's life: leave that is older was lost, or its group comes too late to matter
TURN_SHARE: Final = 0.05  # of a group's life: a trial that is older is not waited for where others wait for theirs
GROUPS_PER_TRIAL: Final = 4  # that there is room for: so many followers are tried at a time, and one at least


@dataclass(eq=False, slots=True)
class Account:
    """What is remembered of a peer from watch to watch. Times are monotonic, oldest first."""

    allowed: int = 1  # groups that it may have outstanding: twice as many with each that is admitted
    owed_s: deque[float] = field(default_factory=deque[float])  # of groups that are not waited for, but may still come

    @property
    def is_proven(self) -> bool:
        """Whether a group of it was admitted, and none written off since."""
        return self.allowed > 1


@dataclass(eq=False, slots=True)
class Watch:
    """One follower's watch, from its begin to its end."""

    peer: NodeId
    window: int  # groups that it wants leave for at a time
    account: Account
    began_at_s: float  # wall clock
    limit: int = 0  # groups that it may have begun since the watch began
    given_s: deque[float] = field(default_factory=deque[float])  # of what is outstanding, oldest first
    is_over: bool = False  # the peer watches anew, or went away
    is_tried: bool = False  # what is outstanding is a trial

    @property
    def num_outstanding(self) -> int:
        """Groups that it may still bring, and that are waited for."""
        return len(self.given_s)

    @property
    def wants_more(self) -> bool:
        """Whether it delivers, and less is outstanding than it may have."""
        return self.account.is_proven and self.num_outstanding < min(self.window, self.account.allowed)

    @property
    def awaits_trial(self) -> bool:
        """Whether it has nothing outstanding and did not show that it delivers."""
        return not self.account.is_proven and not self.given_s

    @property
    def num_arrived(self) -> int:
        """Groups of it that came since, admitted or refused, and those written off."""
        return self.limit - len(self.given_s)


class CreditLedger:
    """What a trainer gave leave for, to whom.

    Fair among followers: whoever has least outstanding and waiting for a draw gets the next one, so a slow follower
    holds at most an equal share of the room, a fast one is served as often as it delivers, and one that floods is not
    the main source. Leave is written off when its group has not come after a share of its life, and its holder starts
    again with a trial: groups that were lost on the way must not use up the room for good.

    Whoever waited longest for a trial is tried next, a quarter as many at a time as there is room for. Where others
    wait, a trial is soon not waited for; its group counts whenever it comes.

    Args:
        clock: monotonic and wall.
        max_age_s: `replay.max_age_s`.
        max_window: groups that one follower may have outstanding, whatever it wants; also how many more of it are
            taken in that come after they were written off, or were begun before it, or this node, started anew.
        in_rounds: each time there is room, all followers get equal shares of it at once, whatever their window, and
            newcomers one group of it (`replay.barrier`): a round waits for everybody, also for who brings nothing.
        num_waiting: groups of a follower that wait for a draw.

    Example:
        watch = leaves.begin(peer, window=8)
        leaves.give(room=20)
        leaves.arrived(peer, is_admitted=True)
        leaves.end(watch)
    """

    def __init__(
        self,
        clock: Clock,
        max_age_s: float,
        max_window: int,
        in_rounds: bool = False,
        num_waiting: Callable[[NodeId], int] = lambda _: 0,
    ) -> None:
        self._clock = clock
        self._max_age_s = max_age_s
        self._patience_s = PATIENCE_SHARE * max_age_s
        self._turn_s = TURN_SHARE * max_age_s
        self._max_window = max(2, max_window)  # more than a trial
        self._in_rounds = in_rounds
        self._num_waiting = num_waiting
        self._started_s = clock.monotonic_s()
        self._accounts: dict[NodeId, Account] = {}  # whose was touched last comes last
        self._watches: dict[NodeId, Watch] = {}  # of followers; whose turn was last comes last

    def begin(self, peer: NodeId, window: int) -> Watch:
        """A peer began to watch; an older watch of the same peer is over. With a window of 0 it gets no leave."""
        account = self._account(peer) if window > 0 else Account()
        watch = Watch(peer, min(window, self._max_window), account, began_at_s=self._clock.now_s())
        if window > 0:
            before = self._watches.get(peer)
            if before is not None:
                self.end(before)
            self._watches[peer] = watch
        return watch

    def end(self, watch: Watch) -> None:
        """The watch is over: what was outstanding is free again."""
        watch.is_over = True
        if self._watches.get(watch.peer) is watch:
            del self._watches[watch.peer]
            self._owe(watch.account, watch.num_outstanding)

    def expects(self, producer: NodeId, num_judged: int) -> bool:
        """Whether one more group of our lineage by this producer may come.

        Args:
            num_judged: groups of it that came and are not yet counted as arrived.
        """
        account, watch = self._account(producer), self._watches.get(producer)
        oldest_s = self._clock.monotonic_s() - self._max_age_s
        while account.owed_s and account.owed_s[0] < oldest_s:
            account.owed_s.popleft()
        return num_judged < len(account.owed_s) + (0 if watch is None else watch.num_outstanding)

    def arrived(self, producer: NodeId, *, is_admitted: bool) -> None:
        """A group of our lineage by this producer came. One that was refused proves nothing, and may be sent again."""
        account, watch = self._account(producer), self._watches.get(producer)
        if watch is not None and watch.given_s:
            watch.given_s.popleft()
            if not is_admitted:
                self._owe(account, 1)
            self._end_turn(watch)
        elif is_admitted and account.owed_s:
            account.owed_s.popleft()
        else:
            return
        if is_admitted:
            account.allowed = min(2 * account.allowed, self._max_window)

    def is_of_an_earlier_watch(self, producer: NodeId, created_at_s: float) -> bool:
        """Whether a group was made before its producer's watch began, so that no leave of this watch was for it."""
        watch = self._watches.get(producer)
        return watch is not None and created_at_s < watch.began_at_s

    def give(self, room: int) -> None:
        """Gives what is free, and a trial to whoever's turn it is.

        Args:
            room: groups that may be outstanding in all, besides trials.
        """
        self.write_off()
        free = room - self.num_outstanding
        if self._in_rounds:
            self._give_equal_shares(free)
            return
        self._give_one_by_one(free)
        self._give_trials(max(1, room // GROUPS_PER_TRIAL) if room > 0 else 0)

    def write_off(self) -> bool:
        """Frees what was not delivered for too long. True where that was something."""
        now_s, num_late = self._clock.monotonic_s(), 0
        trial_s = self._turn_s if any(watch.awaits_trial for watch in self._watches.values()) else self._patience_s
        for watch in list(self._watches.values()):
            latest_s = now_s - (trial_s if watch.is_tried else self._patience_s)
            while watch.given_s and watch.given_s[0] < latest_s:
                watch.given_s.popleft()
                watch.account.allowed = 1
                self._owe(watch.account, 1)
                self._end_turn(watch)
                num_late += 1
        return num_late > 0

    @property
    def next_write_off_in_s(self) -> float:
        """Until then nothing is to be written off, seconds; no longer than a trial lasts, as somebody may come."""
        oldest_s = min((w.given_s[0] for w in self._watches.values() if w.given_s), default=None)
        due_in_s = self._patience_s if oldest_s is None else oldest_s + self._patience_s - self._clock.monotonic_s()
        return min(self._turn_s, due_in_s)

    @property
    def num_outstanding(self) -> int:
        """Groups of all followers that may still arrive and take up room: trials come beside it."""
        return sum(watch.num_outstanding for watch in self._watches.values() if not watch.is_tried)

    @property
    def followers(self) -> frozenset[NodeId]:
        """Who watches for leave now."""
        return frozenset(self._watches)

    def status(self) -> JsonDict:
        """Of each follower: groups that it was given leave for since it came, and those of them that arrived."""
        return {peer: {"limit": w.limit, "arrived": w.num_arrived} for peer, w in sorted(self._watches.items())}

    def _give_one_by_one(self, free: int) -> None:
        for _ in range(free):
            wanting = [watch for watch in self._watches.values() if watch.wants_more]
            if not wanting:
                return
            self._give(min(wanting, key=lambda watch: watch.num_outstanding + self._num_waiting(watch.peer)), 1)

    def _give_equal_shares(self, free: int) -> None:
        """The same for everyone, rounded up: each of them takes part in every round."""
        if free > 0 and self._watches:
            share = -(-free // len(self._watches))
            for watch in list(self._watches.values()):
                self._give(watch, min(share, watch.account.allowed - watch.num_outstanding))

    def _give_trials(self, most: int) -> None:
        num_tried = sum(watch.is_tried for watch in self._watches.values())
        for watch in [watch for watch in self._watches.values() if watch.awaits_trial][: max(0, most - num_tried)]:
            watch.is_tried = True
            self._give(watch, 1)

    def _give(self, watch: Watch, count: int) -> None:
        if count > 0:
            watch.limit += count
            watch.given_s.extend([self._clock.monotonic_s()] * count)
            self._to_the_end(watch)

    def _end_turn(self, watch: Watch) -> None:
        watch.is_tried = False
        self._to_the_end(watch)

    def _to_the_end(self, watch: Watch) -> None:
        self._watches[watch.peer] = self._watches.pop(watch.peer)

    def _account(self, peer: NodeId) -> Account:
        watch = self._watches.get(peer)
        account = self._accounts.get(peer) if watch is None else watch.account
        if account is None:
            account = Account()
            if self._clock.monotonic_s() < self._started_s + self._max_age_s:  # what was given before is not known
                self._owe(account, self._max_window)
        keep_newest(self._accounts, peer, account)
        return account

    def _owe(self, account: Account, count: int) -> None:
        account.owed_s.extend([self._clock.monotonic_s()] * count)
        while len(account.owed_s) > self._max_window:
            account.owed_s.popleft()


@dataclass(slots=True)
class CreditBalance:
    """The follower's side: what its trainer allows, less what was made of it.

    A group that could not be scored or stored never travels, so it does not count: another one takes its place.
    """

    _credit: Credit | None = field(default=None, init=False)
    _num_made: int = field(default=0, init=False)

    def restart(self) -> None:
        """A new watch began, or the old one broke: nothing is allowed until the trainer says so."""
        self._credit, self._num_made = None, 0

    def take(self, credit: Credit) -> None:
        """The trainer's newest word."""
        limit = credit.limit if self._credit is None else max(credit.limit, self._credit.limit)
        self._credit = Credit(head_step=credit.head_step, limit=limit)

    def made(self) -> None:
        """One more group was stored, to be sent."""
        self._num_made += 1

    @property
    def num_left(self) -> int:
        """Groups that may be begun now."""
        return 0 if self._credit is None else max(0, self._credit.limit - self._num_made)

    @property
    def head_step(self) -> int | None:
        """Newest published step of the trainer as it last said; None while it is not connected."""
        return None if self._credit is None else self._credit.head_step
