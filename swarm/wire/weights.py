"""Weight sync messages: sealed manifests, credit, requests to watch a lineage, and digests of chunks.

Invariant: values from a message have the right form and are within bounds, whichever node sent it. Signature and
content of a manifest are checked by `swarm.weights.manifest.open_manifest`.
"""

from collections.abc import Iterable
from typing import Final

from swarm.errors import TooLarge
from swarm.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES
from swarm.types import Credit, Digest, RefusalReason, SealedManifest
from swarm.wire.rollout_groups import MAX_NAME_CHARS, MAX_STEP, Malformed
from swarm.wire.v1 import exchange_service_pb2 as pb
from swarm.wire.v1 import policy_pb2

# Between nodes: 32 bytes per chunk, enough for a full version of about 120 GiB, and within a gRPC message.
MAX_MANIFEST_BYTES: Final = 4 * 2**20
MAX_LOCAL_MANIFEST_BYTES: Final = 16 * 2**20  # within a node
MAX_PUBLISHED_MANIFESTS: Final = 16  # of one version
MAX_CHUNK_BYTES: Final = 2**20
MAX_WINDOW: Final = 2**16  # groups, most credit that one watcher may ask for
DIGEST_BYTES: Final = 32


def _malformed(detail: str) -> Malformed:
    return Malformed(RefusalReason.MALFORMED, detail)


# --- manifests ---------------------------------------------------------------------------------


def manifest_to_message(sealed: SealedManifest, max_bytes: int = MAX_MANIFEST_BYTES) -> policy_pb2.SealedManifest:
    """Converts a manifest to its message. Raises TooLarge for a body above `max_bytes`, which receivers refuse."""
    _require_size(sealed.body, max_bytes)
    return policy_pb2.SealedManifest(public_key=sealed.public_key, signature=sealed.signature, body=sealed.body)


def manifest_from_message(message: policy_pb2.SealedManifest, max_bytes: int = MAX_MANIFEST_BYTES) -> SealedManifest:
    """Reads a manifest from its message, unopened: checks only sizes. Raises Malformed if a size is wrong."""
    form = (len(message.public_key), len(message.signature))
    if form != (PUBLIC_KEY_BYTES, SIGNATURE_BYTES):
        raise _malformed(f"key and signature of {form} bytes, expected (32, 64)")
    if not 0 < len(message.body) <= max_bytes:
        raise Malformed(RefusalReason.TOO_LARGE, f"manifest of {len(message.body)} bytes, expected 1 to {max_bytes}")
    return SealedManifest(body=message.body, public_key=message.public_key, signature=message.signature)


def bounded_bodies(bodies: Iterable[bytes]) -> list[bytes]:
    """Checks and returns the bodies of unsigned manifests, for another process of the node.

    Raises:
        TooLarge: there are more than MAX_PUBLISHED_MANIFESTS, or one exceeds MAX_LOCAL_MANIFEST_BYTES.
    """
    checked = list(bodies)
    if len(checked) > MAX_PUBLISHED_MANIFESTS:
        raise TooLarge(f"{len(checked)} manifests of one version exceed {MAX_PUBLISHED_MANIFESTS}")
    for body in checked:
        _require_size(body, MAX_LOCAL_MANIFEST_BYTES)
    return checked


def _require_size(body: bytes, max_bytes: int) -> None:
    if len(body) > max_bytes:
        raise TooLarge(f"manifest of {len(body)} bytes exceeds {max_bytes}")


# --- watching a lineage ------------------------------------------------------------------------


def watch_to_message(policy_id: str, window: int) -> pb.WatchRequest:
    """Builds a request to watch a lineage, with the window clamped to [0, MAX_WINDOW]."""
    return pb.WatchRequest(policy_id=policy_id, window=max(0, min(window, MAX_WINDOW)))


def watch_from_message(message: pb.WatchRequest) -> tuple[str, int]:
    """Reads lineage and window from a request to watch. Raises Malformed if either breaks a bound."""
    if not 0 < len(message.policy_id) <= MAX_NAME_CHARS:
        raise _malformed(f"policy id of {len(message.policy_id)} characters, expected 1 to {MAX_NAME_CHARS}")
    if message.window > MAX_WINDOW:
        raise _malformed(f"window of {message.window} groups exceeds {MAX_WINDOW}")
    return message.policy_id, message.window


def watched_to_message(item: SealedManifest | Credit) -> pb.WatchResponse:
    """Converts an item of a watch to its message. Raises TooLarge for a manifest above MAX_MANIFEST_BYTES."""
    if isinstance(item, Credit):
        return pb.WatchResponse(credit=pb.Credit(head_step=item.head_step, granted=item.granted))
    return pb.WatchResponse(manifest=manifest_to_message(item))


def watched_from_message(message: pb.WatchResponse) -> SealedManifest | Credit:
    """Reads an item of a watch from its message; a manifest is not opened. Raises Malformed for any other item."""
    kind = message.WhichOneof("item")
    if kind == "manifest":
        return manifest_from_message(message.manifest)
    if kind != "credit":
        raise _malformed("neither a manifest nor credit")
    credit = message.credit
    if max(credit.head_step, credit.granted) >= MAX_STEP:
        raise _malformed(f"credit of {credit.granted} at step {credit.head_step} exceeds {MAX_STEP}")
    return Credit(head_step=credit.head_step, granted=credit.granted)


# --- chunks ------------------------------------------------------------------------------------


def require_digest(digest: bytes) -> Digest:
    """Checks and returns a digest. Raises Malformed unless it has DIGEST_BYTES bytes."""
    if len(digest) != DIGEST_BYTES:
        raise _malformed(f"digest of {len(digest)} bytes, expected {DIGEST_BYTES}")
    return digest
