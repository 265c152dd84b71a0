"""Credit against whatever order of followers coming, delivering, hanging and going."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm.clock import ManualClock
from swarm.types import Credit
from swarm.weight_sync.credit import (
    EXPIRY_SHARE,
    GROUPS_PER_TRIAL,
    TRIAL_SHARE,
    CreditBalance,
    CreditLedger,
    CreditLine,
)

MAX_AGE_S = 200.0
EXPIRY_S = EXPIRY_SHARE * MAX_AGE_S
TRIAL_S = TRIAL_SHARE * MAX_AGE_S
MAX_WINDOW = 8
PEERS = ["a", "b", "c", "d"]


def credit_ledger_of(clock: ManualClock, max_window: int = MAX_WINDOW, in_rounds: bool = False) -> CreditLedger:
    """Of a trainer that started long ago."""
    credit_ledger = CreditLedger(clock, MAX_AGE_S, max_window, in_rounds)
    clock.advance(MAX_AGE_S + 1)
    return credit_ledger


def proven(credit_ledger: CreditLedger, peer: str, window: int) -> CreditLine:
    """A follower whose groups were admitted: it may have as much outstanding as it wants."""
    line = credit_ledger.open(peer, window)
    line.record.max_outstanding = window
    return line


class CreditMachine(RuleBasedStateMachine):
    """Followers come, deliver and go while the capacity changes."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.credit_ledger = credit_ledger_of(self.clock)
        self.lines: dict[str, CreditLine] = {}
        self.totals: dict[CreditLine, int] = {}

    @rule(peer=st.sampled_from(PEERS), window=st.integers(1, 12))
    def open(self, peer: str, window: int) -> None:
        self.lines[peer] = self.credit_ledger.open(peer, window)

    @rule(peer=st.sampled_from(PEERS))
    def close(self, peer: str) -> None:
        before = self.credit_ledger.num_outstanding
        line = self.lines.pop(peer, None)
        if line is not None:
            held_room = line.holds_room
            self.credit_ledger.close(line)
            assert self.credit_ledger.num_outstanding == before - (line.num_outstanding if held_room else 0)

    @rule(peer=st.sampled_from(PEERS), is_admitted=st.booleans())
    def deliver(self, peer: str, is_admitted: bool) -> None:
        before = self.credit_ledger.num_outstanding
        is_expected = self.credit_ledger.is_expected(peer, 0)
        self.credit_ledger.record_delivery(peer, is_admitted=is_admitted)
        assert is_expected or self.credit_ledger.num_outstanding == before

    @rule(capacity=st.integers(0, 20))
    def grant(self, capacity: int) -> None:
        before = {line: (line.num_granted, line.is_trial) for line in self.lines.values()}
        self.credit_ledger.grant(capacity)
        served = [line for line, (before_total, _) in before.items() if line.num_granted > before_total]
        if any(not line.is_trial for line in served):
            assert self.credit_ledger.num_outstanding <= capacity
        proven = [line for line in before if line.record.is_proven and line.holds_room]
        if self.credit_ledger.num_outstanding < capacity:  # nobody who wants more is left out while there is capacity
            assert all(w.num_outstanding >= min(w.window, w.record.max_outstanding) for w in proven)
        tried, most = [w for w in before if w.is_trial], max(1, capacity // GROUPS_PER_TRIAL) if capacity else 0
        assert all(line.num_outstanding == 1 and not line.record.is_proven for line in tried)
        assert len(tried) <= max(most, sum(was_trial for _, was_trial in before.values()))
        assert len(tried) >= most or not any(line.awaits_trial for line in before), "who waits is tried next"

    @rule(seconds=st.floats(0, 2 * EXPIRY_S))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def totals_only_grow_and_nobody_exceeds_its_window(self) -> None:
        for line in self.lines.values():
            assert 0 <= line.num_outstanding <= line.window <= MAX_WINDOW
            assert len(line.record.late_s) <= MAX_WINDOW
            assert line.num_granted >= self.totals.get(line, 0)
            assert line.num_granted - line.num_delivered - line.num_expired == line.num_outstanding
            assert line.num_delivered >= 0
            self.totals[line] = line.num_granted

    @invariant()
    def the_sum_is_that_of_the_watches(self) -> None:
        counted = [line.num_outstanding for line in self.lines.values() if line.holds_room]
        assert self.credit_ledger.num_outstanding == sum(counted)


TestCreditMachine = CreditMachine.TestCase
TestCreditMachine.settings = settings(deadline=None)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.lists(st.integers(0, 3), max_size=60))
def test_credit_differs_by_at_most_one_among_followers_that_want_enough(
    count: int, capacity: int, deliveries: list[int]
) -> None:
    credit_ledger = credit_ledger_of(ManualClock(), max_window=100)
    lines = [proven(credit_ledger, peer, window=100) for peer in PEERS[:count]]
    credit_ledger.grant(capacity)
    outstanding = [line.num_outstanding for line in lines]
    assert sum(outstanding) == capacity and max(outstanding) - min(outstanding) <= 1
    for number in deliveries:
        credit_ledger.record_delivery(PEERS[number % count], is_admitted=True)
        credit_ledger.grant(capacity)
        assert credit_ledger.num_outstanding == capacity


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 30))
def test_in_rounds_everybody_gets_the_same_whatever_its_window(count: int, capacity: int) -> None:
    credit_ledger = credit_ledger_of(ManualClock(), max_window=60, in_rounds=True)
    lines = [credit_ledger.open(peer, window=1) for peer in PEERS[:count]]
    for line in lines:
        line.record.max_outstanding = 60
    credit_ledger.grant(capacity)
    shares = {line.num_granted for line in lines}
    assert len(shares) == 1 and capacity <= credit_ledger.num_outstanding < capacity + count
    credit_ledger.grant(capacity)
    assert {line.num_granted for line in lines} == shares


def test_in_rounds_a_newcomer_gets_one_however_often_credit_is_granted() -> None:
    credit_ledger = credit_ledger_of(ManualClock(), in_rounds=True)
    newcomer = credit_ledger.open("new", window=8)
    for _ in range(3):
        credit_ledger.grant(8)
    assert newcomer.num_granted == 1


def test_a_slow_follower_does_not_starve_a_fast_one() -> None:
    credit_ledger = credit_ledger_of(ManualClock())
    slow = proven(credit_ledger, "slow", window=8)
    credit_ledger.grant(10)
    fast = credit_ledger.open("fast", window=8)
    for _ in range(50):
        credit_ledger.grant(10)
        credit_ledger.record_delivery("fast", is_admitted=True)
    assert fast.num_granted >= 50 and slow.num_granted == 8


def test_a_fast_follower_does_not_starve_a_slow_one() -> None:
    credit_ledger = credit_ledger_of(ManualClock())
    proven(credit_ledger, "fast", window=8)
    slow = proven(credit_ledger, "slow", window=8)
    for turn in range(100):
        credit_ledger.grant(4)  # scarce
        credit_ledger.record_delivery("fast", is_admitted=True)
        if turn % 10 == 0:
            credit_ledger.record_delivery("slow", is_admitted=True)
    assert slow.num_delivered == 10


def test_who_delivers_at_once_does_not_take_all_capacity_while_its_groups_wait() -> None:
    waiting = {"flood": 0, "honest": 0}
    credit_ledger = CreditLedger(ManualClock(), MAX_AGE_S, MAX_WINDOW, num_waiting=waiting.__getitem__)
    flood, honest = proven(credit_ledger, "flood", window=8), proven(credit_ledger, "honest", window=8)
    for _ in range(8):
        credit_ledger.grant(credit_ledger.num_outstanding + 1)
        if flood.num_outstanding:
            credit_ledger.record_delivery("flood", is_admitted=True)
            waiting["flood"] += 1
    assert honest.num_outstanding == waiting["flood"] == 4


def test_followers_that_hang_get_one_at_a_time_and_leave_the_capacity_to_others() -> None:
    clock = ManualClock()
    credit_ledger = credit_ledger_of(clock)
    hanging = [proven(credit_ledger, peer, window=8) for peer in ("a", "b", "c")]
    credit_ledger.grant(20)
    newcomer = proven(credit_ledger, "d", window=8)
    credit_ledger.grant(20)
    assert newcomer.num_granted == 0  # no capacity: everything is outstanding
    clock.advance(EXPIRY_S + 1)
    credit_ledger.grant(20)
    assert newcomer.num_granted == 8 and [line.num_outstanding for line in hanging] == [1, 1, 1]
    credit_ledger.record_delivery("a", is_admitted=True)
    credit_ledger.grant(20)
    assert hanging[0].num_outstanding == 2  # it lives


def test_identities_that_bring_nothing_take_no_capacity_from_those_who_deliver() -> None:
    clock = ManualClock()
    credit_ledger = credit_ledger_of(clock)
    honest = proven(credit_ledger, "honest", window=8)
    idle = [credit_ledger.open(f"idle {number}", window=8) for number in range(40)]
    for _ in range(100):
        credit_ledger.grant(20)
        assert honest.num_outstanding == credit_ledger.num_outstanding == 8
        assert sum(line.num_outstanding for line in idle) == 20 // GROUPS_PER_TRIAL
        credit_ledger.record_delivery("honest", is_admitted=True)
        clock.advance(1.0)
    assert honest.num_delivered == 100


def test_a_newcomer_is_tried_in_turn_beside_idle_ones_however_small_the_capacity() -> None:
    clock = ManualClock()
    credit_ledger = credit_ledger_of(clock)
    for number in range(40):
        credit_ledger.open(f"idle {number}", window=8)
    newcomer = credit_ledger.open("new", window=8)
    num_turns = 0
    while newcomer.num_granted == 0:
        credit_ledger.grant(1)
        clock.advance(TRIAL_S + 1)
        credit_ledger.open(f"idle {40 + num_turns}", window=8)  # more of them come all the time
        num_turns += 1
    assert num_turns == 41
    credit_ledger.record_delivery("new", is_admitted=True)
    for capacity in range(1, 8):
        credit_ledger.grant(capacity)
    assert newcomer.num_outstanding == 2, "one of those who deliver"


def test_a_trial_that_takes_longer_than_its_turn_proves_as_much_when_it_comes() -> None:
    clock = ManualClock()
    credit_ledger = credit_ledger_of(clock)
    slow = credit_ledger.open("slow", window=8)
    credit_ledger.grant(1)
    clock.advance(TRIAL_S + 1)
    assert not credit_ledger.expire(), "nobody else waits"
    other = credit_ledger.open("other", window=8)
    credit_ledger.grant(1)
    assert other.num_granted == 1 and slow.num_outstanding == 0
    clock.advance(TRIAL_S / 2)
    assert credit_ledger.is_expected("slow", 0) and not credit_ledger.is_expected("slow", 1)
    credit_ledger.record_delivery("slow", is_admitted=True)
    credit_ledger.grant(2)
    assert slow.num_outstanding == 2


def test_who_brings_what_is_refused_waits_for_its_next_trial_behind_the_others() -> None:
    credit_ledger = credit_ledger_of(ManualClock())
    credit_ledger.open("bad", window=8)
    credit_ledger.grant(1)
    newcomer = credit_ledger.open("new", window=8)
    credit_ledger.record_delivery("bad", is_admitted=False)
    credit_ledger.grant(1)
    assert newcomer.num_granted == 1


def test_a_group_now_and_then_does_not_hold_a_whole_window_for_good() -> None:
    clock = ManualClock()
    credit_ledger = credit_ledger_of(clock)
    line = proven(credit_ledger, "a", window=8)
    held: list[int] = []
    for _ in range(21):
        credit_ledger.grant(20)
        held.append(line.num_outstanding)
        clock.advance(0.9 * EXPIRY_S)
        credit_ledger.record_delivery("a", is_admitted=True)
    assert held.count(8) < len(held) / 2 and held.count(1) > 2


def test_a_newcomer_gets_one_group_and_twice_as_many_with_each_that_is_admitted() -> None:
    credit_ledger = credit_ledger_of(ManualClock())
    line = credit_ledger.open("a", window=65536)
    outstanding: list[int] = []
    for _ in range(5):
        credit_ledger.grant(1000)
        outstanding.append(line.num_outstanding)
        credit_ledger.record_delivery("a", is_admitted=True)
    assert outstanding == [1, 2, 4, 8, 8], "at most what the trainer allows anybody"
    refused = credit_ledger.open("b", window=8)
    for _ in range(5):
        credit_ledger.grant(1000)
        credit_ledger.record_delivery("b", is_admitted=False)
    assert refused.num_outstanding == 0 and refused.num_granted == 5


def test_who_hangs_is_not_trusted_again_because_it_opens_a_new_stream() -> None:
    clock = ManualClock()
    credit_ledger = credit_ledger_of(clock)
    first = proven(credit_ledger, "a", window=8)
    credit_ledger.grant(8)
    clock.advance(EXPIRY_S + 1)
    assert credit_ledger.expire() and credit_ledger.num_outstanding == 0
    credit_ledger.close(first)
    second = credit_ledger.open("a", window=8)
    credit_ledger.grant(8)
    assert second.num_granted == 1
    for _ in range(3):
        credit_ledger.record_delivery("a", is_admitted=True)
        credit_ledger.grant(8)
    credit_ledger.close(second)
    third = credit_ledger.open("a", window=8)
    credit_ledger.grant(8)
    assert third.num_granted == 8, "nor is who delivers forgotten"


def test_what_was_begun_under_an_earlier_stream_or_expired_may_still_come_for_a_while() -> None:
    clock = ManualClock()
    credit_ledger = credit_ledger_of(clock)
    assert not credit_ledger.is_expected("a", 0), "nothing was ever given to it"
    first = proven(credit_ledger, "a", window=4)
    credit_ledger.grant(4)
    credit_ledger.close(first)
    assert credit_ledger.is_expected("a", 3) and not credit_ledger.is_expected("a", 4)
    credit_ledger.record_delivery("a", is_admitted=True)
    assert credit_ledger.is_expected("a", 2) and not credit_ledger.is_expected("a", 3)
    clock.advance(MAX_AGE_S + 1)
    assert not credit_ledger.is_expected("a", 0), "it would be too old"
    proven(credit_ledger, "a", window=4)
    credit_ledger.grant(4)
    clock.advance(EXPIRY_S + 1)
    credit_ledger.expire()
    assert (
        credit_ledger.num_outstanding == 0
        and credit_ledger.is_expected("a", 3)
        and not credit_ledger.is_expected("a", 4)
    )


def test_opening_again_and_again_gathers_no_credit() -> None:
    credit_ledger = credit_ledger_of(ManualClock())
    line = proven(credit_ledger, "a", window=8)
    for _ in range(49):
        credit_ledger.grant(100)
        line = proven(credit_ledger, "a", window=8)
    credit_ledger.grant(100)
    assert credit_ledger.is_expected("a", 2 * MAX_WINDOW - 1) and not credit_ledger.is_expected("a", 2 * MAX_WINDOW)
    credit_ledger.close(line)
    assert not credit_ledger.is_expected("a", MAX_WINDOW)


def test_after_a_start_a_window_of_groups_comes_with_credit_that_is_not_remembered() -> None:
    clock = ManualClock()
    credit_ledger = CreditLedger(clock, MAX_AGE_S, MAX_WINDOW)
    assert credit_ledger.is_expected("a", MAX_WINDOW - 1) and not credit_ledger.is_expected("a", MAX_WINDOW)
    clock.advance(MAX_AGE_S + 1)
    assert not credit_ledger.is_expected("a", 0) and not credit_ledger.is_expected("b", 0)


def test_a_peer_that_opens_a_new_stream_has_one_record() -> None:
    credit_ledger = credit_ledger_of(ManualClock())
    first = proven(credit_ledger, "a", window=4)
    credit_ledger.grant(10)
    second = credit_ledger.open("a", window=2)
    assert first.is_closed and credit_ledger.num_outstanding == 0
    credit_ledger.grant(10)
    credit_ledger.close(first)  # its stream ends late
    assert second.num_granted == 2 and credit_ledger.num_outstanding == 2 and credit_ledger.followers == {"a"}


def test_who_asks_for_none_gets_none() -> None:
    credit_ledger = credit_ledger_of(ManualClock())
    line = credit_ledger.open("a", window=0)
    credit_ledger.grant(10)
    assert line.num_granted == 0 and not credit_ledger.followers


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=20), st.integers(0, 30))
def test_the_balance_is_the_greatest_total_less_what_was_stored(totals: list[int], num_stored: int) -> None:
    balance = CreditBalance(batch=4)
    assert balance.num_left == 0 and balance.head_step is None
    for total in totals:
        balance.update(Credit(head_step=3, granted=total), now_s=100.0)
    for _ in range(num_stored):
        balance.record_stored(created_at_s=100.0)
    assert balance.num_left == max(0, max(totals, default=0) - num_stored)
    balance.reset()
    assert balance.num_left == 0 and balance.head_step is None


def test_a_clock_that_was_set_back_makes_one_batch_free_and_no_more() -> None:
    balance = CreditBalance(batch=4)
    balance.update(Credit(head_step=3, granted=10), now_s=100.0)
    balance.update(Credit(head_step=4, granted=12), now_s=200.0)
    for _ in range(4):
        balance.record_stored(created_at_s=99.0)
    assert balance.num_left == 12
    balance.record_stored(created_at_s=150.0)  # since the first message
    balance.record_stored(created_at_s=99.0)
    assert balance.num_left == 10
