"""Chunks and manifests on disk: durable, whole or absent, within a budget, and shared by two processes."""

import errno
import multiprocessing
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from swarm.clock import ManualClock
from swarm.errors import StorageFull
from swarm.testing.builders import make_identity
from swarm.types import PolicyVersion, SealedManifest
from swarm.weights.codec import Codec, full_bytes
from swarm.weights.manifest import Manifest, layout_digest, seal_manifest
from swarm.weights.payload import CHUNK_BYTES, Unusable, UnusableReason, chunk_digest
from swarm.weights.publish import least_store_bytes
from swarm.weights.store import GRACE_S, WeightStore
from swarm.weights.tensors import TensorSpec

OWNER = make_identity(1)
MIB = 2**20


def version(step: int, branch: str = "") -> PolicyVersion:
    return PolicyVersion(policy_id=OWNER.node_id, step=step, digest=chunk_digest(f"{step}{branch}".encode()))


def payload(name: str, size: int = 1000) -> bytes:
    return random.Random(name).randbytes(size)


def specs_of(num_bytes: int) -> tuple[TensorSpec, ...]:
    """One tensor whose file has that size, header included."""
    sizes = range(num_bytes - 200, num_bytes)
    every = ((TensorSpec(name="w", dtype="uint8", shape=(size,)),) for size in sizes)
    return next(specs for specs in every if full_bytes(specs) == num_bytes)


def manifest(step: int, base: int | None, data: bytes) -> Manifest:
    specs = specs_of(len(data)) if base is None else ()
    return Manifest(
        version=version(step),
        base=None if base is None else version(base),
        codec=Codec.FULL if base is None else Codec.DELTA,
        layout=layout_digest(specs),
        tensors=specs,
        hashes=(bytes(32),),
        payload_bytes=len(data),
        chunks=tuple(chunk_digest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)),
    )


def add(store: WeightStore, step: int, base: int | None, size: int = 1000) -> SealedManifest:
    """Puts a patch to a version with chunks of its own into the store."""
    data = payload(f"{step} from {base}", size)
    for at in range(0, len(data), CHUNK_BYTES):
        store.put_chunk(chunk_digest(data[at : at + CHUNK_BYTES]), data[at : at + CHUNK_BYTES])
    sealed = seal_manifest(manifest(step, base, data), OWNER)
    assert isinstance(store.add_manifest(sealed), Manifest)
    return sealed


def patches(store: WeightStore) -> list[tuple[int, int | None]]:
    return [(m.version.step, None if m.base is None else m.base.step) for m, _ in store.manifests(OWNER.node_id)]


def num_files(directory: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(directory)) - 1  # without the lock


def test_a_chunk_and_a_manifest_are_there_again_after_a_restart(tmp_path: Path) -> None:
    sealed = add(WeightStore(tmp_path, 10 * MIB), 3, None, size=2 * MIB + 5)
    store = WeightStore(tmp_path, 10 * MIB)
    [(found, again)] = store.manifests(OWNER.node_id)
    assert again == sealed and found.version.step == 3
    assert b"".join(store.chunk(digest) or b"" for digest in found.chunks) == payload("3 from None", 2 * MIB + 5)
    assert store.bytes_held == 2 * MIB + 5 and store.missing([*found.chunks, bytes(32)]) == [bytes(32)]


def test_a_chunk_that_is_not_what_its_digest_says_or_too_long_is_not_stored(tmp_path: Path) -> None:
    store, long = WeightStore(tmp_path, 10 * MIB), bytes(CHUNK_BYTES + 1)
    for digest, data in ((chunk_digest(b"a"), b"b"), (chunk_digest(long), long)):
        with pytest.raises(ValueError, match="are not chunk"):
            store.put_chunk(digest, data)
        assert not store.has(digest)


def test_a_damaged_chunk_counts_as_missing_and_can_be_put_again(tmp_path: Path) -> None:
    store, data = WeightStore(tmp_path, 10 * MIB), payload("x")
    digest = chunk_digest(data)
    store.put_chunk(digest, data)
    (tmp_path / "chunks" / digest.hex()).write_bytes(data[:-1] + b"?")
    assert store.chunk(digest) is None
    assert not store.has(digest)
    store.put_chunk(digest, data)
    assert store.chunk(digest) == data


def test_a_damaged_manifest_is_dropped_when_the_store_opens(tmp_path: Path) -> None:
    sealed = add(WeightStore(tmp_path, 10 * MIB), 1, None)
    path = tmp_path / "manifests" / sealed.digest.hex()
    path.write_bytes(path.read_bytes()[:-1])
    assert WeightStore(tmp_path, 10 * MIB).manifests(OWNER.node_id) == []
    assert not path.exists()


def test_a_manifest_that_cannot_be_read_now_stays_with_its_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    sealed = add(WeightStore(tmp_path, 10 * MIB, clock=clock), 1, None)
    clock.advance(2 * GRACE_S)
    store = WeightStore(tmp_path, 10 * MIB, clock=clock)  # nothing is opened yet
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", Mock(side_effect=OSError(errno.EMFILE, "too many open files")))
        assert store.manifests(OWNER.node_id) == []
        assert store.prune([OWNER.node_id]) == 0
    [(found, again)] = store.manifests(OWNER.node_id)
    assert again == sealed and not store.missing(found.chunks)


def test_a_manifest_is_put_in_place_after_its_chunks_and_before_anybody_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace_file = os.fsync, Path.replace

    def recorded_fsync(descriptor: int) -> None:
        synced = next(path for path in tmp_path.rglob("*") if path.stat().st_ino == os.fstat(descriptor).st_ino)
        calls.append(f"sync {_kind(synced, tmp_path)}")
        fsync(descriptor)

    def recorded_replace(path: Path, target: Path) -> Path:
        calls.append(f"rename to {_kind(target, tmp_path)}")
        return replace_file(path, target)

    store, data = WeightStore(tmp_path, 10 * MIB), payload("1 from None")
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "replace", recorded_replace)
    store.put_chunk(chunk_digest(data), data)
    store.add_manifest(seal_manifest(manifest(1, None, data), OWNER))
    assert calls == [
        *("sync a file of chunks", "rename to a file of chunks", "sync chunks"),
        *("sync a file of manifests", "rename to a file of manifests", "sync manifests"),
    ]


def _kind(path: Path, root: Path) -> str:
    parts = path.relative_to(root).parts
    return parts[0] if len(parts) == 1 else f"a file of {parts[0]}"


def test_a_manifest_of_another_owners_lineage_or_beyond_the_budget_is_unusable(tmp_path: Path) -> None:
    store, whole = WeightStore(tmp_path, 10 * MIB), manifest(1, None, payload("y"))
    stolen = store.add_manifest(seal_manifest(whole, make_identity(2)))
    assert isinstance(stolen, Unusable) and stolen.reason is UnusableReason.WRONG_OWNER
    specs = specs_of(11 * MIB)
    huge = replace(whole, tensors=specs, layout=layout_digest(specs), payload_bytes=11 * MIB, chunks=(bytes(32),) * 11)
    refused = store.add_manifest(seal_manifest(huge, OWNER))
    assert isinstance(refused, Unusable) and refused.reason is UnusableReason.TOO_LARGE
    assert store.manifests(OWNER.node_id) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing_half_written_and_what_was_there_intact(tmp_path: Path, number: int) -> None:
    is_full = False

    def before_write(num_bytes: int) -> None:
        if is_full:
            raise OSError(number, "no room")

    store = WeightStore(tmp_path, 10 * MIB, before_write=before_write)
    add(store, 1, None)
    before, is_full = num_files(tmp_path), True
    data = payload("2 from 1")
    with pytest.raises(StorageFull):
        store.put_chunk(chunk_digest(data), data)
    with pytest.raises(StorageFull):
        store.add_manifest(seal_manifest(manifest(2, 1, data), OWNER))
    assert num_files(tmp_path) == before and patches(store) == [(1, None)] and store.bytes_held == 1000
    is_full = False
    add(store, 2, 1)
    assert patches(store) == [(1, None), (2, 1)]


def test_another_failure_of_the_disk_is_not_taken_for_a_full_one(tmp_path: Path) -> None:
    def before_write(num_bytes: int) -> None:
        raise OSError(errno.EACCES, "not allowed")

    with pytest.raises(PermissionError):
        WeightStore(tmp_path, MIB, before_write=before_write).put_chunk(chunk_digest(b"a"), b"a")
    assert num_files(tmp_path) == 0


def chain(store: WeightStore, last: int, every: int, size: int = 1000) -> None:
    """Versions 0 to `last` as a trainer publishes them: patches from the one before and the anchor, and anchors."""
    add(store, 0, None, size)
    for step in range(1, last + 1):
        anchor = (step - 1) // every * every
        for base in {step - 1, anchor}:
            add(store, step, base, size // 10)
        if step % every == 0:
            add(store, step, None, size)


def test_over_budget_the_oldest_versions_go_and_everything_after_the_newest_anchor_stays(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, 3000)
    chain(store, last=13, every=5, size=1000)
    store.prune([OWNER.node_id])
    assert store.bytes_held <= 3000
    kept = set(patches(store))
    assert {(10, None), (11, 10), (12, 11), (13, 12), (13, 10)} <= kept
    assert (0, None) not in kept and (5, None) not in kept
    for found, _ in store.manifests(OWNER.node_id):
        assert not store.missing(found.chunks)


def test_where_the_way_to_the_newest_version_exceeds_the_budget_one_that_does_not_stays(tmp_path: Path) -> None:
    tight = WeightStore(tmp_path, 1050)
    chain(tight, last=4, every=5, size=1000)
    tight.prune([OWNER.node_id])
    assert patches(tight) == [(0, None)] and tight.bytes_held == 1000


def test_with_the_least_budget_of_a_trainer_there_is_always_a_way_to_the_newest_version(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, least_store_bytes(specs_of(1000)))
    add(store, 0, None, 1000)
    for step in range(1, 7):
        for base in {step - 1, 0}:
            add(store, step, base, 500)  # more than half is sent in full
        store.prune([OWNER.node_id])
        assert store.bytes_held <= store.max_bytes and patches(store) == [(0, None), (step, 0)]


def test_a_chain_without_anchors_stays_within_the_budget(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, 3000)
    add(store, 0, None, 1000)
    for step in range(1, 10):
        add(store, step, step - 1, 1000)
        store.prune([OWNER.node_id])
        assert store.bytes_held <= 3000
    assert (9, 8) in patches(store)


def test_a_lineage_out_of_force_makes_room_first(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, 2500)
    chain(store, last=1, every=5, size=2000)
    store.prune([])
    assert (0, None) in patches(store)  # there is room
    other = seal_manifest(
        replace(
            manifest(7, None, payload("o", 2000)),
            version=PolicyVersion(policy_id=make_identity(2).node_id, step=7, digest=bytes(32)),
        ),
        make_identity(2),
    )
    store.put_chunk(chunk_digest(payload("o", 2000)), payload("o", 2000))
    assert isinstance(store.add_manifest(other), Manifest)
    store.prune([make_identity(2).node_id])
    assert (0, None) not in patches(store) and len(store.manifests(make_identity(2).node_id)) == 1


def test_a_chunk_that_no_manifest_names_yet_stays_for_its_grace(tmp_path: Path) -> None:
    clock = ManualClock()
    store, data = WeightStore(tmp_path, 10, clock=clock), b"being published"
    store.put_chunk(chunk_digest(data), data)
    clock.advance(GRACE_S - 1)
    assert store.prune([OWNER.node_id]) == 0 and store.has(chunk_digest(data))
    store.put_chunk(chunk_digest(data), data)  # again: it is young again
    clock.advance(GRACE_S - 1)
    assert store.prune([OWNER.node_id]) == 0 and store.has(chunk_digest(data))
    clock.advance(2)
    assert store.prune([OWNER.node_id]) == len(data) and store.bytes_held == 0


def test_a_chunk_of_a_dropped_version_that_the_next_one_shares_is_not_deleted_under_it(tmp_path: Path) -> None:
    clock = ManualClock()
    store = WeightStore(tmp_path, 10 * MIB, clock=clock)
    sealed = add(store, 1, None)
    clock.advance(1)
    data = payload("1 from None")
    store.put_chunk(chunk_digest(data), data)  # the worker writes it for a version that is not announced yet
    store.drop_manifests([sealed.digest])
    store.prune([OWNER.node_id])
    assert store.has(chunk_digest(data))


def test_drafts_of_a_killed_process_go_after_their_grace(tmp_path: Path) -> None:
    clock = ManualClock()
    store = WeightStore(tmp_path, MIB, clock=clock)
    draft = tmp_path / "chunks" / ".draft-1-0"
    draft.write_bytes(b"half")
    os.utime(draft, (clock.now_s(), clock.now_s()))
    assert store.bytes_held == 0 and store.prune([]) == 0 and draft.exists()
    clock.advance(GRACE_S + 1)
    assert store.prune([]) == 4 and not draft.exists()


def _put_many(directory: Path, first: int) -> None:
    store = WeightStore(directory, 10 * MIB)
    for number in range(first, first + 40):
        store.put_chunk(chunk_digest(bytes([number % 50])), bytes([number % 50]))


def test_two_processes_write_and_prune_at_once_and_lose_nothing_young(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    store = WeightStore(tmp_path, 10)
    other = context.Process(target=_put_many, args=(tmp_path, 0))
    other.start()
    while other.is_alive():
        store.prune([OWNER.node_id])
        _put_many(tmp_path, 20)
    other.join()
    assert other.exitcode == 0
    assert all(store.chunk(chunk_digest(bytes([number]))) is not None for number in range(50))


def test_writing_threads_do_not_hold_each_other_up_for_good(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    store = WeightStore(tmp_path, MIB)

    def put(number: int) -> None:
        store.put_chunk(chunk_digest(bytes([number % 4])), bytes([number % 4]))

    with ThreadPoolExecutor(4) as pool:
        work: list[Callable[[], object]] = [lambda: store.prune([]), lambda: store.chunk(chunk_digest(b"\1"))]
        for done in [*(pool.submit(put, n) for n in range(40)), *(pool.submit(w) for w in work * 5)]:
            done.result()
    assert store.bytes_held == 4
