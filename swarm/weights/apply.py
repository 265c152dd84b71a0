"""Takes an engine from the version it serves to the next one: staged and verified first, then all or nothing.

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
from swarm.weights.publish import Held, stage
from swarm.weights.refuse import Unusable
from swarm.weights.tensors import to_torch

logger = logging.getLogger(__name__)

Chunk = Callable[[Digest], bytes | None]


@dataclass(frozen=True, slots=True)
class _Staged:
    held: Held
    manifest: Manifest  # of the last leg
    num_bytes: int


class Applier:
    """The weights behind one engine that follows a lineage.

    Args:
        engine: loads what was verified; a version it refuses it does not serve.
        start: the weights it was started with; the version's policy id is not compared until a way is taken.
        chunk: a chunk of the node's weight store, None where it lacks it.
        limits: what this node accepts.
        in_flight: sequences in the making go on with new weights.
        keep: told of other weights that the engine took (blocking); raises nothing.

    Example:
        report = applier.apply(await exchange.next_update(applier.version, wait=True))
    """

    def __init__(
        self,
        engine: Generator,
        start: Held,
        chunk: Chunk,
        *,
        limits: Limits | None = None,
        in_flight: bool = False,
        keep: Callable[[Held], None] = lambda held: None,
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

    def target(self, way: PatchChain) -> PolicyVersion:
        """Where a way leads; the version served now where its last manifest cannot be read."""
        manifest = open_manifest(way[-1], node_id_of(way[-1].public_key), self._limits)
        return self.version if isinstance(manifest, Unusable) else manifest.version

    def apply(self, way: PatchChain) -> ApplyReport:
        """Stages the last version of a way and has the engine take it (blocking).

        Args:
            way: manifests from what is held, or from nothing, to a version; from `LocalExchange.next_update`.

        Returns:
            A report with an error where anything was wrong: then the engine serves what it served before.
        """
        try:
            return self._apply(way)
        except (WeightsRefused, ConfigError, Unavailable) as error:
            return ApplyReport(version=self.target(way), error=str(error))
        except Exception as error:  # no memory, or whatever a device or a trainer comes up with: generation goes on
            target = self.target(way)
            logger.exception("a version could not be taken", extra={"step": target.step})
            return ApplyReport(version=target, error=f"{type(error).__name__}: {error}")

    def _apply(self, way: PatchChain) -> ApplyReport:
        began_s = time.monotonic()
        staged = self._stage(way)
        staged_s = time.monotonic()
        if isinstance(staged, Unusable):
            return ApplyReport(version=self.target(way), error=f"{staged.reason}: {staged.detail}", is_unusable=True)
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

    def _stage(self, way: PatchChain) -> "_Staged | Unusable":
        """Follows the legs, verifying each; what the engine runs on is not touched."""
        held, manifest, num_bytes = self._held, None, 0
        for sealed in way:
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
        assert manifest is not None and not isinstance(manifest, Unusable), "a way has at least one leg"
        return _Staged(held, manifest, num_bytes)

    def _chunks(self, manifest: Manifest) -> Iterator[bytes]:
        for digest in manifest.chunks:
            chunk = self._chunk(digest)
            if chunk is None:
                return  # stage says which one is missing
            yield chunk
