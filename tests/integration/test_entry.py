"""Entry to a run: each kind admits the right nodes and refuses the others, over real sockets.

The attacks here are keys that have no credential, one of somebody else, of another run, forged or out of date.
"""

import random
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from entry_credentials import BITS, MEMBER, OPERATOR, RUN, STRANGER, invitation, rule_of, work, wrong_work

from swarm.clock import ManualClock, SystemClock
from swarm.config import EntryConfig, ExchangeConfig
from swarm.errors import NotHeld, Unauthenticated, Unavailable
from swarm.exchange.grpc_transport import GrpcTransport, PeerHooks
from swarm.identity import Identity
from swarm.interfaces import PeerAddress
from swarm.peers import entry as entry_module
from swarm.peers.address_book import KNOWN_PEERS, AddressBook, save_known_peers
from swarm.peers.address_book import MAX_REMEMBERED as NUM_KNOWN
from swarm.peers.entry import EntryRule
from swarm.peers.reputation import Reputation
from swarm.testing.builders import HoldsNothing
from swarm.wire.credentials import DAY_S, Credential, WorkProof, epoch_at, seal_invitation


@asynccontextmanager
async def serving(rule: EntryRule) -> AsyncGenerator[Callable[..., Any]]:
    """A node that admits by a rule; gives what connects to it as somebody with a credential."""
    server = Identity.create()
    transport = GrpcTransport(server, RUN, ExchangeConfig(), SystemClock(), hooks=PeerHooks(require_entry=rule.require))
    (endpoint,) = await transport.serve(HoldsNothing())

    async def enter(node: Identity, credential: bytes = b"") -> None:
        client = GrpcTransport(node, RUN, ExchangeConfig(), SystemClock(), credential=lambda: credential)
        try:
            await client.connect(PeerAddress(node_id=server.node_id, endpoint=endpoint), timeout_s=5.0)
        finally:
            await client.stop()

    try:
        yield enter
    finally:
        await transport.stop()


def test_every_known_peer_with_a_proof_of_work_outlives_a_restart(tmp_path: Path) -> None:
    nodes = [Identity.from_seed(bytes([100 + number]) * 32) for number in range(NUM_KNOWN)]
    peers: list[dict[str, object]] = [
        {
            "node_id": node.node_id,
            "endpoint": f"127.0.0.1:{1000 + number}",
            "since_s": float(number),
            "credential": work(node, bits=1).hex(),
        }
        for number, node in enumerate(nodes)
    ]
    save_known_peers(tmp_path / KNOWN_PEERS, peers)
    book = AddressBook(ManualClock(), random.Random(0))
    book.restore(tmp_path / KNOWN_PEERS, rule_of("work", work_bits=1).readmits)
    assert len(book.known) == NUM_KNOWN


ADMITTED: Final = [
    ("open", STRANGER, b""),
    ("open", STRANGER, b"rubbish"),
    ("work", STRANGER, work(STRANGER)),
    ("work", STRANGER, work(STRANGER, epochs_ago=1)),
    ("work", STRANGER, invitation(STRANGER)),
    ("work", MEMBER, b""),
    ("invited", STRANGER, invitation(STRANGER)),
    ("invited", STRANGER, invitation(STRANGER, OPERATOR)),
    ("invited", MEMBER, b""),
    ("members", MEMBER, b""),
]


@pytest.mark.parametrize(("kind", "node", "credential"), ADMITTED, ids=range(len(ADMITTED)))
async def test_each_kind_of_entry_admits_at_hello(kind: str, node: Identity, credential: bytes) -> None:
    async with serving(rule_of(kind)) as enter:
        await enter(node, credential)


REFUSED: Final = [
    ("work", b"", "proof of work"),
    ("work", wrong_work(STRANGER), "not for this node"),
    ("work", work(STRANGER, epochs_ago=2), "another month"),
    ("work", work(STRANGER, epochs_ago=-1), "another month"),
    ("invited", b"", f"swarm-node invite {STRANGER.node_id[:8]}"),
    ("invited", b"\xff" * 40, "malformed"),
    ("invited", b"\n" * 10_000, "malformed"),  # more than 16 KB no server of a node takes in at all
    ("invited", work(STRANGER), "invited nodes only"),
    ("invited", invitation(MEMBER), "not for this node"),
    ("invited", invitation(STRANGER, run_id="another"), "not for this node and run"),
    ("invited", invitation(STRANGER, days=-1), "expired"),
    ("invited", invitation(STRANGER, expires_at_s=2**33), "not for this node"),
    ("invited", invitation(STRANGER, public_key=OPERATOR.public_key), "not for this node"),
    ("invited", invitation(STRANGER, STRANGER), "no member"),
    ("invited", invitation(STRANGER, Identity.create()), "no member"),
    ("members", b"", "listed nodes only"),
    ("members", invitation(STRANGER), "listed nodes only"),
    ("members", work(STRANGER), "listed nodes only"),
]


@pytest.mark.parametrize(("kind", "credential", "reason"), REFUSED, ids=range(len(REFUSED)))
async def test_each_kind_of_entry_refuses_at_hello_with_the_fix(kind: str, credential: bytes, reason: str) -> None:
    rule = rule_of(kind)
    async with serving(rule) as enter:
        with pytest.raises(Unauthenticated, match=reason):
            await enter(STRANGER, credential)
        await enter(MEMBER)
    assert rule.num_refused == 1
    assert not rule.is_admitted(STRANGER.node_id)


async def test_an_invited_node_invites_nobody() -> None:
    guest, friend = STRANGER, Identity.create()
    async with serving(rule_of("invited")) as enter:
        await enter(guest, invitation(guest))
        with pytest.raises(Unauthenticated, match="no member"):
            await enter(friend, invitation(friend, guest))


async def test_a_denied_node_and_all_whom_it_invited_are_refused() -> None:
    rule = rule_of("invited")
    async with serving(rule) as enter:
        await enter(STRANGER, invitation(STRANGER))
        rule.update(rule.config.model_copy(update={"denied": (MEMBER.node_id,)}))
        for node in (MEMBER, STRANGER):
            with pytest.raises(Unauthenticated):
                await enter(node, invitation(node))


@pytest.mark.parametrize("what", ["denied", "voucher taken off", "list without it"])
async def test_whom_a_newer_manifest_shuts_out_is_refused_at_its_next_call(what: str) -> None:
    """Its session was opened before, and would be good for a quarter of an hour."""
    rule, server = rule_of("invited"), Identity.create()
    reputation = Reputation(SystemClock(), 6000, is_denied=rule.is_denied)
    transport = GrpcTransport(
        server,
        RUN,
        ExchangeConfig(),
        SystemClock(),
        hooks=PeerHooks(require_allowed=reputation.require_allowed, require_entry=rule.require),
    )
    (endpoint,) = await transport.serve(HoldsNothing())
    client = GrpcTransport(
        STRANGER, RUN, ExchangeConfig(), SystemClock(), credential=lambda: invitation(STRANGER, MEMBER)
    )
    try:
        peer = await client.connect(PeerAddress(node_id=server.node_id, endpoint=endpoint), timeout_s=5.0)
        with pytest.raises(NotHeld):
            await peer.fetch(b"d" * 32, 100, 5.0)
        changes: dict[str, Any] = {
            "denied": {"denied": (STRANGER.node_id,)},
            "voucher taken off": {"members": (OPERATOR.node_id,)},
            "list without it": {"kind": "members"},
        }[what]
        rule.update(rule.config.model_copy(update=changes))
        with pytest.raises(Unavailable, match="any more"):
            await peer.fetch(b"d" * 32, 100, 5.0)
        assert rule.voucher_of(STRANGER.node_id) is None or what == "list without it"
    finally:
        await client.stop()
        await transport.stop()


async def test_a_newer_manifest_leaves_those_who_still_belong_here() -> None:
    rule = rule_of("work")
    guest, worker = Identity.create(), Identity.create()
    rule.require(guest.node_id, invitation(guest))
    rule.require(worker.node_id, work(worker))
    more = rule.config.model_copy(update={"members": (*rule.config.members, STRANGER.node_id)})
    rule.update(more)
    assert rule.is_admitted(guest.node_id) and rule.is_admitted(worker.node_id) and rule.is_member(STRANGER.node_id)
    rule.update(more.model_copy(update={"work_bits": 40}))
    assert rule.is_admitted(guest.node_id) and not rule.is_admitted(worker.node_id)


async def test_a_proof_of_work_is_good_for_one_key_only() -> None:
    proof, bits = work(STRANGER, bits=10), 10
    async with serving(rule_of("work", work_bits=bits)) as enter:
        await enter(STRANGER, proof)
        num_refused = 0
        for _ in range(4):
            try:
                await enter(Identity.create(), proof)
            except Unauthenticated as error:
                assert "not for this node" in str(error)
                num_refused += 1
    assert num_refused >= 3  # one passes by luck every thousand times


def test_the_first_voucher_stays_until_its_invitation_ends() -> None:
    clock, other = ManualClock(), Identity.create()
    config = EntryConfig(kind="open", members=(MEMBER.node_id, other.node_id))
    rule = EntryRule(config, RUN, clock, OPERATOR.node_id)

    def shown(voucher: Identity, until_s: float) -> bytes:
        return Credential(invitation=seal_invitation(voucher, RUN, STRANGER.node_id, until_s)).to_bytes()

    now_s = clock.now_s()
    assert rule.voucher_of(STRANGER.node_id) is None
    rule.require(STRANGER.node_id, shown(MEMBER, now_s + 100))
    rule.require(STRANGER.node_id, shown(other, now_s + 1000))
    assert rule.voucher_of(STRANGER.node_id) == MEMBER.node_id
    clock.advance(200)
    assert rule.voucher_of(STRANGER.node_id) is None
    rule.require(STRANGER.node_id, shown(other, now_s + 1000))
    assert rule.voucher_of(STRANGER.node_id) == other.node_id
    assert not rule.is_member(STRANGER.node_id)


def test_an_invitation_of_the_coordinator_is_as_good_as_the_list() -> None:
    rule = rule_of("open")
    rule.require(STRANGER.node_id, invitation(STRANGER, OPERATOR))
    assert rule.is_member(STRANGER.node_id)
    assert rule.voucher_of(STRANGER.node_id) is None


def test_a_member_who_turns_fills_no_table_with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its guests beyond the bound are refused, others stay known, and places of ended invitations come back."""
    monkeypatch.setattr(entry_module, "MAX_REMEMBERED", 20)
    monkeypatch.setattr(entry_module, "MAX_INVITED", 8)
    clock, turned = ManualClock(SystemClock().now_s()), Identity.create()
    config = EntryConfig(kind="invited", members=(MEMBER.node_id, turned.node_id))
    rule = EntryRule(config, RUN, clock, OPERATOR.node_id)
    rule.require(STRANGER.node_id, invitation(STRANGER, days=9))
    keys = [Identity.create() for _ in range(30)]
    assert sum(rule.admits(key.node_id, invitation(key, turned)) for key in keys) == 8
    assert rule.is_admitted(STRANGER.node_id)
    late = invitation(keys[-1], turned, days=5)
    assert not rule.admits(keys[-1].node_id, late)
    clock.advance(2 * DAY_S)
    assert rule.admits(keys[-1].node_id, late)


def test_a_flood_of_false_invitations_shuts_nobody_out_of_an_open_run() -> None:
    """An invited node counts as a newcomer until its invitation can be looked at."""
    clock = ManualClock(SystemClock().now_s())
    rule = EntryRule(EntryConfig(kind="open", members=(MEMBER.node_id,)), RUN, clock)
    false, good = invitation(MEMBER), invitation(STRANGER)
    for number in range(1000):
        assert rule.admits(f"{number:064x}", false)
    assert rule.admits(STRANGER.node_id, good)
    assert rule.voucher_of(STRANGER.node_id) is None
    clock.advance(1.0)
    assert rule.admits(STRANGER.node_id, good)
    assert rule.voucher_of(STRANGER.node_id) == MEMBER.node_id


def test_a_flood_of_strangers_costs_a_bounded_number_of_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And known nodes pass meanwhile, as strangers do at the other place."""
    num_tries = 0

    def counted(proof: WorkProof, run_id: str, node_id: str, bits: int) -> bool:
        nonlocal num_tries
        num_tries += 1
        return node_id == STRANGER.node_id

    monkeypatch.setattr(entry_module, "fits_work", counted)
    clock = ManualClock(SystemClock().now_s())
    rule = EntryRule(EntryConfig(kind="work"), RUN, clock)
    data = Credential(work=WorkProof(epoch=epoch_at(clock.now_s()), nonce=5)).to_bytes()
    rule.require(STRANGER.node_id, data)
    for number in range(1000):
        assert not rule.admits(f"{number:064x}", data)
    assert num_tries <= 1 + entry_module.WORK_CHECKS_PER_S
    assert rule.admits(STRANGER.node_id, data)
    with pytest.raises(Unauthenticated, match="not for this node"):
        rule.require("f" * 64, data)


@pytest.mark.parametrize(("credential", "wrong_by_s"), [("invitation", 2 * DAY_S), ("work", -60 * DAY_S)])
def test_a_clock_that_was_wrong_shuts_nobody_out_for_good(credential: str, wrong_by_s: float) -> None:
    """A group that was refused for its date alone is looked at again once the clock is right."""
    shown = invitation(STRANGER) if credential == "invitation" else work(STRANGER)
    clock = ManualClock(SystemClock().now_s() + wrong_by_s)
    config = EntryConfig(kind="work", members=(MEMBER.node_id,), work_bits=BITS)
    rule = EntryRule(config, RUN, clock, OPERATOR.node_id)
    assert not rule.admits(STRANGER.node_id, shown)
    clock._start_s -= wrong_by_s  # pyright: ignore[reportPrivateUsage]
    assert rule.admits(STRANGER.node_id, shown)
