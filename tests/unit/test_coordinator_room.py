"""Tables of the coordinator that free keys fill: members, lineages and watches make room for newcomers."""

import pytest

from coordinator.core import CoordinatorCore
from coordinator.head_watches import HeadWatches
from coordinator.ledger import Ledger
from coordinator.membership import Membership
from swarm.clock import ManualClock
from swarm.errors import Unavailable
from swarm.testing.builders import make_report
from swarm.types import NodeReport, PolicyVersion

HONEST = "ab" * 32


def key(number: int) -> str:
    return f"{number:064x}"


def report(node_id: str) -> NodeReport:
    return make_report(node_id)


def version(owner: str, step: int = 0) -> PolicyVersion:
    return PolicyVersion(policy_id=owner, step=step, digest=bytes(32))


# --- watches ---------------------------------------------------------------------------------------------


def test_watches_of_256_keys_keep_no_newcomer_out() -> None:
    watches = HeadWatches()
    sybils = [watches.open(key(number // 4), HONEST, f"127.1.0.{number // 256}") for number in range(1024)]
    opened = [sybil.__enter__() for sybil in sybils]
    with watches.open(HONEST, HONEST, "127.0.0.1"):
        assert watches.num_open == 1024
        assert sum(bool(watch._end_reason) for watch in opened) == 1
    for sybil in sybils:
        sybil.__exit__(None, None, None)
    assert watches.num_open == 0 and not watches._of_lineage and not watches._of_subnet


def test_a_subnet_has_its_part_of_the_watches() -> None:
    watches = HeadWatches(per_node=4, total=100, per_subnet=2)
    with watches.open(key(1), HONEST, "a"), watches.open(key(2), HONEST, "a"):
        with pytest.raises(Unavailable, match="2 watches of a"):
            watches.open(key(3), HONEST, "a").__enter__()
        with watches.open(key(3), HONEST, "b"):
            assert watches.num_open == 3


# --- members ---------------------------------------------------------------------------------------------


def test_live_sybils_of_few_subnets_keep_no_newcomer_out() -> None:
    membership = Membership(lease_s=30.0, max_members=40)
    membership.renew(report(key(999)), 0.0, "127.0.0.9")  # honest, since long
    for number in range(39):
        membership.renew(report(key(number)), float(number) / 10, f"127.1.0.{number // 13}")
    _, has_joined = membership.renew(report(HONEST), 5.0, "127.0.0.1")
    assert has_joined and len(membership.all()) == 40
    assert membership.is_live(key(999), 5.0)
    (dropped,) = membership.expire(5.0, 1e9)  # the store forgets whoever made room
    assert dropped in {key(12), key(25), key(38)}  # the newest of a subnet


def test_a_subnet_has_its_part_of_the_members_and_its_gone_ones_make_room_first() -> None:
    membership = Membership(lease_s=30.0, max_members=100, per_subnet=2)
    membership.renew(report(key(0)), 0.0, "a")
    membership.renew(report(key(1)), 20.0, "a")
    with pytest.raises(Unavailable, match="2 live members are of a"):
        membership.renew(report(key(2)), 25.0, "a")
    membership.renew(report(key(2)), 35.0, "a")
    assert {member.node_id for member in membership.all()} == {key(1), key(2)}
    membership.renew(report(key(3)), 35.0, "b")
    assert len(membership.live(35.0)) == 3
    with pytest.raises(Unavailable, match="2 live members are of a"):
        membership.renew(report(key(3)), 36.0, "a")  # who moves there is no exception
    membership.renew(report(key(1)), 45.0, "a")
    membership.renew(report(key(3)), 66.0, "a")
    assert {member.node_id for member in membership.all()} == {key(1), key(3)}, "of the gone one, once it is gone"


# --- lineages --------------------------------------------------------------------------------------------


async def test_lineages_of_keys_that_are_gone_keep_no_newcomer_out() -> None:
    core = CoordinatorCore(ManualClock())
    core.ledger = Ledger(max_lineages=10)
    trainer, live = key(900), key(901)
    await core.heartbeat(live, report(live))
    await core.record_versions(live, [version(live)])
    await core.record_versions(trainer, [version(trainer, step) for step in range(5)])
    for number in range(8):
        await core.record_versions(key(number), [version(key(number))])
    (refused,) = await core.record_versions(key(50), [version(key(50), -1)])
    assert not refused.accepted and len(core.ledger.lineages) == 10
    assert core.ledger.head(key(0)) is not None, "what is refused makes nobody go"
    (answer,) = await core.record_versions(HONEST, [version(HONEST)])
    assert answer.accepted
    assert core.ledger.head(HONEST) == version(HONEST) and core.ledger.head(key(0)) is None
    assert core.ledger.head(trainer) is not None and core.ledger.head(live) is not None
