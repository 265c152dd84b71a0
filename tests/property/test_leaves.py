"""Leave to make groups, against whatever order of followers coming, delivering, hanging and going."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm.clock import ManualClock
from swarm.types import Leave
from swarm.weight_sync.credit import GROUPS_PER_TRIAL, PATIENCE_SHARE, TURN_SHARE, LeaveLeft, Leaves, Watch

MAX_AGE_S = 200.0
PATIENCE_S = PATIENCE_SHARE * MAX_AGE_S
TURN_S = TURN_SHARE * MAX_AGE_S
MAX_WINDOW = 8
PEERS = ["a", "b", "c", "d"]


def leaves_of(clock: ManualClock, max_window: int = MAX_WINDOW, in_rounds: bool = False) -> Leaves:
    """Of a trainer that started long ago."""
    leaves = Leaves(clock, MAX_AGE_S, max_window, in_rounds)
    clock.advance(MAX_AGE_S + 1)
    return leaves


def proven(leaves: Leaves, peer: str, window: int) -> Watch:
    """A follower whose groups were admitted: it may have as much outstanding as it wants."""
    watch = leaves.begin(peer, window)
    watch.account.allowed = window
    return watch


class LeaveMachine(RuleBasedStateMachine):
    """Followers come, deliver and go while the room changes."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.leaves = leaves_of(self.clock)
        self.watches: dict[str, Watch] = {}
        self.limits: dict[Watch, int] = {}

    @rule(peer=st.sampled_from(PEERS), window=st.integers(1, 12))
    def come(self, peer: str, window: int) -> None:
        self.watches[peer] = self.leaves.begin(peer, window)

    @rule(peer=st.sampled_from(PEERS))
    def go(self, peer: str) -> None:
        before = self.leaves.num_outstanding
        watch = self.watches.pop(peer, None)
        if watch is not None:
            self.leaves.end(watch)
            assert self.leaves.num_outstanding == before - (0 if watch.is_tried else watch.num_outstanding)

    @rule(peer=st.sampled_from(PEERS), is_admitted=st.booleans())
    def deliver(self, peer: str, is_admitted: bool) -> None:
        before = self.leaves.num_outstanding
        is_expected = self.leaves.expects(peer, 0)
        self.leaves.arrived(peer, is_admitted=is_admitted)
        assert is_expected or self.leaves.num_outstanding == before

    @rule(room=st.integers(0, 20))
    def give(self, room: int) -> None:
        before = {watch: (watch.limit, watch.is_tried) for watch in self.watches.values()}
        self.leaves.give(room)
        given = [watch for watch, (limit, _) in before.items() if watch.limit > limit]
        if any(not watch.is_tried for watch in given):
            assert self.leaves.num_outstanding <= room
        proven = [watch for watch in before if watch.account.is_proven]
        if self.leaves.num_outstanding < room:  # nobody who wants more is left out while there is room
            assert all(w.num_outstanding >= min(w.window, w.account.allowed) for w in proven)
        tried, most = [w for w in before if w.is_tried], max(1, room // GROUPS_PER_TRIAL) if room else 0
        assert all(watch.num_outstanding == 1 and not watch.account.is_proven for watch in tried)
        assert len(tried) <= max(most, sum(was_tried for _, was_tried in before.values()))
        assert len(tried) >= most or not any(watch.awaits_trial for watch in before), "who waits is tried next"

    @rule(seconds=st.floats(0, 2 * PATIENCE_S))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def totals_only_grow_and_nobody_exceeds_its_window(self) -> None:
        for watch in self.watches.values():
            assert 0 <= watch.num_outstanding <= watch.window <= MAX_WINDOW
            assert len(watch.account.owed_s) <= MAX_WINDOW
            assert watch.limit >= self.limits.get(watch, 0)
            self.limits[watch] = watch.limit

    @invariant()
    def the_sum_is_that_of_the_watches(self) -> None:
        counted = [watch.num_outstanding for watch in self.watches.values() if not watch.is_tried]
        assert self.leaves.num_outstanding == sum(counted)


TestLeaveMachine = LeaveMachine.TestCase
TestLeaveMachine.settings = settings(deadline=None)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.lists(st.integers(0, 3), max_size=60))
def test_leave_differs_by_at_most_one_among_followers_that_want_enough(
    count: int, room: int, deliveries: list[int]
) -> None:
    leaves = leaves_of(ManualClock(), max_window=100)
    watches = [proven(leaves, peer, window=100) for peer in PEERS[:count]]
    leaves.give(room)
    outstanding = [watch.num_outstanding for watch in watches]
    assert sum(outstanding) == room and max(outstanding) - min(outstanding) <= 1
    for number in deliveries:
        leaves.arrived(PEERS[number % count], is_admitted=True)
        leaves.give(room)
        assert leaves.num_outstanding == room


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 30))
def test_in_rounds_everybody_gets_the_same_whatever_its_window(count: int, room: int) -> None:
    leaves = leaves_of(ManualClock(), max_window=60, in_rounds=True)
    watches = [leaves.begin(peer, window=1) for peer in PEERS[:count]]
    for watch in watches:
        watch.account.allowed = 60
    leaves.give(room)
    shares = {watch.limit for watch in watches}
    assert len(shares) == 1 and room <= leaves.num_outstanding < room + count
    leaves.give(room)
    assert {watch.limit for watch in watches} == shares


def test_in_rounds_a_newcomer_gets_one_however_often_leave_is_given() -> None:
    leaves = leaves_of(ManualClock(), in_rounds=True)
    newcomer = leaves.begin("new", window=8)
    for _ in range(3):
        leaves.give(8)
    assert newcomer.limit == 1


def test_a_slow_follower_does_not_starve_a_fast_one() -> None:
    leaves = leaves_of(ManualClock())
    slow = proven(leaves, "slow", window=8)
    leaves.give(10)
    fast = leaves.begin("fast", window=8)
    for _ in range(50):
        leaves.give(10)
        leaves.arrived("fast", is_admitted=True)
    assert fast.limit >= 50 and slow.limit == 8


def test_a_fast_follower_does_not_starve_a_slow_one() -> None:
    leaves = leaves_of(ManualClock())
    proven(leaves, "fast", window=8)
    slow = proven(leaves, "slow", window=8)
    for turn in range(100):
        leaves.give(4)  # scarce
        leaves.arrived("fast", is_admitted=True)
        if turn % 10 == 0:
            leaves.arrived("slow", is_admitted=True)
    assert slow.num_arrived == 10


def test_who_delivers_at_once_does_not_take_all_room_while_its_groups_wait() -> None:
    waiting = {"flood": 0, "honest": 0}
    leaves = Leaves(ManualClock(), MAX_AGE_S, MAX_WINDOW, num_waiting=waiting.__getitem__)
    flood, honest = proven(leaves, "flood", window=8), proven(leaves, "honest", window=8)
    for _ in range(8):
        leaves.give(leaves.num_outstanding + 1)
        if flood.num_outstanding:
            leaves.arrived("flood", is_admitted=True)
            waiting["flood"] += 1
    assert honest.num_outstanding == waiting["flood"] == 4


def test_followers_that_hang_get_one_at_a_time_and_leave_the_room_to_others() -> None:
    clock = ManualClock()
    leaves = leaves_of(clock)
    hanging = [proven(leaves, peer, window=8) for peer in ("a", "b", "c")]
    leaves.give(20)
    newcomer = proven(leaves, "d", window=8)
    leaves.give(20)
    assert newcomer.limit == 0  # no room: everything is outstanding
    clock.advance(PATIENCE_S + 1)
    leaves.give(20)
    assert newcomer.limit == 8 and [watch.num_outstanding for watch in hanging] == [1, 1, 1]
    leaves.arrived("a", is_admitted=True)
    leaves.give(20)
    assert hanging[0].num_outstanding == 2  # it lives


def test_identities_that_bring_nothing_take_no_room_from_those_who_deliver() -> None:
    clock = ManualClock()
    leaves = leaves_of(clock)
    honest = proven(leaves, "honest", window=8)
    silent = [leaves.begin(f"silent {number}", window=8) for number in range(40)]
    for _ in range(100):
        leaves.give(20)
        assert honest.num_outstanding == leaves.num_outstanding == 8
        assert sum(watch.num_outstanding for watch in silent) == 20 // GROUPS_PER_TRIAL
        leaves.arrived("honest", is_admitted=True)
        clock.advance(1.0)
    assert honest.num_arrived == 100


def test_a_newcomer_is_tried_in_turn_beside_silent_ones_however_small_the_room() -> None:
    clock = ManualClock()
    leaves = leaves_of(clock)
    for number in range(40):
        leaves.begin(f"silent {number}", window=8)
    newcomer = leaves.begin("new", window=8)
    num_turns = 0
    while newcomer.limit == 0:
        leaves.give(1)
        clock.advance(TURN_S + 1)
        leaves.begin(f"silent {40 + num_turns}", window=8)  # more of them come all the time
        num_turns += 1
    assert num_turns == 41
    leaves.arrived("new", is_admitted=True)
    for room in range(1, 8):
        leaves.give(room)
    assert newcomer.num_outstanding == 2, "one of those who deliver"


def test_a_trial_that_takes_longer_than_its_turn_proves_as_much_when_it_comes() -> None:
    clock = ManualClock()
    leaves = leaves_of(clock)
    slow = leaves.begin("slow", window=8)
    leaves.give(1)
    clock.advance(TURN_S + 1)
    assert not leaves.write_off(), "nobody else waits"
    other = leaves.begin("other", window=8)
    assert leaves.next_write_off_in_s <= TURN_S
    leaves.give(1)
    assert other.limit == 1 and slow.num_outstanding == 0
    clock.advance(TURN_S / 2)
    assert leaves.expects("slow", 0) and not leaves.expects("slow", 1)
    leaves.arrived("slow", is_admitted=True)
    leaves.give(2)
    assert slow.num_outstanding == 2


def test_who_brings_what_is_refused_waits_for_its_next_trial_behind_the_others() -> None:
    leaves = leaves_of(ManualClock())
    leaves.begin("bad", window=8)
    leaves.give(1)
    newcomer = leaves.begin("new", window=8)
    leaves.arrived("bad", is_admitted=False)
    leaves.give(1)
    assert newcomer.limit == 1


def test_a_group_now_and_then_does_not_hold_a_whole_window_for_good() -> None:
    clock = ManualClock()
    leaves = leaves_of(clock)
    watch = proven(leaves, "a", window=8)
    held: list[int] = []
    for _ in range(21):
        leaves.give(20)
        held.append(watch.num_outstanding)
        clock.advance(0.9 * PATIENCE_S)
        leaves.arrived("a", is_admitted=True)
    assert held.count(8) < len(held) / 2 and held.count(1) > 2


def test_a_newcomer_gets_one_group_and_twice_as_many_with_each_that_is_admitted() -> None:
    leaves = leaves_of(ManualClock())
    watch = leaves.begin("a", window=65536)
    outstanding: list[int] = []
    for _ in range(5):
        leaves.give(1000)
        outstanding.append(watch.num_outstanding)
        leaves.arrived("a", is_admitted=True)
    assert outstanding == [1, 2, 4, 8, 8], "at most what the trainer allows anybody"
    refused = leaves.begin("b", window=8)
    for _ in range(5):
        leaves.give(1000)
        leaves.arrived("b", is_admitted=False)
    assert refused.num_outstanding == 0 and refused.limit == 5


def test_who_hangs_is_not_trusted_again_because_it_watches_anew() -> None:
    clock = ManualClock()
    leaves = leaves_of(clock)
    first = proven(leaves, "a", window=8)
    leaves.give(8)
    clock.advance(PATIENCE_S + 1)
    assert leaves.next_write_off_in_s < 0 and leaves.write_off() and leaves.num_outstanding == 0
    leaves.end(first)
    second = leaves.begin("a", window=8)
    leaves.give(8)
    assert second.limit == 1
    for _ in range(3):
        leaves.arrived("a", is_admitted=True)
        leaves.give(8)
    leaves.end(second)
    third = leaves.begin("a", window=8)
    leaves.give(8)
    assert third.limit == 8, "nor is who delivers forgotten"


def test_what_was_begun_under_an_earlier_watch_or_was_written_off_may_still_come_for_a_while() -> None:
    clock = ManualClock()
    leaves = leaves_of(clock)
    assert not leaves.expects("a", 0), "nothing was ever given to it"
    first = proven(leaves, "a", window=4)
    leaves.give(4)
    leaves.end(first)
    assert leaves.expects("a", 3) and not leaves.expects("a", 4)
    leaves.arrived("a", is_admitted=True)
    assert leaves.expects("a", 2) and not leaves.expects("a", 3)
    clock.advance(MAX_AGE_S + 1)
    assert not leaves.expects("a", 0), "it would be too old"
    proven(leaves, "a", window=4)
    leaves.give(4)
    clock.advance(PATIENCE_S + 1)
    leaves.write_off()
    assert leaves.num_outstanding == 0 and leaves.expects("a", 3) and not leaves.expects("a", 4)


def test_watching_again_and_again_gathers_no_leave() -> None:
    leaves = leaves_of(ManualClock())
    for _ in range(50):
        watch = proven(leaves, "a", window=8)
        leaves.give(100)
    assert leaves.expects("a", 2 * MAX_WINDOW - 1) and not leaves.expects("a", 2 * MAX_WINDOW)
    leaves.end(watch)
    assert not leaves.expects("a", MAX_WINDOW)


def test_after_a_start_a_window_of_groups_comes_with_leave_that_is_not_remembered() -> None:
    clock = ManualClock()
    leaves = Leaves(clock, MAX_AGE_S, MAX_WINDOW)
    assert leaves.expects("a", MAX_WINDOW - 1) and not leaves.expects("a", MAX_WINDOW)
    clock.advance(MAX_AGE_S + 1)
    assert not leaves.expects("a", 0) and not leaves.expects("b", 0)


def test_a_peer_that_watches_anew_has_one_account() -> None:
    leaves = leaves_of(ManualClock())
    first = proven(leaves, "a", window=4)
    leaves.give(10)
    second = leaves.begin("a", window=2)
    assert first.is_over and leaves.num_outstanding == 0
    leaves.give(10)
    leaves.end(first)  # its stream ends late
    assert second.limit == 2 and leaves.num_outstanding == 2 and leaves.followers == {"a"}


def test_who_asks_for_none_gets_none() -> None:
    leaves = leaves_of(ManualClock())
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
