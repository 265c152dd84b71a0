"""Turns a version that an engine took into the chunks of its payload in full, without fetching any.

Invariant: only chunks that a signed manifest names are written, so a store knows them from fetched ones by nothing.
"""

import logging

from swarm.weights.chunks import chunk_digest, chunked
from swarm.weights.codec import encode
from swarm.weights.manifest import Manifest
from swarm.weights.publish import Held
from swarm.weights.store import WeightStore

logger = logging.getLogger(__name__)


def keep_anchor(store: WeightStore, held: Held) -> None:
    """Writes what is missing of a version in full, where its manifest is in the store (blocking).

    Whoever took it by patches can then start from nothing again, and serve it to those who join. On a disk with little
    room nothing is written: the next versions need it more.
    """
    try:
        for manifest, _ in store.manifests(held.version.policy_id):
            if manifest.base is None and manifest.version == held.version:
                _fill(store, manifest, held)
    except OSError as error:
        logger.error("an anchor was not kept", extra={"step": held.version.step, "error": str(error)})


def _fill(store: WeightStore, manifest: Manifest, held: Held) -> None:
    missing = set(store.missing(manifest.chunks))
    if not missing or store.free_bytes < 2 * manifest.payload_bytes:
        return
    for chunk in chunked(encode(manifest.codec, held.weights, None)):
        digest = chunk_digest(chunk)
        if digest in missing:
            store.put_chunk(digest, chunk)
