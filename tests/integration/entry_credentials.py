"""Members, strangers and what they may show, right and wrong, for the tests of entry."""

from dataclasses import replace
from typing import Any, Final

from swarm.clock import SystemClock
from swarm.config import EntryConfig
from swarm.identity import Identity
from swarm.peers.entry import EntryRule
from swarm.wire.credentials import DAY_S, Credential, WorkProof, epoch_at, find_work, seal_invitation

RUN: Final = "entry-run"
BITS: Final = 3  # eight tries on average
MEMBER, OPERATOR, STRANGER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))


def rule_of(kind: str, **changes: Any) -> EntryRule:
    values = {"kind": kind, "members": [MEMBER.node_id], "work_bits": BITS, **changes}
    return EntryRule(EntryConfig.model_validate(values), RUN, SystemClock(), OPERATOR.node_id)


def invitation(
    node: Identity, voucher: Identity = MEMBER, run_id: str = RUN, days: float = 1.0, **changes: Any
) -> bytes:
    until_s = SystemClock().now_s() + days * DAY_S
    made = seal_invitation(voucher, run_id, node.node_id, until_s)
    return Credential(invitation=replace(made, **changes)).to_bytes()


def work(node: Identity, run_id: str = RUN, bits: int = BITS, epochs_ago: int = 0) -> bytes:
    epoch = epoch_at(SystemClock().now_s()) - epochs_ago
    return Credential(work=find_work(run_id, node.node_id, epoch, bits, 0, lambda nonce: True)).to_bytes()


def wrong_work(node: Identity) -> bytes:
    """A nonce that is not good for this node."""
    rule, epoch, nonce = rule_of("work"), epoch_at(SystemClock().now_s()), 0
    while rule.admits(node.node_id, data := Credential(work=WorkProof(epoch=epoch, nonce=nonce)).to_bytes()):
        nonce += 1
    return data
