"""Credit of followers in an open run: shares of newcomers and of parties with many keys."""

from collections import Counter
from collections.abc import Callable

from swarm.clock import ManualClock
from swarm.config import EntryConfig
from swarm.peers.entry import EntryRule
from swarm.peers.parties import Parties
from swarm.testing.builders import make_identity
from swarm.weight_sync.credit import CreditLedger, CreditLine
from swarm.wire.credentials import Credential, seal_invitation

MAX_AGE_S, MAX_WINDOW = 200.0, 16
MEMBER, FELLOW = make_identity(1), make_identity(2)


def open_run(clock: ManualClock, num_waiting: Callable[[str], int] = lambda _: 0) -> tuple[CreditLedger, EntryRule]:
    rule = EntryRule(EntryConfig(members=(MEMBER.node_id, FELLOW.node_id)), "run", clock)
    ledger = CreditLedger(clock, MAX_AGE_S, MAX_WINDOW, num_waiting=num_waiting, parties=Parties(rule))
    return ledger, rule


def proven(ledger: CreditLedger, peer: str, window: int) -> CreditLine:
    """A follower whose groups were admitted: it may have as much outstanding as it wants."""
    line = ledger.open(peer, window)
    line.record.max_outstanding = window
    return line


def test_newcomers_together_have_an_eighth_of_the_capacity_with_what_waits_of_theirs() -> None:
    waiting = Counter[str]()
    ledger, _ = open_run(ManualClock(), lambda peer: waiting[peer])
    member = proven(ledger, MEMBER.node_id, window=MAX_WINDOW)
    newcomers = [proven(ledger, f"{number:064x}", window=8) for number in range(20)]
    newcomers += [ledger.open(f"{100 + number:064x}", window=8) for number in range(20)]
    most = 0
    for _ in range(200):
        ledger.grant(16)
        most = max(most, sum(line.num_outstanding + waiting[line.peer] for line in newcomers))
        for line in newcomers:  # they deliver at once, the member never
            while line.num_outstanding:
                ledger.record_delivery(line.peer, is_admitted=True)
                waiting[line.peer] += 1
    assert most <= 2 and member.num_outstanding >= 14


def test_a_member_with_many_invited_keys_has_no_more_credit_than_another_member() -> None:
    clock = ManualClock()
    ledger, rule = open_run(clock)
    guests = [make_identity(10 + number) for number in range(7)]
    for guest in guests:
        invitation = seal_invitation(MEMBER, "run", guest.node_id, clock.now_s() + 1000.0)
        rule.require(guest.node_id, Credential(invitation=invitation).to_bytes())
    lines = [proven(ledger, key.node_id, window=8) for key in (FELLOW, *guests)]
    ledger.grant(16)
    assert lines[0].num_outstanding == 8


def test_a_newcomer_that_is_invited_has_full_credit_from_its_next_group_on() -> None:
    clock = ManualClock()
    ledger, rule = open_run(clock)
    guest = make_identity(10)
    line = proven(ledger, guest.node_id, window=8)
    ledger.grant(16)
    assert line.num_outstanding == 2
    invitation = seal_invitation(MEMBER, "run", guest.node_id, clock.now_s() + 1000.0)
    rule.require(guest.node_id, Credential(invitation=invitation).to_bytes())
    ledger.record_delivery(guest.node_id, is_admitted=True)
    ledger.grant(16)
    assert line.num_outstanding == 8


def test_who_leaves_out_log_probs_has_the_credit_of_a_newcomer_in_a_private_run_until_a_group_has_them() -> None:
    ledger = CreditLedger(ManualClock(), MAX_AGE_S, MAX_WINDOW)
    honest = proven(ledger, MEMBER.node_id, window=MAX_WINDOW)
    others = [proven(ledger, f"{number:064x}", window=8) for number in range(8)]
    ledger.grant(16)
    while any(line.num_outstanding for line in others):  # one group of each comes
        for line in (line for line in others if line.num_outstanding):
            ledger.record_logprobs(line.peer, False)
            ledger.record_delivery(line.peer, is_admitted=True, is_useful=False)
    ledger.grant(16)
    assert sum(line.num_outstanding for line in others) == 2 and honest.num_outstanding >= 14
    line = next(line for line in others if line.num_outstanding)
    ledger.record_logprobs(line.peer, True)
    ledger.record_delivery(line.peer, is_admitted=True)
    assert not line.is_newcomer


def test_a_member_whose_groups_find_no_place_holds_no_credit_of_others() -> None:
    ledger, _ = open_run(ManualClock())
    lines = [proven(ledger, key.node_id, window=8) for key in (FELLOW, MEMBER)]
    ledger.grant(16)
    assert [line.num_outstanding for line in lines] == [8, 8]
    while lines[1].num_outstanding:
        ledger.record_delivery(MEMBER.node_id, is_admitted=True, is_useful=False)
    while lines[0].num_outstanding:
        ledger.record_delivery(FELLOW.node_id, is_admitted=True)
    ledger.grant(8)
    assert [line.num_outstanding for line in lines] == [8, 1]
