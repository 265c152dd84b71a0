"""Leave to make groups, against whatever order of followers coming, delivering, hanging and going."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm.clock import ManualClock
from swarm.types import Credit
from swarm.weight_sync.credit import GROUPS_PER_TRIAL, PATIENCE_SHARE, TURN_SHARE, CreditBalance, CreditLedger, Watch

MAX_AGE_S = 200.0
PATIENCE_S = PATIENCE_SHARE * MAX_AGE_S
TURN_S = TURN_SHARE * MAX_AGE_S
MAX_WINDOW = 8
PEERS = ["a", "b", "c", "d"]


def credit_ledger_of(clock: ManualClock, max_window: int = MAX_WINDOW, in_rounds: bool = False) -> CreditLedger:
    """Of a trainer that started long ago."""
    credit_ledger = CreditLedger(clock, MAX_AGE_S, max_window, in_rounds)
    clock.advance(MAX_AGE_S + 1)
    return credit_ledger


def proven(credit_ledger: CreditLedger, peer: str, window: int) -> Watch:
    """A follower whose groups were admitted: it may have as much outstanding as it wants."""
    watch = credit_ledger.begin(peer, window)
    watch.account.allowed = window
    return watch


class CreditMachine(RuleBasedStateMachine):
    """Followers come, deliver and go while the room changes."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.credit_ledger = credit_ledger_of(self.clock)
        self.watches: dict[str, Watch] = {}
        self.limits: dict[Watch, int] = {}

    @rule(peer=st.sampled_from(PEERS), window=st.integers(1, 12))
    def come(self, peer: str, window: int) -> None:
        self.watches[peer] = self.credit_ledger.begin(peer, window)

    @rule(peer=st.sampled_from(PEERS))
    def go(self, peer: str) -> None:
        before = self.credit_ledger.num_outstanding
        watch = self.watches.pop(peer, None)
        if watch is not None:
            self.credit_ledger.end(watch)
            assert self.credit_ledger.num_outstanding == before - (0 if watch.is_tried else watch.num_outstanding)

    @rule(peer=st.sampled_from(PEERS), is_admitted=st.booleans())
    def deliver(self, peer: str, is_admitted: bool) -> None:
        before = self.credit_ledger.num_outstanding
        is_expected = self.credit_ledger.expects(peer, 0)
        self.credit_ledger.arrived(peer, is_admitted=is_admitted)
        assert is_expected or self.credit_ledger.num_outstanding == before

    @rule(room=st.integers(0, 20))
    def give(self, room: int) -> None:
        before = {watch: (watch.limit, watch.is_tried) for watch in self.watches.values()}
        self.credit_ledger.give(room)
        given = [watch for watch, (limit, _) in before.items() if watch.limit > limit]
        if any(not watch.is_tried for watch in given):
            assert self.credit_ledger.num_outstanding <= room
        proven = [watch for watch in before if watch.account.is_proven]
        if self.credit_ledger.num_outstanding < room:  # nobody who wants more is left out while there is room
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
        assert self.credit_ledger.num_outstanding == sum(counted)


TestCreditMachine = CreditMachine.TestCase
TestCreditMachine.settings = settings(deadline=None)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.lists(st.integers(0, 3), max_size=60))
def test_leave_differs_by_at_most_one_among_followers_that_want_enough(
    count: int, room: int, deliveries: list[int]
) -> None:
    credit_ledger = credit_ledger_of(ManualClock(), max_window=100)
    watches = [proven(credit_ledger, peer, window=100) for peer in PEERS[:count]]
    credit_ledger.give(room)
    outstanding = [watch.num_outstanding for watch in watches]
    assert sum(outstanding) == room and max(outstanding) - min(outstanding) <= 1
    for number in deliveries:
        credit_ledger.arrived(PEERS[number % count], is_admitted=True)
        credit_ledger.give(room)
        assert credit_ledger.num_outstanding == room


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 30))
def test_in_rounds_everybody_gets_the_same_whatever_its_window(count: int, room: int) -> None:
    credit_ledger = credit_ledger_of(ManualClock(), max_window=60, in_rounds=True)
    watches = [credit_ledger.begin(peer, window=1) for peer in PEERS[:count]]
    for watch in watches:
        watch.account.allowed = 60
    credit_ledger.give(room)
    shares = {watch.limit for watch in watches}
    assert len(shares) == 1 and room <= credit_ledger.num_outstanding < room + count
    credit_ledger.give(room)
    assert {watch.limit for watch in watches} == shares


def test_in_rounds_a_newcomer_gets_one_however_often_leave_is_given() -> None:
    credit_ledger = credit_ledger_of(ManualClock(), in_rounds=True)
    newcomer = credit_ledger.begin("new", window=8)
    for _ in range(3):
        credit_ledger.give(8)
    assert newcomer.limit == 1


def test_a_slow_follower_does_not_starve_a_fast_one() -> None:
    credit_ledger = credit_ledger_of(ManualClock())
    slow = proven(credit_ledger, "slow", window=8)
    credit_ledger.give(10)
    fast = credit_ledger.begin("fast", window=8)
    for _ in range(50):
        credit_ledger.give(10)
        credit_ledger.arrived("fast", is_admitted=True)
    assert fast.limit >= 50 and slow.limit == 8


def test_a_fast_follower_does_not_starve_a_slow_one() -> None:
    credit_ledger = credit_ledger_of(ManualClock())
    proven(credit_ledger, "fast", window=8)
    slow = proven(credit_ledger, "slow", window=8)
    for turn in range(100):
        credit_ledger.give(4)  # scarce
        credit_ledger.arrived("fast", is_admitted=True)
        if turn % 10 == 0:
            credit_ledger.arrived("slow", is_admitted=True)
    assert slow.num_arrived == 10


def test_who_delivers_at_once_does_not_take_all_room_while_its_groups_wait() -> None:
    waiting = {"flood": 0, "honest": 0}
    credit_ledger = CreditLedger(ManualClock(), MAX_AGE_S, MAX_WINDOW, num_waiting=waiting.__getitem__)
    flood, honest = proven(credit_ledger, "flood", window=8), proven(credit_ledger, "honest", window=8)
    for _ in range(8):
        credit_ledger.give(credit_ledger.num_outstanding + 1)
        if flood.num_outstanding:
            credit_ledger.arrived("flood", is_admitted=True)
            waiting["flood"] += 1
    assert honest.num_outstanding == waiting["flood"] == 4


def test_followers_that_hang_get_one_at_a_time_and_leave_the_room_to_others() -> None:
    clock = ManualClock()
    credit_ledger = credit_ledger_of(clock)
    hanging = [proven(credit_ledger, peer, window=8) for peer in ("a", "b", "c")]
    credit_ledger.give(20)
    newcomer = proven(credit_ledger, "d", window=8)
    credit_ledger.give(20)
    assert newcomer.limit == 0  # no room: everything is outstanding
    clock.advance(PATIENCE_S + 1)
    credit_ledger.give(20)
    assert newcomer.limit == 8 and [watch.num_outstanding for watch in hanging] == [1, 1, 1]
    credit_ledger.arrived("a", is_admitted=True)
    credit_ledger.give(20)
    assert hanging[0].num_outstanding == 2  # it lives


def test_identities_that_bring_nothing_take_no_room_from_those_who_deliver() -> None:
    clock = ManualClock()
    credit_ledger = credit_ledger_of(clock)
    honest = proven(credit_ledger, "honest", window=8)
    silent = [credit_ledger.begin(f"silent {number}", window=8) for number in range(40)]
    for _ in range(100):
        credit_ledger.give(20)
        assert honest.num_outstanding == credit_ledger.num_outstanding == 8
        assert sum(watch.num_outstanding for watch in silent) == 20 // GROUPS_PER_TRIAL
        credit_ledger.arrived("honest", is_admitted=True)
        clock.advance(1.0)
    assert honest.num_arrived == 100


def test_a_newcomer_is_tried_in_turn_beside_silent_ones_however_small_the_room() -> None:
    clock = ManualClock()
    credit_ledger = credit_ledger_of(clock)
    for number in range(40):
        credit_ledger.begin(f"silent {number}", window=8)
    newcomer = credit_ledger.begin("new", window=8)
    num_turns = 0
    while newcomer.limit == 0:
        credit_ledger.give(1)
        clock.advance(TURN_S + 1)
        credit_ledger.begin(f"silent {40 + num_turns}", window=8)  # more of them come all the time
        num_turns += 1
    assert num_turns == 41
    credit_ledger.arrived("new", is_admitted=True)
    for room in range(1, 8):
        credit_ledger.give(room)
    assert newcomer.num_outstanding == 2, "one of those who deliver"


def test_a_trial_that_takes_longer_than_its_turn_proves_as_much_when_it_comes() -> None:
    clock = ManualClock()
    credit_ledger = credit_ledger_of(clock)
    slow = credit_ledger.begin("slow", window=8)
    credit_ledger.give(1)
    clock.advance(TURN_S + 1)
    assert not credit_ledger.write_off(), "nobody else waits"
    other = credit_ledger.begin("other", window=8)
    assert credit_ledger.next_write_off_in_s <= TURN_S
    credit_ledger.give(1)
    assert other.limit == 1 and slow.num_outstanding == 0
    clock.advance(TURN_S / 2)
    assert credit_ledger.expects("slow", 0) and not credit_ledger.expects("slow", 1)
    credit_ledger.arrived("slow", is_admitted=True)
    credit_ledger.give(2)
    assert slow.num_outstanding == 2


def test_who_brings_what_is_refused_waits_for_its_next_trial_behind_the_others() -> None:
    credit_ledger = credit_ledger_of(ManualClock())
    credit_ledger.begin("bad", window=8)
    credit_ledger.give(1)
    newcomer = credit_ledger.begin("new", window=8)
    credit_ledger.arrived("bad", is_admitted=False)
    credit_ledger.give(1)
    assert newcomer.limit == 1


def test_a_group_now_and_then_does_not_hold_a_whole_window_for_good() -> None:
    clock = ManualClock()
    credit_ledger = credit_ledger_of(clock)
    watch = proven(credit_ledger, "a", window=8)
    held: list[int] = []
    for _ in range(21):
        credit_ledger.give(20)
        held.append(watch.num_outstanding)
        clock.advance(0.9 * PATIENCE_S)
        credit_ledger.arrived("a", is_admitted=True)
    assert held.count(8) < len(held) / 2 and held.count(1) > 2


def test_a_newcomer_gets_one_group_and_twice_as_many_with_each_that_is_admitted() -> None:
    credit_ledger = credit_ledger_of(ManualClock())
    watch = credit_ledger.begin("a", window=65536)
    outstanding: list[int] = []
    for _ in range(5):
        credit_ledger.give(1000)
        outstanding.append(watch.num_outstanding)
        credit_ledger.arrived("a", is_admitted=True)
    assert outstanding == [1, 2, 4, 8, 8], "at most what the trainer allows anybody"
    refused = credit_ledger.begin("b", window=8)
    for _ in range(5):
        credit_ledger.give(1000)
        credit_ledger.arrived("b", is_admitted=False)
    assert refused.num_outstanding == 0 and refused.limit == 5


def test_who_hangs_is_not_trusted_again_because_it_watches_anew() -> None:
    clock = ManualClock()
    credit_ledger = credit_ledger_of(clock)
    first = proven(credit_ledger, "a", window=8)
    credit_ledger.give(8)
    clock.advance(PATIENCE_S + 1)
    assert credit_ledger.next_write_off_in_s < 0 and credit_ledger.write_off() and credit_ledger.num_outstanding == 0
    credit_ledger.end(first)
    second = credit_ledger.begin("a", window=8)
    credit_ledger.give(8)
    assert second.limit == 1
    for _ in range(3):
        credit_ledger.arrived("a", is_admitted=True)
        credit_ledger.give(8)
    credit_ledger.end(second)
    third = credit_ledger.begin("a", window=8)
    credit_ledger.give(8)
    assert third.limit == 8, "nor is who delivers forgotten"


def test_what_was_begun_under_an_earlier_watch_or_was_written_off_may_still_come_for_a_while() -> None:
    clock = ManualClock()
    credit_ledger = credit_ledger_of(clock)
    assert not credit_ledger.expects("a", 0), "nothing was ever given to it"
    first = proven(credit_ledger, "a", window=4)
    credit_ledger.give(4)
    credit_ledger.end(first)
    assert credit_ledger.expects("a", 3) and not credit_ledger.expects("a", 4)
    credit_ledger.arrived("a", is_admitted=True)
    assert credit_ledger.expects("a", 2) and not credit_ledger.expects("a", 3)
    clock.advance(MAX_AGE_S + 1)
    assert not credit_ledger.expects("a", 0), "it would be too old"
    proven(credit_ledger, "a", window=4)
    credit_ledger.give(4)
    clock.advance(PATIENCE_S + 1)
    credit_ledger.write_off()
    assert credit_ledger.num_outstanding == 0 and credit_ledger.expects("a", 3) and not credit_ledger.expects("a", 4)


def test_watching_again_and_again_gathers_no_leave() -> None:
    credit_ledger = credit_ledger_of(ManualClock())
    for _ in range(50):
        watch = proven(credit_ledger, "a", window=8)
        credit_ledger.give(100)
    assert credit_ledger.expects("a", 2 * MAX_WINDOW - 1) and not credit_ledger.expects("a", 2 * MAX_WINDOW)
    credit_ledger.end(watch)
    assert not credit_ledger.expects("a", MAX_WINDOW)


def test_after_a_start_a_window_of_groups_comes_with_leave_that_is_not_remembered() -> None:
    clock = ManualClock()
    credit_ledger = CreditLedger(clock, MAX_AGE_S, MAX_WINDOW)
    assert credit_ledger.expects("a", MAX_WINDOW - 1) and not credit_ledger.expects("a", MAX_WINDOW)
    clock.advance(MAX_AGE_S + 1)
    assert not credit_ledger.expects("a", 0) and not credit_ledger.expects("b", 0)


def test_a_peer_that_watches_anew_has_one_account() -> None:
    credit_ledger = credit_ledger_of(ManualClock())
    first = proven(credit_ledger, "a", window=4)
    credit_ledger.give(10)
    second = credit_ledger.begin("a", window=2)
    assert first.is_over and credit_ledger.num_outstanding == 0
    credit_ledger.give(10)
    credit_ledger.end(first)  # its stream ends late
    assert second.limit == 2 and credit_ledger.num_outstanding == 2 and credit_ledger.followers == {"a"}


def test_who_asks_for_none_gets_none() -> None:
    credit_ledger = credit_ledger_of(ManualClock())
    watch = credit_ledger.begin("a", window=0)
    credit_ledger.give(10)
    assert watch.limit == 0 and not credit_ledger.followers


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=20), st.integers(0, 30))
def test_what_is_left_is_the_greatest_total_less_what_was_made(limits: list[int], num_made: int) -> None:
    left = CreditBalance()
    assert left.num_left == 0 and left.head_step is None
    for limit in limits:
        left.take(Credit(head_step=3, limit=limit))
    for _ in range(num_made):
        left.made()
    assert left.num_left == max(0, max(limits, default=0) - num_made)
    left.restart()
    assert left.num_left == 0 and left.head_step is None
