"""Leases: who is live, who is gone, and a table that does not grow without bound."""

import pytest

from coordinator.membership import Membership
from swarm.errors import Unavailable
from swarm.testing.builders import make_report
from swarm.types import NodeReport


def report(node_id: str, name: str = "ada") -> NodeReport:
    return make_report(node_id, name=name)


def test_a_lease_runs_until_it_expires_and_a_renewal_extends_it() -> None:
    membership = Membership(lease_s=30.0)
    _, has_joined = membership.renew(report("a"), 100.0)
    assert has_joined and [m.node_id for m in membership.live(129.9)] == ["a"]
    _, has_joined = membership.renew(report("a"), 120.0)
    assert not has_joined and membership.live(149.9) and not membership.live(150.0)


def test_a_node_that_comes_back_joins_anew() -> None:
    membership = Membership(lease_s=30.0)
    membership.renew(report("a"), 100.0)
    member, has_joined = membership.renew(report("a"), 200.0)
    assert has_joined and member.joined_s == 200.0
    member, _ = membership.renew(report("a"), 210.0)
    assert member.joined_s == 200.0


def test_leaving_ends_the_lease_at_once_and_twice_is_once() -> None:
    membership = Membership(lease_s=30.0)
    membership.renew(report("a"), 100.0)
    membership.leave("a")
    left = membership.leave("a")
    assert left is not None and left.has_left and membership.live(101.0) == []
    assert membership.leave("unknown") is None
    _, has_joined = membership.renew(report("a"), 102.0)
    assert has_joined and membership.live(103.0)


def test_the_long_gone_are_forgotten_and_the_live_never() -> None:
    membership = Membership(lease_s=30.0)
    membership.renew(report("gone"), 100.0)
    membership.renew(report("live"), 190.0)
    assert membership.expire(200.0, keep_s=100.0) == ["gone"]
    assert [m.node_id for m in membership.all()] == ["live"]
    assert membership.expire(219.0, keep_s=0.0) == []


def test_a_full_table_evicts_the_longest_gone_and_refuses_when_all_are_live() -> None:
    membership = Membership(lease_s=30.0, max_members=2)
    membership.renew(report("a"), 100.0)
    membership.renew(report("b"), 110.0)
    with pytest.raises(Unavailable, match="no room"):
        membership.renew(report("c"), 115.0)
    membership.renew(report("a"), 116.0)
    membership.renew(report("c"), 141.0)
    assert {m.node_id for m in membership.all()} == {"a", "c"}


def test_restored_members_keep_their_leases() -> None:
    first, second = Membership(lease_s=30.0), Membership(lease_s=30.0)
    first.renew(report("a"), 100.0)
    first.renew(report("b"), 105.0)
    second.restore(first.all())
    assert second.all() == first.all()
    assert [m.node_id for m in second.live(132.0)] == ["b"]
