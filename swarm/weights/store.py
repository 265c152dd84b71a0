"""Weight store: chunks and signed manifests on disk, by digest, shared by the agent and its workers.

Invariant: a file is complete or absent, and content read from the store hashes to the file's name; a file found damaged
counts as missing and is removed. A worker writes every chunk before the agent gets the manifest that names it; only the
agent adds and drops manifests.
"""

import contextlib
import fcntl
import itertools
import logging
import math
import os
import shutil
import threading
from collections.abc import Collection, Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from swarm.clock import Clock, SystemClock
from swarm.errors import StorageFull, is_disk_full
from swarm.identity import node_id_of
from swarm.interfaces import BeforeWrite
from swarm.process import sync_path
from swarm.types import Digest, NodeId, SealedManifest, short
from swarm.weights.manifest import Limits, Manifest, open_manifest
from swarm.weights.patch_graph import Patch, choose_kept
from swarm.weights.payload import CHUNK_BYTES, Unusable, chunk_digest

logger = logging.getLogger(__name__)

GRACE_S: Final = 3600.0  # of chunks without a manifest: their version is being published or fetched
_DRAFT: Final = ".draft-"
_KEY_BYTES, _SIGNATURE_BYTES = 32, 64


class WeightStore:
    """A node's weights on disk. Blocking and thread-safe: call it in threads.

    Args:
        directory: holds this store alone; created. Several processes may use it at once.
        max_bytes: budget that `prune` enforces; a manifest with a larger payload is unusable here.
        clock: wall clock of the files' ages.
        before_write: called with the number of bytes before each write; a test raises OSError(ENOSPC) in it.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        limits: Limits | None = None,
        *,
        clock: Clock | None = None,
        before_write: BeforeWrite | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        limits = limits or Limits()
        self.limits = replace(limits, payload_bytes=min(limits.payload_bytes, max_bytes))
        self._clock = clock or SystemClock()
        self._before_write = before_write
        self._chunks = directory / "chunks"
        self._manifests = directory / "manifests"
        for path in (self._chunks, self._manifests):
            path.mkdir(parents=True, exist_ok=True)
        self._lock_path = directory / "lock"
        self._lock_path.touch()
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._opened: dict[str, tuple[Manifest, SealedManifest]] = {}  # by name of the file
        self._num_bytes = sum(size for _, size, _ in _files(self._chunks))

    # --- chunks ----------------------------------------------------------------------------------

    def put_chunk(self, digest: Digest, data: bytes | memoryview) -> None:
        """Stores a chunk, durable once a manifest is added later; storing it again only renews its age.

        Raises:
            ValueError: the chunk is too long, or has another digest.
            StorageFull: the disk has no room; nothing was stored. Other OSErrors pass.
        """
        if len(data) > CHUNK_BYTES or chunk_digest(data) != digest:
            raise ValueError(f"{len(data)} bytes are not chunk {short(digest)}")
        path = self._chunks / digest.hex()
        with self._exclusive():
            if path.exists() and path.stat().st_size == len(data):  # the content is verified on reading
                self._renew_age(path)
                return
        draft = self._draft(self._chunks, data)
        with self._exclusive():
            is_new = not path.exists()
            self._put_in_place(draft, path)
            self._num_bytes += len(data) if is_new else 0

    def chunk(self, digest: Digest) -> bytes | None:
        """A stored chunk; None if it is missing, unreadable or damaged (then it is removed)."""
        path = self._chunks / digest.hex()
        try:
            changed_s = path.stat().st_mtime
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.error("cannot read a chunk of weights", extra={"chunk": short(digest), "error": str(error)})
            return None
        if chunk_digest(data) == digest:
            return data
        logger.error("removed a chunk of weights that was damaged on disk", extra={"chunk": short(digest)})
        self._delete(path, changed_s)
        return None

    def has(self, digest: Digest) -> bool:
        """True when a chunk is stored, damaged or not."""
        return (self._chunks / digest.hex()).exists()

    def missing(self, digests: Iterable[Digest]) -> list[Digest]:
        """The chunks that are not stored, each once, in order."""
        return [digest for digest in dict.fromkeys(digests) if not self.has(digest)]

    @property
    def free_bytes(self) -> int:
        """Free bytes of the disk."""
        return shutil.disk_usage(self._chunks).free

    @property
    def bytes_held(self) -> int:
        """Bytes of all chunks, as of the last `prune`, plus what this process wrote since."""
        return self._num_bytes

    # --- manifests -------------------------------------------------------------------------------

    def add_manifest(self, sealed: SealedManifest) -> Manifest | Unusable:
        """Makes a manifest and all chunks put before durable; Unusable if it does not open. Raises StorageFull."""
        manifest = self.open(sealed)
        if isinstance(manifest, Unusable):
            return manifest
        path = self._manifests / sealed.digest.hex()
        sync_path(self._chunks)
        draft = self._draft(self._manifests, b"".join((sealed.public_key, sealed.signature, sealed.body)))
        with self._exclusive():
            self._put_in_place(draft, path)
        sync_path(self._manifests)
        with self._lock:
            self._opened[path.name] = (manifest, sealed)
        return manifest

    def open(self, sealed: SealedManifest) -> Manifest | Unusable:
        """Opens a manifest of its signer's own lineage, within the limits of this store."""
        return open_manifest(sealed, node_id_of(sealed.public_key), self.limits)

    def manifests(self, policy_id: NodeId) -> list[tuple[Manifest, SealedManifest]]:
        """Manifests of a lineage, oldest version first, patches before the full version."""
        pairs = [pair for pair in self._all().values() if pair[0].version.policy_id == policy_id]
        return sorted(pairs, key=lambda pair: (pair[0].version.step, pair[0].base is None, pair[1].digest))

    def drop_manifests(self, digests: Iterable[Digest]) -> None:
        """Deletes manifests; their chunks stay until `prune`."""
        for digest in digests:
            with self._exclusive():
                (self._manifests / digest.hex()).unlink(missing_ok=True)
                self._opened.pop(digest.hex(), None)

    # --- room ------------------------------------------------------------------------------------

    def prune(self, in_force: Collection[NodeId], grace_s: float = GRACE_S) -> int:
        """Deletes manifests that `choose_kept` drops, unnamed chunks, old drafts; returns the bytes of the latter two.

        The chunks of kept manifests stay, and so do chunks younger than `grace_s` that no manifest named (pass 0 only
        while no process writes).
        """
        opened = self._all()
        written_s = {name: changed_s for name, _, changed_s in _files(self._manifests)}
        sizes = {name: size for name, size, _ in _files(self._chunks)}
        patches = [Patch(manifest=manifest, sealed=sealed) for manifest, sealed in opened.values()]
        kept = choose_kept(patches, in_force, lambda digest: sizes.get(digest.hex(), 0), self.max_bytes)
        self.drop_manifests(patch.digest for patch in patches if patch.digest not in kept)
        dropped_s: dict[str, float] = {}  # chunk -> newest write time of the dropped manifests that name it
        for name, (manifest, _) in opened.items():
            if bytes.fromhex(name) not in kept:
                for chunk in manifest.chunks:
                    dropped_s[chunk.hex()] = max(written_s.get(name, 0.0), dropped_s.get(chunk.hex(), 0.0))
        num_bytes = self._delete_unnamed(dropped_s, grace_s)
        self._count()
        return num_bytes

    def _delete_unnamed(self, dropped_s: dict[str, float], grace_s: float) -> int:
        """Deletes chunks that only dropped manifests name, chunks without a manifest for `grace_s`, and old drafts.

        Chunks of the second kind stay while a manifest cannot be read, since that manifest may name them.
        """
        opened = self._all()
        kept = {chunk.hex() for manifest, _ in opened.values() for chunk in manifest.chunks}
        is_known = all(name in opened for name, _, _ in _files(self._manifests))
        oldest_s = self._clock.now_s() - grace_s if is_known else -math.inf
        num_bytes = 0
        for name, _, changed_s in list(_files(self._chunks)):
            if name not in kept and (changed_s <= dropped_s.get(name, 0.0) or changed_s <= oldest_s):
                num_bytes += self._delete(self._chunks / name, changed_s)
        for directory in (self._chunks, self._manifests):  # drafts of a killed process
            for name, _, changed_s in list(_files(directory, drafts=True)):
                if changed_s < self._clock.now_s() - GRACE_S:
                    num_bytes += self._delete(directory / name, changed_s)
        return num_bytes

    def _count(self) -> None:
        with self._lock:  # chunks are put in place and counted under the same lock
            self._num_bytes = held = sum(size for _, size, _ in _files(self._chunks))
        if held > self.max_bytes:
            bounds = {"bytes": held, "max_bytes": self.max_bytes}
            logger.warning("weights that must be kept exceed weights.store_bytes; raise it", extra=bounds)

    def _delete(self, path: Path, changed_s: float) -> int:
        """Deletes a file unless its age was renewed; returns its size, else 0."""
        with self._exclusive(), contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if status.st_mtime == changed_s:
                path.unlink()
                return status.st_size
        return 0

    # --- inside ----------------------------------------------------------------------------------

    def _all(self) -> dict[str, tuple[Manifest, SealedManifest]]:
        """Every manifest on disk, by file name; a manifest that does not open is deleted.

        A manifest that cannot be read now (no file descriptor, the disk does not answer) is only left out.
        """
        names = {name for name, _, _ in _files(self._manifests)}
        for name in names - self._opened.keys():
            try:
                sealed = _read_sealed(self._manifests / name)
            except FileNotFoundError:
                continue  # dropped by another thread
            except OSError as error:
                logger.error("cannot read a weights manifest", extra={"manifest": name[:8], "error": str(error)})
                continue
            manifest = None if sealed is None or sealed.digest.hex() != name else self.open(sealed)
            if sealed is not None and isinstance(manifest, Manifest):
                with self._lock:
                    self._opened[name] = (manifest, sealed)
                continue
            logger.error(
                "deleted a weights manifest: damaged on disk, or over the limits", extra={"manifest": name[:8]}
            )
            (self._manifests / name).unlink(missing_ok=True)
        with self._lock:
            self._opened = {name: pair for name, pair in self._opened.items() if name in names}
            return dict(self._opened)

    def _draft(self, directory: Path, data: bytes | memoryview) -> Path:
        """Writes and syncs a draft; returns its path. Raises StorageFull."""
        draft = directory / f"{_DRAFT}{os.getpid()}-{next(self._numbers)}"
        with _remove_on_error(draft), draft.open("wb") as file:
            if self._before_write is not None:
                self._before_write(len(data))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._renew_age(draft)
        return draft

    def _put_in_place(self, draft: Path, path: Path) -> None:
        with _remove_on_error(draft):
            draft.replace(path)

    def _renew_age(self, path: Path) -> None:
        now_s = self._clock.now_s()
        os.utime(path, (now_s, now_s))

    @contextlib.contextmanager
    def _exclusive(self) -> Generator[None]:
        """Keeps every other thread and process from renaming, renewing or deleting files."""
        with self._lock, self._lock_path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@contextlib.contextmanager
def _remove_on_error(draft: Path) -> Generator[None]:
    """Removes a draft when the block fails. Raises StorageFull for a full disk."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and is_disk_full(error):
            raise StorageFull(error.errno, f"the weight store has no room: {error.strerror or error}") from error
        raise


def _files(directory: Path, drafts: bool = False) -> Generator[tuple[str, int, float]]:
    """Name, size [bytes] and modification time [s] of each file, or of each draft."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(_DRAFT) is drafts:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    yield entry.name, status.st_size, status.st_mtime


def _read_sealed(path: Path) -> SealedManifest | None:
    """The signed manifest in a file; None if the file is too short. Raises OSError."""
    data = path.read_bytes()
    key, signature = data[:_KEY_BYTES], data[_KEY_BYTES : _KEY_BYTES + _SIGNATURE_BYTES]
    if len(signature) < _SIGNATURE_BYTES:
        return None
    return SealedManifest(body=data[_KEY_BYTES + _SIGNATURE_BYTES :], public_key=key, signature=signature)
