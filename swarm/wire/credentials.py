"""Credentials for entering a run: an invitation that a member signed, or a proof of work.

Invariant: a credential is valid for one key in one run and for a bounded time; checks of foreign bytes never raise.
"""

import base64
import binascii
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from swarm.errors import ConfigError
from swarm.identity import (
    DOMAIN_INVITATION,
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    is_hex_digest,
    node_id_of,
    verify,
)
from swarm.types import NodeId
from swarm.wire.v1 import credential_pb2 as pb

MAX_CREDENTIAL_BYTES: Final = 160
INVITATION_PREFIX: Final = "invitation:"
DAY_S: Final = 86_400.0
EPOCH_S: Final = 30 * DAY_S  # a proof of work is valid in the epoch of its start and in the next one
MAX_TIME_S: Final = 2**40
_EPOCH_SLACK_S: Final = 3600.0  # clocks differ
_NONCE_BITS: Final = 64

# scrypt with 1 MiB of memory: about 2 ms a try on a laptop core, which a verifier can spend on a stranger.
_SCRYPT_N: Final = 2**10
_SCRYPT_R: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Invitation:
    """A voucher's signature that admits one node to one run; it covers both ids, which are not stored here."""

    public_key: bytes  # of the voucher, 32 bytes
    expires_at_s: int  # wall clock
    signature: bytes  # 64 bytes

    @property
    def voucher(self) -> NodeId:
        """Id of the member that answers for the invited node."""
        return node_id_of(self.public_key)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkProof:
    """A nonce that costs minutes to find and one try to check."""

    epoch: int  # since 1970, EPOCH_S each
    nonce: int  # 64 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Credential:
    """An invitation, a proof of work, both or neither."""

    invitation: Invitation | None = None
    work: WorkProof | None = None

    def to_bytes(self) -> bytes:
        """Serialises the credential; b"" if it has neither invitation nor proof of work."""
        message = pb.Credential()
        if self.invitation is not None:
            given = self.invitation
            message.invitation.public_key = given.public_key
            message.invitation.expires_at_s = given.expires_at_s
            message.invitation.signature = given.signature
        if self.work is not None:
            message.work.epoch, message.work.nonce = self.work.epoch, self.work.nonce
        return message.SerializeToString(deterministic=True)


def credential_from_bytes(data: bytes) -> Credential | None:
    """Parses a credential from any node; None if `data` is malformed or breaks a bound."""
    if len(data) > MAX_CREDENTIAL_BYTES:
        return None
    try:
        message = pb.Credential.FromString(data)
    except DecodeError:
        return None
    invitation = work = None
    if message.HasField("invitation"):
        given = message.invitation
        if len(given.public_key) != PUBLIC_KEY_BYTES or len(given.signature) != SIGNATURE_BYTES:
            return None
        if given.expires_at_s > MAX_TIME_S:
            return None
        invitation = Invitation(public_key=given.public_key, expires_at_s=given.expires_at_s, signature=given.signature)
    if message.HasField("work"):
        work = WorkProof(epoch=message.work.epoch, nonce=message.work.nonce)
    return Credential(invitation=invitation, work=work)


# --- invitations ----------------------------------------------------------------------------------


def seal_invitation(voucher: Identity, run_id: str, node_id: NodeId, expires_at_s: float) -> Invitation:
    """Signs an invitation of the node `node_id` by `voucher`. Raises ConfigError if `node_id` is no node id."""
    if not is_hex_digest(node_id):
        raise ConfigError(f"{node_id[:80]!a} is no node id of 64 hex digits; `swarm-node id` prints one's own")
    expires = int(expires_at_s)
    signed = _invitation_message(run_id, node_id, voucher.node_id, expires)
    return Invitation(
        public_key=voucher.public_key, expires_at_s=expires, signature=voucher.sign(DOMAIN_INVITATION, signed)
    )


def invite(voucher: Identity, run_id: str, node_id: NodeId, days: float, now_s: float) -> str:
    """The text of an invitation that ends after `days`, as the commands print it. Raises ConfigError for no node id."""
    return invitation_to_text(seal_invitation(voucher, run_id, node_id.strip().lower(), now_s + days * DAY_S))


def fits_invitation(invitation: Invitation, run_id: str, node_id: NodeId) -> bool:
    """True if the voucher signed the invitation for this node and run; expiry and the voucher's right are unchecked."""
    signed = _invitation_message(run_id, node_id, invitation.voucher, invitation.expires_at_s)
    return verify(invitation.public_key, DOMAIN_INVITATION, signed, invitation.signature)


def _invitation_message(run_id: str, node_id: NodeId, voucher: NodeId, expires_at_s: int) -> bytes:
    """The signed bytes: expiry (8 bytes), node id and voucher (32 bytes each), then the run."""
    return expires_at_s.to_bytes(8, "big") + bytes.fromhex(node_id) + bytes.fromhex(voucher) + run_id.encode()


def invitation_to_text(invitation: Invitation) -> str:
    """Encodes an invitation as one word, for an e-mail or a chat."""
    data = Credential(invitation=invitation).to_bytes()
    return INVITATION_PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("=")


def invitation_from_text(text: str) -> Invitation:
    """Decodes an invitation from its text, with or without the prefix. Raises ConfigError for any other text."""
    body = text.strip().removeprefix(INVITATION_PREFIX)
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        data = b""
    credential = credential_from_bytes(data)
    if credential is None or credential.invitation is None:
        raise ConfigError(
            f"{text.strip()[:40]!a} is no invitation, or not all of it; copy the whole line of `swarm-node invite`"
        )
    return credential.invitation


# --- proof of work --------------------------------------------------------------------------------


def epoch_at(now_s: float) -> int:
    """The epoch of a wall-clock time, for a proof of work that begins at that time."""
    return int(now_s // EPOCH_S)


def is_current(work: WorkProof, now_s: float) -> bool:
    """True if the proof's epoch is the current one or the one before, with an hour of slack at both ends."""
    return work.epoch * EPOCH_S - _EPOCH_SLACK_S <= now_s < work_ends_s(work)


def work_ends_s(work: WorkProof) -> float:
    """Wall clock at which a proof expires."""
    return (work.epoch + 2) * EPOCH_S + _EPOCH_SLACK_S


def fits_work(work: WorkProof, run_id: str, node_id: NodeId, bits: int) -> bool:
    """True if the proof is valid for this node and run. Costs one call of scrypt, so check the epoch first."""
    digest = hashlib.scrypt(
        work.nonce.to_bytes(_NONCE_BITS // 8, "big"),
        salt=b"swarm.v1.work\0" + work.epoch.to_bytes(4, "big") + bytes.fromhex(node_id) + run_id.encode(),
        n=_SCRYPT_N,
        r=_SCRYPT_R,
        p=1,
        dklen=8,
    )
    return int.from_bytes(digest, "big") >> (64 - bits) == 0


def find_work(
    run_id: str, node_id: NodeId, epoch: int, bits: int, first: int, go_on: Callable[[int], bool]
) -> WorkProof | None:
    """Searches for a proof of work (blocking, for minutes; other threads run); None if `go_on` stopped the search.

    Args:
        first: the nonce to start with; 0, or the nonce at which an earlier search stopped.
        go_on: called with each nonce before it is tried; False stops the search.
    """
    nonce = first
    while go_on(nonce):
        work = WorkProof(epoch=epoch, nonce=nonce)
        if fits_work(work, run_id, node_id, bits):
            return work
        nonce += 1
    return None
