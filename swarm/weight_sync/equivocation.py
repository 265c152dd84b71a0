"""Equivocation of a lineage's owner: two signed manifests that give one step of one branch different weights.

Invariant: no honest owner can be accused. Each start or rewind of a trainer begins a higher `Manifest.branch`, and
within a branch it signs a step once; so two manifests of one branch and step with different weights prove a lie, from
any sender, since both carry the owner's signature. Every table is bounded.
"""

import base64
import binascii
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarm.flow import BoundedTable
from swarm.process import write_json
from swarm.types import JsonDict, NodeId, SealedManifest, short
from swarm.weights.manifest import Manifest
from swarm.weights.payload import Unusable
from swarm.weights.store import WeightStore

logger = logging.getLogger(__name__)

MAX_WITNESSED: Final = 256  # steps of a lineage with a manifest as evidence
MAX_WITNESSED_BYTES: Final = 16 * 2**20
MAX_PROOFS: Final = 16  # lineages
FILE: Final = "equivocation.json"  # in the node's directory


@dataclass(frozen=True, kw_only=True, slots=True)
class EquivocationProof:
    """Two manifests that contradict each other, signed by their owner."""

    policy_id: NodeId
    branch: int
    step: int
    manifests: tuple[SealedManifest, SealedManifest]


class EquivocationWitness:
    """The first manifest of each branch and step of a lineage; beyond MAX_WITNESSED or its bytes, the oldest go."""

    def __init__(self) -> None:
        self._seen = BoundedTable[tuple[int, int], tuple[Manifest, SealedManifest]](MAX_WITNESSED)  # by branch and step
        self._num_bytes = 0

    def observe(self, manifest: Manifest, sealed: SealedManifest) -> EquivocationProof | None:
        """Records a manifest with a valid signature; returns a proof if it contradicts an earlier one, else None.

        A manifest without a branch (release 0.1.0) is ignored.
        """
        if not manifest.branch:
            return None
        key = manifest.branch, manifest.version.step
        seen = self._seen.get(key)
        if seen is None:
            self._remember(key, manifest, sealed)
            return None
        return proof_of(seen, (manifest, sealed))

    def contradicts(self, step: int, digest: bytes) -> bool:
        """True if `digest` differs from all weights seen at that step: a hint, no proof. False if none was seen."""
        seen = [manifest.version.digest for (_, at), (manifest, _) in self._seen.items() if at == step]
        return bool(digest) and bool(seen) and digest not in seen

    def _remember(self, key: tuple[int, int], manifest: Manifest, sealed: SealedManifest) -> None:
        if len(self._seen) >= MAX_WITNESSED:
            self._forget_oldest()
        self._seen[key] = manifest, sealed
        self._num_bytes += len(sealed.body)
        while self._num_bytes > MAX_WITNESSED_BYTES and len(self._seen) > 1:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, sealed = self._seen.pop(next(iter(self._seen)))
        self._num_bytes -= len(sealed.body)


def proof_of(
    first: tuple[Manifest, SealedManifest], second: tuple[Manifest, SealedManifest]
) -> EquivocationProof | None:
    """The proof that two opened manifests contradict each other, or None."""
    one, other = first[0], second[0]
    is_same_step = (one.branch, one.version.step) == (other.branch, other.version.step)
    is_same_lineage = one.version.policy_id == other.version.policy_id
    if not one.branch or not is_same_step or not is_same_lineage or one.version.digest == other.version.digest:
        return None
    return EquivocationProof(
        policy_id=one.version.policy_id, branch=one.branch, step=one.version.step, manifests=(first[1], second[1])
    )


# --- on disk -------------------------------------------------------------------------------------


def save_proof(directory: Path, proof: EquivocationProof) -> None:
    """Stores a proof (blocking), so that a restart does not follow the owner again; a failed write is only logged."""
    manifests = [
        {"body": _text(each.body), "public_key": _text(each.public_key), "signature": _text(each.signature)}
        for each in proof.manifests
    ]
    try:
        write_json(directory / FILE, {"policy": proof.policy_id, "manifests": manifests}, is_durable=True)
    except OSError as error:
        logger.error("the proof against a trainer could not be written", extra={"error": str(error)})


def load_proof(directory: Path, store: WeightStore) -> EquivocationProof | None:
    """The stored proof (blocking), verified like one from a peer; None if there is none or it does not hold."""
    try:
        data = json.loads((directory / FILE).read_text(encoding="utf-8"))
        opened = [_opened(each, store) for each in data["manifests"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, binascii.Error) as error:
        logger.error("the proof against a trainer cannot be read", extra={"error": str(error)})
        return None
    whole = [each for each in opened if each is not None]
    return proof_of(whole[0], whole[1]) if len(whole) == 2 else None


def _opened(data: JsonDict, store: WeightStore) -> tuple[Manifest, SealedManifest] | None:
    body, public_key, signature = (base64.b64decode(data[name]) for name in ("body", "public_key", "signature"))
    sealed = SealedManifest(body=body, public_key=public_key, signature=signature)
    manifest = store.open(sealed)
    if isinstance(manifest, Unusable):
        logger.error("a proof does not hold", extra={"detail": manifest.detail, "manifest": short(sealed.digest)})
        return None
    return manifest, sealed


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
