"""Leave to make groups: how many each follower of a trainer may begin, so that nobody generates what will be too old.

Invariant: leave is only given while less is outstanding than there is room for; what was given to a follower is a total
that only grows, and what a follower that vanished had outstanding is free again. Pure bookkeeping, single-threaded.
"""

from dataclasses import dataclass, field

from swarm.clock import Clock
from swarm.types import JsonDict, Leave, NodeId


@dataclass(eq=False, slots=True)
class Watch:
    """One follower's account, from the begin of its watch to its end."""

    peer: NodeId
    window: int  # groups that it wants leave for at a time
    limit: int = 0  # groups that it may have begun since the watch began
    num_arrived: int = 0  # groups of it that came since, admitted or refused, and those written off
    moved_at_s: float = 0.0  # when something was given to it after nothing was outstanding, or arrived
    is_doubtful: bool = False  # nothing came for so long that it gets one at a time
    is_over: bool = False  # the peer watches anew, or went away

    @property
    def num_outstanding(self) -> int:
        """Groups that it may still bring."""
        return self.limit - self.num_arrived


class Leaves:
    """What a trainer gave leave for, to whom.

    Fair among followers: whoever has least outstanding gets the next one, so a slow follower holds at most an equal
    share of the room and a fast one is served as often as it delivers. Leave from which nothing came for `patience_s`
    is written off, and its holder gets one at a time until something comes: groups that were lost on the way must not
    use up the room for good.

    Args:
        clock: monotonic.
        patience_s: `replay.max_age_s`: what is begun later than that after its leave would be too old anyway.
        in_rounds: each time there is room, all followers get equal shares of it at once, whatever their window
            (`replay.barrier`).

    Example:
        watch = leaves.begin(peer, window=8)
        leaves.give(room=20)
        leaves.arrived(peer)
        leaves.end(watch)
    """

    def __init__(self, clock: Clock, patience_s: float, in_rounds: bool = False) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._in_rounds = in_rounds
        self._watches: dict[NodeId, Watch] = {}  # of followers; whoever was given something last comes last

    def begin(self, peer: NodeId, window: int) -> Watch:
        """A peer began to watch; an older watch of the same peer is over. With a window of 0 it gets no leave."""
        watch = Watch(peer, window, moved_at_s=self._clock.monotonic_s())
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

    def arrived(self, producer: NodeId) -> None:
        """A group of our lineage by this producer came, and was admitted or refused."""
        watch = self._watches.get(producer)
        if watch is None:
            return
        watch.num_arrived = min(watch.limit, watch.num_arrived + 1)
        watch.moved_at_s, watch.is_doubtful = self._clock.monotonic_s(), False

    def give(self, room: int) -> None:
        """Gives what is free.

        Args:
            room: groups that may be outstanding in all.
        """
        self._write_off()
        free = room - self.num_outstanding
        if self._in_rounds:
            self._give_equal_shares(free)
            return
        while free > 0:
            wanting = [watch for watch in self._watches.values() if watch.num_outstanding < _most(watch)]
            if not wanting:
                return
            self._give(min(wanting, key=lambda watch: watch.num_outstanding), 1)
            free -= 1

    @property
    def num_outstanding(self) -> int:
        """Groups that may still arrive, of all followers."""
        return sum(watch.num_outstanding for watch in self._watches.values())

    @property
    def followers(self) -> frozenset[NodeId]:
        """Who watches for leave now."""
        return frozenset(self._watches)

    def status(self) -> JsonDict:
        """Of each follower: groups that it was given leave for since it came, and those of them that arrived."""
        return {peer: {"limit": w.limit, "arrived": w.num_arrived} for peer, w in sorted(self._watches.items())}

    def _give_equal_shares(self, free: int) -> None:
        """The same for everyone, rounded up: each of them takes part in every round."""
        if free > 0 and self._watches:
            share = -(-free // len(self._watches))
            for watch in list(self._watches.values()):
                self._give(watch, 1 if watch.is_doubtful else share)

    def _give(self, watch: Watch, count: int) -> None:
        if watch.num_outstanding == 0:
            watch.moved_at_s = self._clock.monotonic_s()
        watch.limit += count
        del self._watches[watch.peer]
        self._watches[watch.peer] = watch

    def _write_off(self) -> None:
        latest_s = self._clock.monotonic_s() - self._patience_s
        for watch in self._watches.values():
            if watch.num_outstanding > 0 and watch.moved_at_s < latest_s:
                watch.num_arrived, watch.is_doubtful = watch.limit, True


def _most(watch: Watch) -> int:
    return min(watch.window, 1) if watch.is_doubtful else watch.window


@dataclass(slots=True)
class LeaveLeft:
    """The follower's side: what its trainer allows, less what was made of it.

    A group that could not be scored or stored never travels, so it does not count: another one takes its place.
    """

    _leave: Leave | None = field(default=None, init=False)
    _num_made: int = field(default=0, init=False)

    def restart(self) -> None:
        """A new watch began, or the old one broke: nothing is allowed until the trainer says so."""
        self._leave, self._num_made = None, 0

    def take(self, leave: Leave) -> None:
        """The trainer's newest word."""
        limit = leave.limit if self._leave is None else max(leave.limit, self._leave.limit)
        self._leave = Leave(head_step=leave.head_step, limit=limit)

    def made(self) -> None:
        """One more group was stored, to be sent."""
        self._num_made += 1

    @property
    def num_left(self) -> int:
        """Groups that may be begun now."""
        return 0 if self._leave is None else max(0, self._leave.limit - self._num_made)

    @property
    def head_step(self) -> int | None:
        """Newest published step of the trainer as it last said; None while it is not connected."""
        return None if self._leave is None else self._leave.head_step
