"""Adverts: a node's record in the directory as signed bytes, with every check that needs no node state.

Invariant: `open_advert` returns an advert only with a valid signature, and never raises: hostile bytes become None.
"""

import math
import re
from typing import Final

from google.protobuf.message import DecodeError

from swarm.addresses import split_relayed
from swarm.errors import TooLarge
from swarm.identity import DOMAIN_ADVERT, Identity, Verify, is_hex_digest, node_id_of, verify
from swarm.types import RUN_ID_PATTERN, Advert, Correction, Cursor, RefusalReason, Role
from swarm.wire.rollout_groups import (
    MAX_STEP,
    MAX_TASK_ID,
    Malformed,
    decimal,
    version_from_message,
    version_to_message,
)
from swarm.wire.v1 import advert_pb2

MAX_ADVERT_BYTES: Final = 768  # 330 to 400 without a credential, 117 with both kinds of one, 88 for each relay
MAX_ADVERT_TTL_S: Final = 300.0
MAX_ENDPOINTS: Final = 4
MAX_RESERVATIONS: Final = 2**20
MAX_EPOCH_CHARS: Final = 64
_MAX_REWARD: Final = 1e6

_ENDPOINT: Final = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,100}):[0-9]{1,5}")

ROLE_NUMBERS: Final = {
    Role.TRAINER: advert_pb2.ROLE_TRAINER,
    Role.GENERATOR: advert_pb2.ROLE_GENERATOR,
    Role.RELAY: advert_pb2.ROLE_RELAY,
}
ROLES_BY_NUMBER: Final = {number: role for role, number in ROLE_NUMBERS.items()}
_CORRECTIONS: Final = {
    Correction.EXACT: advert_pb2.CORRECTION_EXACT,
    Correction.NO_LOGPROBS: advert_pb2.CORRECTION_NO_LOGPROBS,
    Correction.TEXT_ONLY: advert_pb2.CORRECTION_TEXT_ONLY,
}
_CORRECTIONS_BACK: Final = {number: correction for correction, number in _CORRECTIONS.items()}


def cursor_to_message(cursor: Cursor) -> advert_pb2.Cursor:
    """Converts a cursor to its protobuf message."""
    return advert_pb2.Cursor(epoch=cursor.epoch, sequence=cursor.sequence)


def cursor_from_message(message: advert_pb2.Cursor) -> Cursor:
    """Reads a cursor from its protobuf message. Raises Malformed if the cursor breaks a bound."""
    if len(message.epoch) > MAX_EPOCH_CHARS or message.sequence >= MAX_TASK_ID:
        raise Malformed(RefusalReason.MALFORMED, f"cursor beyond {MAX_EPOCH_CHARS} characters or 2**63")
    return Cursor(epoch=message.epoch, sequence=message.sequence)


def advert_to_message(advert: Advert) -> advert_pb2.Advert:
    """Converts an advert to its protobuf message, without the node id, which follows from the key."""
    return advert_pb2.Advert(
        run_id=advert.run_id,
        endpoints=advert.endpoints,
        roles=[ROLE_NUMBERS[role] for role in advert.roles],
        tokenizer_digest=advert.tokenizer_digest,
        head=version_to_message(advert.head),
        oldest_step=advert.oldest_step,
        num_groups=advert.num_groups,
        reward_mean=advert.reward_mean,
        reward_std=advert.reward_std,
        correction=_CORRECTIONS[advert.correction],
        held_bytes=advert.held_bytes,
        cursor=cursor_to_message(advert.cursor),
        expires_at_s=advert.expires_at_s,
        credential=advert.credential,
        equivocator=bytes.fromhex(advert.equivocator),
        relay_reservations=advert.relay_reservations,
    )


def advert_from_message(message: advert_pb2.Advert, node_id: str) -> Advert | None:
    """Reads an advert from its protobuf message, without a check of its expiry; None if it breaks a bound."""
    floats = (message.reward_mean, message.reward_std, message.expires_at_s)
    is_whole = (
        re.fullmatch(RUN_ID_PATTERN, message.run_id) is not None
        and len(message.endpoints) <= MAX_ENDPOINTS
        and all(is_location(endpoint) for endpoint in message.endpoints)
        and message.relay_reservations < MAX_RESERVATIONS
        and len(message.roles) == len(set(message.roles) & set(ROLES_BY_NUMBER))
        and len(message.tokenizer_digest) in (0, 32)
        and len(message.equivocator) in (0, 8)
        and message.oldest_step < MAX_STEP
        and message.held_bytes < MAX_TASK_ID
        and message.correction in _CORRECTIONS_BACK
        and all(map(math.isfinite, floats))
        and max(abs(message.reward_mean), abs(message.reward_std)) <= _MAX_REWARD
    )
    if not is_whole:
        return None
    try:
        head, cursor = version_from_message(message.head), cursor_from_message(message.cursor)
    except Malformed:
        return None
    return Advert(
        node_id=node_id,
        run_id=message.run_id,
        endpoints=tuple(message.endpoints),
        roles=tuple(ROLES_BY_NUMBER[role] for role in message.roles),
        tokenizer_digest=message.tokenizer_digest,
        head=head,
        oldest_step=message.oldest_step,
        num_groups=message.num_groups,
        reward_mean=decimal(message.reward_mean),
        reward_std=decimal(message.reward_std),
        correction=_CORRECTIONS_BACK[message.correction],
        held_bytes=message.held_bytes,
        cursor=cursor,
        expires_at_s=message.expires_at_s,
        credential=message.credential,
        equivocator=message.equivocator.hex(),
        relay_reservations=message.relay_reservations,
    )


def is_endpoint(text: str) -> bool:
    """True for host:port with a port from 1 to 65535 and a host of characters that occur in names and addresses."""
    return _ENDPOINT.fullmatch(text) is not None and 0 < int(text.rpartition(":")[2]) < 65536


def is_location(text: str) -> bool:
    """True for the endpoint of a node, or the endpoint of its relay followed by the relay's node id."""
    endpoint, relay_id = split_relayed(text)
    return is_endpoint(endpoint) and (endpoint == text or is_hex_digest(relay_id))


def seal_advert(advert: Advert, identity: Identity) -> bytes:
    """Signs our advert and returns the bytes for the directory.

    Raises:
        ValueError: the advert is another node's.
        TooLarge: the signed bytes exceed MAX_ADVERT_BYTES.
    """
    if advert.node_id != identity.node_id:
        raise ValueError(f"advert of {advert.node_id[:8]} cannot be sealed by {identity.node_id[:8]}")
    body = advert_to_message(advert).SerializeToString()
    signature = identity.sign(DOMAIN_ADVERT, body)
    data = advert_pb2.SignedAdvert(public_key=identity.public_key, signature=signature, body=body).SerializeToString()
    if len(data) > MAX_ADVERT_BYTES:
        raise TooLarge(f"advert of {len(data)} bytes exceeds {MAX_ADVERT_BYTES}: shorten endpoints {advert.endpoints}")
    return data


def author_of(data: bytes) -> tuple[bytes, float] | None:
    """Public key and expiry (wall clock) that a signed advert claims, unverified; None if `data` is no advert."""
    if len(data) > MAX_ADVERT_BYTES:
        return None
    try:
        signed = advert_pb2.SignedAdvert.FromString(data)
        return signed.public_key, advert_pb2.Advert.FromString(signed.body).expires_at_s
    except DecodeError:
        return None


def open_advert(data: bytes, now_s: float, verify: Verify = verify) -> Advert | None:
    """The verified advert in signed bytes from the directory; None if a check fails.

    Args:
        data: the signed bytes, from anywhere.
        now_s: wall clock; the advert must expire within MAX_ADVERT_TTL_S after it.
        verify: checks the signature; simulations replace it.
    """
    if len(data) > MAX_ADVERT_BYTES:
        return None
    try:
        signed = advert_pb2.SignedAdvert.FromString(data)
        if not verify(signed.public_key, DOMAIN_ADVERT, signed.body, signed.signature):
            return None
        message = advert_pb2.Advert.FromString(signed.body)
    except DecodeError:
        return None
    if not now_s < message.expires_at_s <= now_s + MAX_ADVERT_TTL_S:
        return None
    return advert_from_message(message, node_id_of(signed.public_key))
