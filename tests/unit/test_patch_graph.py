"""The patches that lead from one version to another."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from swarm.testing.builders import make_identity
from swarm.types import PolicyVersion, SealedManifest
from swarm.weights.codec import Codec
from swarm.weights.manifest import Manifest, layout_digest
from swarm.weights.patch_graph import Patch, PatchGraph
from swarm.weights.payload import chunk_digest
from swarm.weights.publish import is_anchor

OWNER = make_identity(1)
LAYOUT = layout_digest(())


def version(step: int) -> PolicyVersion:
    return PolicyVersion(policy_id=OWNER.node_id, step=step, digest=chunk_digest(b"%d" % step))


def patch(base_step: int | None, step: int, num_bytes: int) -> Patch:
    """With a payload of so many bytes, unsigned."""
    manifest = Manifest(
        version=version(step),
        base=None if base_step is None else version(base_step),
        codec=Codec.FULL if base_step is None else Codec.DELTA,
        layout=LAYOUT,
        tensors=(),
        hashes=(),
        payload_bytes=num_bytes,
        chunks=(),
    )
    sealed = SealedManifest(body=b"%r %d %d" % (base_step, step, num_bytes), public_key=b"", signature=b"")
    return Patch(manifest=manifest, sealed=sealed)


def cheapest(patches: Sequence[Patch], held: int | None, wanted: int) -> tuple[Patch, ...] | None:
    graph = PatchGraph(
        patches, lambda patch: patch.manifest.payload_bytes, None if held is None else version(held).digest
    )
    return graph.cheapest_to(version(wanted).digest)


def size(chain: Sequence[Patch]) -> int:
    return sum(patch.manifest.payload_bytes for patch in chain)


def test_every_tenth_version_is_an_anchor() -> None:
    assert [step for step in range(31) if is_anchor(step)] == [0, 10, 20, 30]


def test_what_cannot_be_obtained_is_no_edge() -> None:
    small, large = patch(None, 4, 1), patch(None, 4, 9)
    graph = PatchGraph([small, large], lambda each: None if each is small else each.manifest.payload_bytes)
    assert graph.cheapest_to(version(4).digest) == (large,)


STEPS = st.integers(0, 5)
PATCHES = st.lists(st.builds(patch, st.none() | STEPS, STEPS, st.integers(1, 50)), max_size=9)


@given(patches=PATCHES, held=st.none() | STEPS, wanted=STEPS)
def test_the_path_is_the_cheapest_of_all(patches: list[Patch], held: int | None, wanted: int) -> None:
    chain = cheapest(patches, held, wanted)
    best = min(map(size, every_path(patches, held, wanted)), default=None)
    assert (None if chain is None else size(chain)) == best
    if chain:
        assert chain[0].base is None or chain[0].base.step == held
        assert all(one.version == other.base for one, other in itertools.pairwise(chain))
        assert chain[-1].version.step == wanted


def every_path(patches: list[Patch], held: int | None, wanted: int) -> list[tuple[Patch, ...]]:
    """Every path without visiting a version twice."""
    paths: list[tuple[Patch, ...]] = [()] if wanted == held else []

    def extend(path: tuple[Patch, ...], at: int | None) -> None:
        for one in patches:
            if (None if one.base is None else one.base.step) == at and one not in path:
                longer = (*path, one)
                if one.version.step == wanted:
                    paths.append(longer)
                elif len(longer) < 7 and one.version.step not in [other.version.step for other in path]:
                    extend(longer, one.version.step)

    for start in dict.fromkeys((None, held)):
        extend((), start)
    return paths
