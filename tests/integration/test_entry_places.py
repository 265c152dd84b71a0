"""Entry at the other places than Hello: directory records, the coordinator, relayed groups, and a node's own start."""

import asyncio
import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from entry_credentials import BITS, MEMBER, OPERATOR, RUN, STRANGER, invitation, rule_of, work, wrong_work
from waits import until

from coordinator.daemon import CoordinatorDaemon
from node.credential import INVITATION, WORK, OwnCredential
from swarm.clock import SystemClock
from swarm.config import (
    CoordinatorConfig,
    CoordinatorLink,
    DirectoryConfig,
    EntryConfig,
    EnvironmentConfig,
    ModelConfig,
    NodeConfig,
)
from swarm.errors import ConfigError, Unauthenticated, Unavailable
from swarm.identity import Identity
from swarm.peers.coordinator_client import GrpcCoordinatorClient
from swarm.peers.dht_records import MAX_REPLY_BYTES
from swarm.peers.discovery_dht import HivemindDirectory
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import make_advert, make_group, make_identity, make_report, make_sealed
from swarm.testing.nodes import make_admission, make_context
from swarm.types import Advert, Cursor, NodeReport, PolicyVersion, RefusalReason, Refused, Role
from swarm.wire.adverts import MAX_ADVERT_BYTES, open_advert, seal_advert
from swarm.wire.credentials import (
    Credential,
    WorkProof,
    credential_from_bytes,
    epoch_at,
    fits_work,
    invitation_from_text,
    invitation_to_text,
    seal_invitation,
)

NEWCOMER = make_identity(9)


def advert_of(identity: Identity, credential: bytes) -> Advert:
    return make_advert(identity.node_id, run_id=RUN, expires_at_s=time.time() + 90.0, credential=credential)


async def test_adverts_of_those_who_may_not_enter_are_never_shown() -> None:
    """A stranger's own DHT peer, which checks nothing, announces it in three run kinds at once: nobody hears of it."""
    rules = [rule_of("invited"), rule_of("work"), rule_of("members"), None]
    wrong = [invitation(MEMBER), wrong_work(STRANGER), b""]
    people = [MEMBER, NEWCOMER, *(make_identity(20 + number) for number in range(2))]
    started: list[HivemindDirectory] = []
    try:
        for rule, identity in zip(rules, people, strict=True):
            config = DirectoryConfig(bootstrap=started[0].visible_maddrs() if started else ())
            started.append(await HivemindDirectory.start(identity, RUN, config, SystemClock(), None, rule))
        for shown in wrong:
            stranger = STRANGER if shown else people[3]
            started[3]._identity = stranger  # pyright: ignore[reportPrivateUsage]
            with contextlib.suppress(Unavailable):  # none of the others takes it
                await started[3].announce(advert_of(stranger, shown))
        await started[0].announce(advert_of(MEMBER, b""))
        await started[1].announce(advert_of(NEWCOMER, work(NEWCOMER)))
        seen = [{advert.node_id for advert in await directory.lookup()} for directory in started]
    finally:
        for directory in started:
            await directory.stop()
    strangers = {STRANGER.node_id, people[3].node_id}
    assert not any(found & strangers for found in seen[:3])
    assert seen[0] == {MEMBER.node_id}  # the work run's newcomer shows no invitation
    assert seen[1] == {MEMBER.node_id, NEWCOMER.node_id}
    assert rules[0] is not None and rules[0].num_refused > 0


def coordinator_config(directory: Path, **entry: Any) -> CoordinatorConfig:
    node = NodeConfig(
        environments=(EnvironmentConfig(name="echo", kind="char", dataset="reverse"),),
        model=ModelConfig(source="tiny"),
        entry=EntryConfig.model_validate({"members": [MEMBER.node_id], "work_bits": BITS, **entry}),
    )
    return CoordinatorConfig(dir=directory, run_id=RUN, directory=DirectoryConfig(kind="none"), node=node)


def report_of(identity: Identity) -> NodeReport:
    return make_report(identity.node_id)


async def heartbeat(daemon: CoordinatorDaemon, identity: Identity, credential: bytes) -> None:
    link = CoordinatorLink(address=daemon.info["listen"], fingerprint=daemon.info["fingerprint"])
    client = GrpcCoordinatorClient(link, identity, RUN, timeout_s=4.0, credential=lambda: credential)
    try:
        await client.heartbeat(report_of(identity))
    finally:
        await client.close()


async def test_the_coordinator_counts_nobody_who_may_not_enter(tmp_path: Path) -> None:
    async with CoordinatorDaemon(coordinator_config(tmp_path, kind="invited")) as daemon:
        await heartbeat(daemon, MEMBER, b"")
        await heartbeat(daemon, NEWCOMER, invitation(NEWCOMER))
        own = invitation(make_identity(7), Identity.load(tmp_path / "identity.key"))
        await heartbeat(daemon, make_identity(7), own)  # whom the coordinator itself invited
        for shown in (b"", invitation(NEWCOMER), invitation(STRANGER, OPERATOR), work(STRANGER)):
            with pytest.raises(Unauthenticated, match=r"invite|member"):
                await heartbeat(daemon, STRANGER, shown)
        members = {member.node_id for member in daemon.core.live_members()}
        assert STRANGER.node_id not in members and len(members) == 3


def test_the_longest_honest_advert_has_room_for_every_credential_and_an_equivocator() -> None:
    work_and_invitation = Credential(
        invitation=credential_of(invitation(STRANGER)).invitation, work=WorkProof(epoch=2**31, nonce=2**63)
    ).to_bytes()
    advert = replace(
        advert_of(STRANGER, work_and_invitation),
        run_id="r" * 40,
        endpoints=("h" * 100 + ":65535",),
        roles=tuple(Role),
        head=PolicyVersion(policy_id=STRANGER.node_id, step=2**40, digest=b"d" * 32),
        oldest_step=2**40,
        num_groups=2**31,
        reward_mean=0.5,
        reward_std=0.5,
        held_bytes=2**40,
        cursor=Cursor(epoch="e" * 16, sequence=2**40),
        equivocator="ab" * 8,
    )
    sealed = seal_advert(advert, STRANGER)
    assert len(sealed) <= MAX_ADVERT_BYTES
    assert open_advert(sealed, time.time()) == advert
    assert 128 * (MAX_ADVERT_BYTES + 64) < MAX_REPLY_BYTES  # a full shard is still one answer


def credential_of(data: bytes) -> Credential:
    found = credential_from_bytes(data)
    assert found is not None
    return found


async def test_a_member_relays_no_groups_of_those_who_may_not_enter() -> None:
    rule = rule_of("invited")
    context = make_context(identity=make_identity(3))
    admission = make_admission(context, MemoryGroupStore(context.clock, 10**8), entry=rule)
    relayed = make_sealed(make_group(STRANGER.node_id), STRANGER)
    result = await admission.admit(relayed, MEMBER.node_id)
    assert isinstance(result, Refused) and result.reason is RefusalReason.NO_ENTRY
    rule.require(STRANGER.node_id, invitation(STRANGER))
    assert not isinstance(await admission.admit(relayed, MEMBER.node_id), Refused)


# --- a node's own credential ---------------------------------------------------------------------------


def own_credential(directory: Path, kind: str, bits: int = BITS) -> OwnCredential:
    config = NodeConfig(dir=directory, run_id=RUN)
    return OwnCredential(config, STRANGER.node_id, rule_of(kind, work_bits=bits), SystemClock())


async def test_a_node_makes_its_proof_of_work_once(tmp_path: Path) -> None:
    first = own_credential(tmp_path, "work")
    await first.prepare()
    rule_of("work").require(STRANGER.node_id, first.shown())
    made = (tmp_path / WORK).stat().st_mtime_ns
    again = own_credential(tmp_path, "work")
    await again.prepare()
    assert again.shown() == first.shown()
    assert (tmp_path / WORK).stat().st_mtime_ns == made


async def test_a_search_that_is_broken_off_goes_on_where_it_was(tmp_path: Path) -> None:
    search = asyncio.create_task(own_credential(tmp_path, "work", bits=40).prepare())
    await asyncio.sleep(0.3)
    search.cancel()
    with pytest.raises(asyncio.CancelledError):
        await search
    await until((tmp_path / WORK).exists, "the file that the searching thread writes as it ends")
    state = json.loads((tmp_path / WORK).read_text())
    assert not state["is_found"] and state["nonce"] > 0
    # A proof that lies before where it stopped is not looked for again.
    (tmp_path / WORK).write_text(json.dumps({**state, "nonce": 5000, "bits": BITS}))
    own = own_credential(tmp_path, "work")
    await own.prepare()
    assert json.loads((tmp_path / WORK).read_text())["nonce"] >= 5000


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", '{"epoch": 1e400}', "\u00e9"], ids=range(6))
async def test_a_damaged_file_of_work_is_made_again(tmp_path: Path, text: str) -> None:
    (tmp_path / WORK).write_text(text, encoding="latin-1")
    own = own_credential(tmp_path, "work")
    await own.prepare()
    assert own.shown()


async def test_a_node_with_an_invitation_does_no_work(tmp_path: Path) -> None:
    given = seal_invitation(MEMBER, RUN, STRANGER.node_id, time.time() + 1000)
    (tmp_path / INVITATION).write_text(invitation_to_text(given) + "\n")
    for kind in ("work", "invited", "open"):
        own = own_credential(tmp_path, kind, bits=40)
        await own.prepare()
        rule_of(kind).require(STRANGER.node_id, own.shown())
    assert not (tmp_path / WORK).exists()


@pytest.mark.parametrize(
    ("kind", "voucher", "reason"),
    [
        ("invited", None, f"swarm-node invite {STRANGER.node_id}"),
        ("invited", STRANGER, "no member"),
        ("members", None, f"ask its operator to list {STRANGER.node_id}"),
    ],
)
async def test_a_node_that_would_be_refused_does_not_start_and_says_what_to_do(
    tmp_path: Path, kind: str, voucher: Identity | None, reason: str
) -> None:
    if voucher is not None:
        given = seal_invitation(voucher, RUN, STRANGER.node_id, time.time() + 1000)
        (tmp_path / INVITATION).write_text(invitation_to_text(given))
    with pytest.raises(ConfigError, match=reason):
        await own_credential(tmp_path, kind).prepare()


@pytest.mark.parametrize("text", ["", "invitation:", "invitation:AAAA", "\0", "x" * 10_000], ids=range(5))
def test_what_is_no_invitation_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="swarm-node invite"):
        invitation_from_text(text)


def test_a_proof_of_work_takes_one_try_to_check_and_so_many_to_make() -> None:
    """Means over 64 proofs; the count of tries is what the price in docs/threat_model.md rests on."""
    from swarm.wire.credentials import find_work

    epoch, tries = epoch_at(time.time()), 0
    for number in range(64):
        node_id = make_identity(100 + number).node_id
        proof = find_work(RUN, node_id, epoch, BITS, 0, lambda nonce: True)
        assert proof is not None and fits_work(proof, RUN, node_id, BITS)
        tries += proof.nonce + 1
    assert 0.5 * 2**BITS < tries / 64 < 2 * 2**BITS
