"""Parties: who is established, whose keys are one, and what a key cannot do by itself."""

import pytest

from swarm.clock import ManualClock
from swarm.config import CoordinatorLink, DirectoryConfig, EntryConfig, ExchangeConfig, NodeConfig
from swarm.identity import Identity
from swarm.peers.entry import EntryRule
from swarm.peers.parties import Parties
from swarm.testing.builders import make_identity
from swarm.wire.credentials import Credential, seal_invitation

MEMBERS = tuple(make_identity(number) for number in range(1, 4))
COORDINATOR, GUEST, OTHER_GUEST, STRANGER = (make_identity(number) for number in range(4, 8))
RUN = "demo"


class Bench:
    """The parties of an open run of three members, and where keys proved themselves."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        entry = EntryConfig(members=tuple(member.node_id for member in MEMBERS))
        self.rule = EntryRule(entry, RUN, self.clock, coordinator=COORDINATOR.node_id)
        self.endpoints: dict[str, str] = {}
        self.parties = Parties(self.rule, self.endpoints.get)

    def invite(self, node: Identity, by: Identity) -> None:
        invitation = seal_invitation(by, RUN, node.node_id, self.clock.now_s() + 1000.0)
        self.rule.require(node.node_id, Credential(invitation=invitation).to_bytes())


def test_only_the_list_and_an_invitation_establish_a_key() -> None:
    bench = Bench()
    assert all(bench.parties.is_established(member.node_id) for member in MEMBERS)
    assert not bench.parties.is_established(STRANGER.node_id)
    bench.invite(GUEST, by=MEMBERS[0])
    bench.invite(STRANGER, by=OTHER_GUEST)  # who is no member
    standing = [bench.parties.standing_of(one.node_id) for one in (MEMBERS[0], GUEST, STRANGER)]
    assert standing == ["member", f"invited by {MEMBERS[0].node_id[:8]}", "newcomer"]
    assert Parties().standing_of(GUEST.node_id) == ""
    assert bench.parties.is_established(GUEST.node_id)
    assert not bench.parties.is_established(STRANGER.node_id)
    bench.clock.advance(1001.0)
    assert not bench.parties.is_established(GUEST.node_id), "an invitation ends"


def test_who_is_invited_is_one_party_with_the_member_that_answers_for_it() -> None:
    bench = Bench()
    for guest in (GUEST, OTHER_GUEST):
        bench.invite(guest, by=MEMBERS[0])
    assert {bench.parties.party_of(key.node_id) for key in (MEMBERS[0], GUEST, OTHER_GUEST)} == {MEMBERS[0].node_id}
    bench.invite(STRANGER, by=COORDINATOR)
    assert bench.parties.party_of(STRANGER.node_id) == STRANGER.node_id, "invited by the run itself"


def test_invited_keys_of_one_subnet_share_a_bound_beside_their_own_and_members_do_not() -> None:
    bench = Bench()
    bench.invite(GUEST, by=MEMBERS[0])
    bench.invite(OTHER_GUEST, by=MEMBERS[1])
    for number, key in enumerate((GUEST, OTHER_GUEST, *MEMBERS)):
        bench.endpoints[key.node_id] = f"1.2.3.{number}:7700"
    bounds = bench.parties.bounds_of
    assert bounds(GUEST.node_id) == (MEMBERS[0].node_id, "1.2.3.0/24")
    assert bounds(OTHER_GUEST.node_id) == (MEMBERS[1].node_id, "1.2.3.0/24")
    assert bounds(MEMBERS[2].node_id) == (MEMBERS[2].node_id,)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "10.1.2.3:7700", "[fe80::1]:7700", "peer.example.org:7700"])
def test_loopback_and_private_addresses_and_names_merge_nobody(endpoint: str) -> None:
    bench = Bench()
    for key in (STRANGER, GUEST):
        bench.endpoints[key.node_id] = endpoint
    assert bench.parties.party_of(STRANGER.node_id) != bench.parties.party_of(GUEST.node_id)


def test_newcomers_of_one_public_subnet_are_one_among_the_newcomers() -> None:
    bench = Bench()
    bench.endpoints |= {STRANGER.node_id: "[2001:470:1:1::1]:7700", GUEST.node_id: "[2001:470:1:ffff::2]:7700"}
    assert bench.parties.party_of(STRANGER.node_id) == bench.parties.party_of(GUEST.node_id)


def test_in_a_private_run_everybody_is_established_and_a_party_of_its_own() -> None:
    parties = Parties()
    assert parties.is_private and parties.is_established("anybody") and parties.party_of("anybody") == "anybody"


@pytest.mark.parametrize(
    ("changes", "is_private"),
    [
        ({}, True),
        ({"coordinator": CoordinatorLink(address="10.0.0.1:4400,192.168.1.7:4400")}, True),
        ({"coordinator": CoordinatorLink(address="head-node:4400")}, True),
        ({"coordinator": CoordinatorLink(address="swarm.example.org:4400")}, False),
        ({"coordinator": CoordinatorLink(address="10.0.0.1:4400,8.8.8.8:4400")}, False),
        ({"directory": DirectoryConfig(bootstrap=("/ip4/10.0.0.1/tcp/7701/p2p/Qm1",))}, True),
        ({"directory": DirectoryConfig(bootstrap=("/ip4/8.8.8.8/tcp/7701/p2p/Qm1",))}, False),
        ({"directory": DirectoryConfig(announce=("/dns4/example.org/tcp/7701",))}, False),
        ({"exchange": ExchangeConfig(listen="0.0.0.0:7700")}, False),
        ({"exchange": ExchangeConfig(listen="0.0.0.0:7700", advertise="192.168.0.2:7700")}, True),
        ({"exchange": ExchangeConfig(advertise="8.8.8.8:7700")}, False),
        ({"entry": EntryConfig(members=(STRANGER.node_id,))}, False),
        ({"entry": EntryConfig(kind="work")}, False),
        ({"entry": EntryConfig(kind="invited", established="everybody")}, True),
        ({"entry": EntryConfig(established="members")}, False),
    ],
)
def test_a_run_is_private_where_only_one_network_can_reach_it_or_its_configuration_says_so(
    changes: dict[str, object], is_private: bool
) -> None:
    assert NodeConfig().model_copy(update=changes).is_private is is_private
