"""Leave to make groups, against whatever order of followers coming, delivering, hanging and going."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm.clock import ManualClock
from swarm.exchange.leaves import LeaveLeft, Leaves, Watch
from swarm.types import Leave

PATIENCE_S = 100.0
PEERS = ["a", "b", "c", "d"]


class LeaveMachine(RuleBasedStateMachine):
    """Followers come, deliver and go while the room changes."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.leaves = Leaves(self.clock, PATIENCE_S)
        self.watches: dict[str, Watch] = {}
        self.limits: dict[Watch, int] = {}

    @rule(peer=st.sampled_from(PEERS), window=st.integers(1, 6))
    def come(self, peer: str, window: int) -> None:
        self.watches[peer] = self.leaves.begin(peer, window)

    @rule(peer=st.sampled_from(PEERS))
    def go(self, peer: str) -> None:
        before = self.leaves.num_outstanding
        watch = self.watches.pop(peer, None)
        if watch is not None:
            self.leaves.end(watch)
            assert self.leaves.num_outstanding == before - watch.num_outstanding

    @rule(peer=st.sampled_from(PEERS))
    def deliver(self, peer: str) -> None:
        self.leaves.arrived(peer)

    @rule(room=st.integers(0, 20))
    def give(self, room: int) -> None:
        before = {peer: watch.limit for peer, watch in self.watches.items()}
        self.leaves.give(room)
        has_given = any(watch.limit > before[peer] for peer, watch in self.watches.items())
        if has_given:
            assert self.leaves.num_outstanding <= room
        watches = self.watches.values()
        if self.leaves.num_outstanding < room:  # nobody who wants more is left out while there is room
            assert all(w.num_outstanding >= (1 if w.is_doubtful else w.window) for w in watches)

    @rule(seconds=st.floats(0, 2 * PATIENCE_S))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def totals_only_grow_and_nobody_exceeds_its_window(self) -> None:
        for watch in self.watches.values():
            assert 0 <= watch.num_outstanding <= watch.window
            assert watch.limit >= self.limits.get(watch, 0)
            self.limits[watch] = watch.limit

    @invariant()
    def the_sum_is_that_of_the_watches(self) -> None:
        assert self.leaves.num_outstanding == sum(watch.num_outstanding for watch in self.watches.values())


TestLeaveMachine = LeaveMachine.TestCase
TestLeaveMachine.settings = settings(deadline=None)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.lists(st.integers(0, 3), max_size=60))
def test_leave_differs_by_at_most_one_among_followers_that_want_enough(
    count: int, room: int, deliveries: list[int]
) -> None:
    leaves = Leaves(ManualClock(), PATIENCE_S)
    watches = [leaves.begin(peer, window=100) for peer in PEERS[:count]]
    leaves.give(room)
    outstanding = [watch.num_outstanding for watch in watches]
    assert sum(outstanding) == room and max(outstanding) - min(outstanding) <= 1
    for number in deliveries:
        leaves.arrived(PEERS[number % count])
        leaves.give(room)
        assert leaves.num_outstanding == room


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 30))
def test_in_rounds_everybody_gets_the_same_whatever_its_window(count: int, room: int) -> None:
    leaves = Leaves(ManualClock(), PATIENCE_S, in_rounds=True)
    watches = [leaves.begin(peer, window=1) for peer in PEERS[:count]]
    leaves.give(room)
    shares = {watch.limit for watch in watches}
    assert len(shares) == 1 and room <= leaves.num_outstanding < room + count
    leaves.give(room)
    assert {watch.limit for watch in watches} == shares


def test_a_slow_follower_does_not_starve_a_fast_one() -> None:
    leaves = Leaves(ManualClock(), PATIENCE_S)
    slow = leaves.begin("slow", window=8)
    leaves.give(10)
    fast = leaves.begin("fast", window=8)
    for _ in range(50):
        leaves.give(10)
        leaves.arrived("fast")
    assert fast.limit >= 50 and slow.limit == 8


def test_a_fast_follower_does_not_starve_a_slow_one() -> None:
    leaves = Leaves(ManualClock(), PATIENCE_S)
    leaves.begin("fast", window=8)
    slow = leaves.begin("slow", window=8)
    for turn in range(100):
        leaves.give(4)  # scarce
        leaves.arrived("fast")
        if turn % 10 == 0:
            leaves.arrived("slow")
    assert slow.num_arrived == 10


def test_followers_that_hang_get_one_at_a_time_and_leave_the_room_to_others() -> None:
    clock = ManualClock()
    leaves = Leaves(clock, PATIENCE_S)
    hanging = [leaves.begin(peer, window=8) for peer in ("a", "b", "c")]
    leaves.give(20)
    newcomer = leaves.begin("d", window=8)
    leaves.give(20)
    assert newcomer.limit == 0  # no room: everything is outstanding
    clock.advance(PATIENCE_S + 1)
    leaves.give(20)
    assert newcomer.limit == 8 and [watch.num_outstanding for watch in hanging] == [1, 1, 1]
    leaves.arrived("a")
    leaves.give(20)
    assert hanging[0].num_outstanding > 1  # it lives


def test_a_peer_that_watches_anew_has_one_account() -> None:
    leaves = Leaves(ManualClock(), PATIENCE_S)
    first = leaves.begin("a", window=4)
    leaves.give(10)
    second = leaves.begin("a", window=2)
    assert first.is_over and leaves.num_outstanding == 0
    leaves.give(10)
    leaves.end(first)  # its stream ends late
    assert second.limit == 2 and leaves.num_outstanding == 2 and leaves.followers == {"a"}


def test_who_asks_for_none_gets_none() -> None:
    leaves = Leaves(ManualClock(), PATIENCE_S)
    watch = leaves.begin("a", window=0)
    leaves.give(10)
    assert watch.limit == 0 and not leaves.followers


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=20), st.integers(0, 30))
def test_what_is_left_is_the_greatest_total_less_what_was_made(limits: list[int], num_made: int) -> None:
    left = LeaveLeft()
    assert left.num_left == 0 and left.head_step is None
    for limit in limits:
        left.take(Leave(head_step=3, limit=limit))
    for _ in range(num_made):
        left.made()
    assert left.num_left == max(0, max(limits, default=0) - num_made)
    left.restart()
    assert left.num_left == 0 and left.head_step is None
