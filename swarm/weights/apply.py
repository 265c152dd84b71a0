"""Weight updates of an engine: stages and verifies a patch chain, then loads the new version, all or nothing.

Invariant: the engine is touched only with weights whose digest is the announced version's, and what this module holds
is always what the engine serves.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from swarm.errors import ConfigError, Unavailable, WeightsRefused
from swarm.identity import node_id_of
from swarm.interfaces import Generator
from swarm.types import ApplyReport, Digest, PatchChain, PolicyVersion
from swarm.weights.manifest import Limits, Manifest, open_manifest
from swarm.weights.tensors import to_torch
from swarm.weights.unusable import Unusable
from swarm.weights.verify import VerifiedVersion, stage

logger = logging.getLogger(__name__)

Chunk = Callable[[Digest], bytes | None]


@dataclass(frozen=True, slots=True)
class _Staged:
    held: VerifiedVersion
    manifest: Manifest  # of the last patch
    num_bytes: int  # manifests and payloads


class Applier:
    """Applies patch chains to one engine that follows a lineage.

    Args:
        engine: loads what was verified; it may refuse a version.
        start: the weights it was started with; the version's policy id is not compared until a chain is applied.
        chunk: reads a chunk from the node's weight store, None where it is missing.
        limits: what this node accepts.
        in_flight: unfinished sequences continue with the new weights.
        keep: called with new weights that the engine loaded (blocking); raises nothing.

    Example:
        report = applier.apply(await exchange.next_update(applier.version, wait=True))
    """

    def __init__(
        self,
        engine: Generator,
        start: VerifiedVersion,
        chunk: Chunk,
        *,
        limits: Limits | None = None,
        in_flight: bool = False,
        keep: Callable[[VerifiedVersion], None] = lambda held: None,
    ) -> None:
        self._engine = engine
        self._held = start
        self._chunk = chunk
        self._limits = limits or Limits()
        self._in_flight = in_flight
        self._keep = keep

    @property
    def version(self) -> PolicyVersion:
        """What the engine serves."""
        return self._held.version

    def target(self, chain: PatchChain) -> PolicyVersion:
        """The version a chain leads to; the one served now where its last manifest cannot be opened."""
        manifest = open_manifest(chain[-1], node_id_of(chain[-1].public_key), self._limits)
        return self.version if isinstance(manifest, Unusable) else manifest.version

    def apply(self, chain: PatchChain) -> ApplyReport:
        """Stages the last version of a chain and loads it into the engine (blocking).

        Args:
            chain: from what is held, or from nothing, to a version; from `LocalExchange.next_update`.

        Returns:
            A report; where it has an error the engine serves what it served before.
        """
        try:
            return self._apply(chain)
        except (WeightsRefused, ConfigError, Unavailable) as error:
            return ApplyReport(version=self.target(chain), error=str(error))
        except Exception as error:  # out of memory, a device error, hostile weights: generation goes on
            target = self.target(chain)
            logger.exception("could not load new weights; the old version serves on", extra={"step": target.step})
            return ApplyReport(version=target, error=f"{type(error).__name__}: {error}")

    def _apply(self, chain: PatchChain) -> ApplyReport:
        began_s = time.monotonic()
        staged = self._stage(chain)
        staged_s = time.monotonic()
        if isinstance(staged, Unusable):
            return ApplyReport(version=self.target(chain), error=f"{staged.reason}: {staged.detail}", is_unusable=True)
        version = staged.held.version
        tensors = {name: to_torch(tensor) for name, tensor in staged.held.weights.items()}
        loaded = self._engine.load(version, tensors, canaries=staged.manifest.canaries, in_flight=self._in_flight)
        seconds = {"stage": staged_s - began_s, "load": time.monotonic() - staged_s, "pause": loaded.pause_s}
        is_new, self._held = staged.held.weights is not self._held.weights, staged.held
        if is_new:
            self._keep(staged.held)
        return ApplyReport(
            version=version, num_bytes=staged.num_bytes, seconds=seconds, mismatch_nats=loaded.mismatch_nats
        )

    def _stage(self, chain: PatchChain) -> "_Staged | Unusable":
        """Applies the patches one after the other, verifying each; what the engine runs on is not touched."""
        held, manifest, num_bytes = self._held, None, 0
        for sealed in chain:
            manifest = open_manifest(sealed, node_id_of(sealed.public_key), self._limits)
            if isinstance(manifest, Unusable):
                return manifest
            num_bytes += len(sealed.body) + manifest.payload_bytes
            if manifest.version.digest == held.version.digest:
                held, num_bytes = replace(held, version=manifest.version), num_bytes - manifest.payload_bytes
                continue
            if manifest.base is not None and manifest.base.digest == held.version.digest:
                held = replace(held, version=manifest.base)  # equal weights are the same version
            staged = stage(manifest, self._chunks(manifest), held)
            if isinstance(staged, Unusable):
                return staged
            held = staged
        assert manifest is not None and not isinstance(manifest, Unusable), "a chain has at least one patch"
        return _Staged(held, manifest, num_bytes)

    def _chunks(self, manifest: Manifest) -> Iterator[bytes]:
        for digest in manifest.chunks:
            chunk = self._chunk(digest)
            if chunk is None:
                return  # stage says which one is missing
            yield chunk
