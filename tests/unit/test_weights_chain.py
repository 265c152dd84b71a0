"""A trainer's versions, published one after the other, taken by an engine that checks what it loads."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from swarm.errors import WeightsRefused
from swarm.identity import Identity
from swarm.interfaces import Generator
from swarm.model.version_digest import weights_digest
from swarm.types import Canary, FloatArray, LoadReport, PolicyVersion, SealedManifest
from swarm.weights import apply
from swarm.weights.apply import Applier, VerifiedVersion
from swarm.weights.codec import full_bytes
from swarm.weights.manifest import Limits, Manifest, layout_digest, open_manifest, seal_body, seal_manifest
from swarm.weights.payload import Unusable
from swarm.weights.publish import Publisher
from swarm.weights.tensors import TensorSpec, TorchWeights

TRAINER = Identity.from_seed(b"t" * 32)
OTHER = Identity.from_seed(b"s" * 32)
Tensors = dict[str, torch.Tensor]


def opened(sealed: SealedManifest) -> Manifest:
    manifest = open_manifest(sealed, TRAINER.node_id, Limits())
    assert isinstance(manifest, Manifest)
    return manifest


class TableEngine:
    """An engine whose log-probs are a plain function of its weights."""

    def __init__(self, tensors: Tensors) -> None:
        self.version = PolicyVersion(policy_id="", step=0)
        self.tensors = tensors

    def score(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        table = torch.log_softmax(self.tensors["table"].float(), dim=0).numpy()
        return [np.array([np.nan, *table[ids[1:]]], np.float32) for ids in sequences]

    def load(
        self, version: PolicyVersion, weights: Tensors, *, canaries: Sequence[Canary] = (), in_flight: bool = False
    ) -> LoadReport:
        before, self.tensors = self.tensors, weights
        for canary, found in zip(canaries, self.score([c.token_ids.tolist() for c in canaries]), strict=True):
            if not np.allclose(found[1:], canary.logprobs[1:], atol=1e-4):
                self.tensors = before
                raise WeightsRefused(f"step {version.step}: canary differs")
        self.version = version
        return LoadReport()


class Chain:
    """A trainer that publishes small steps, and where its chunks lie."""

    def __init__(self, anchor_every: int = 4) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            "other": torch.randn(3000, generator=generator).bfloat16(),
            "table": torch.randn(50, generator=generator).bfloat16(),
        }
        self.first = self.tensors
        self.chunks: dict[bytes, bytes] = {}
        self.trained = TableEngine(self.tensors)
        self.anchor_every = anchor_every
        self.bodies: dict[int, list[SealedManifest]] = {}
        self.step = 0
        self.restart_trainer()

    def restart_trainer(self) -> None:
        self.publisher = Publisher(
            self.chunks.__setitem__, [[1, 2, 3], [4, 5]], self.trained.score, anchor_every=self.anchor_every
        )

    def publish(self, owner: Identity = TRAINER) -> list[SealedManifest]:
        version = PolicyVersion(policy_id=TRAINER.node_id, step=self.step, digest=weights_digest(self.tensors))
        bodies = self.publisher.publish(version, TorchWeights(self.tensors))
        self.bodies[self.step] = [seal_body(body, owner) for body in bodies]
        return self.bodies[self.step]

    def train(self) -> None:
        self.step += 1
        self.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.tensors["other"][self.step :: 97] += 0.01
        self.tensors["table"][self.step] += 1.0
        self.trained.tensors = self.tensors

    def applier(self, engine: TableEngine | None = None) -> Applier:
        version = PolicyVersion(policy_id="", step=0, digest=weights_digest(self.first))
        start = VerifiedVersion.of(TorchWeights(self.first), version)
        assert isinstance(start, VerifiedVersion)
        return Applier(cast("Generator", engine or TableEngine(self.first)), start, self.chunks.get)

    def bases(self, step: int) -> list[int | None]:
        return [None if m.base is None else m.base.step for m in map(opened, self.bodies[step])]


def trained_chain(num_steps: int) -> Chain:
    chain = Chain()
    chain.publish()
    for _ in range(num_steps):
        chain.train()
        chain.publish()
    return chain


def test_every_version_patches_the_one_before_and_the_newest_anchor() -> None:
    chain = trained_chain(6)
    assert [chain.bases(step) for step in range(7)] == [[None], [0], [1, 0], [2, 0], [3, 0, None], [4], [5, 4]]


def test_a_trainer_that_went_on_from_a_checkpoint_patches_from_what_it_published_in_full_then() -> None:
    chain = trained_chain(5)
    chain.restart_trainer()
    for _ in range(5):
        chain.publish()
        chain.train()
    assert [chain.bases(step) for step in range(5, 10)] == [[None], [5], [6, 5], [7, 5, None], [8]]


def test_a_version_to_which_no_patch_is_worth_it_is_published_once_in_full_and_is_the_anchor_then() -> None:
    chain = trained_chain(2)
    chain.train()
    chain.tensors = chain.trained.tensors = {name: -3 * tensor for name, tensor in chain.tensors.items()}
    before = set(chain.chunks)
    chain.publish()
    assert chain.bases(3) == [None] and len(chain.chunks.keys() - before) == 1
    chain.train()
    chain.publish()
    chain.train()
    chain.publish()
    assert [chain.bases(4), chain.bases(5)] == [[3, None], [4]]


def test_an_engine_follows_step_by_step() -> None:
    chain = trained_chain(5)
    engine = TableEngine(chain.first)
    applier = chain.applier(engine)
    for step in range(6):
        report = applier.apply((chain.bodies[step][0],))
        assert not report.error and report.version.step == step == applier.version.step
        assert weights_digest(engine.tensors) == report.version.digest == engine.version.digest


def test_the_same_weights_are_not_fetched_again() -> None:
    chain = trained_chain(0)
    applier = chain.applier()
    chain.chunks.clear()
    report = applier.apply(tuple(chain.bodies[0]))
    assert not report.error and applier.version == report.version
    assert report.version.policy_id == TRAINER.node_id
    assert report.num_bytes == len(chain.bodies[0][0].body)


def test_a_laggard_takes_the_anchor_and_one_patch() -> None:
    chain = trained_chain(7)
    applier = chain.applier()
    report = applier.apply((chain.bodies[4][-1], chain.bodies[7][-1]))
    assert not report.error and applier.version.step == 7


@pytest.mark.parametrize("damage", ["lost", "changed", "longer"])
def test_a_damaged_chunk_changes_nothing(damage: str) -> None:
    chain = trained_chain(1)
    engine = TableEngine(chain.first)
    applier = chain.applier(engine)
    manifest = opened(chain.bodies[1][0])
    name, content = manifest.chunks[0], chain.chunks[manifest.chunks[0]]
    changed = bytes([content[0] ^ 1]) + content[1:]
    chain.chunks.update({name: {"changed": changed, "longer": content + b"x"}.get(damage, b"")})
    if damage == "lost":
        del chain.chunks[name]
    report = applier.apply((chain.bodies[1][0],))
    assert "wrong_chunk" in report.error and report.is_unusable and engine.tensors is chain.first
    chain.chunks[name] = content
    assert not applier.apply((chain.bodies[1][0],)).error


def test_an_engine_that_became_something_else_is_put_back() -> None:
    chain = trained_chain(1)

    class Forgetful(TableEngine):
        def load(self, version: PolicyVersion, weights: Tensors, **options: object) -> LoadReport:
            wrong = {**weights, "table": weights["table"] + 1.0 * torch.arange(50)}
            return super().load(version, wrong, **options)  # pyright: ignore[reportArgumentType]

    engine = Forgetful(chain.first)
    applier = chain.applier(engine)
    report = applier.apply((chain.bodies[1][0],))
    assert "canary differs" in report.error and not report.is_unusable
    assert engine.tensors is chain.first and applier.version.step == 0


@pytest.mark.parametrize("where", ["stage", "to_torch", "load"])
def test_whatever_is_raised_on_the_way_is_reported_and_the_old_version_serves_on(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chain = trained_chain(1)
    engine = TableEngine(chain.first)
    applier = chain.applier(engine)
    errors = {"stage": MemoryError("15 GiB"), "to_torch": RuntimeError("stride"), "load": OSError("no such device")}

    def fail(*_: object, **__: object) -> None:
        raise errors[where]

    with monkeypatch.context() as broken:
        broken.setattr(engine if where == "load" else apply, where, fail)
        report = applier.apply((chain.bodies[1][0],))
    assert report.error == f"{type(errors[where]).__name__}: {errors[where]}" and report.version.step == 1
    assert [record.exc_info is not None for record in caplog.records] == [True], "the traceback is told"
    assert engine.tensors is chain.first and applier.version.step == 0
    assert not applier.apply((chain.bodies[1][0],)).error and applier.version.step == 1


def test_after_a_step_back_the_next_version_is_published_in_full() -> None:
    chain = trained_chain(6)
    chain.step = 5
    chain.tensors = replace_one(chain.first)
    chain.publish()
    assert chain.bases(5) == [None]


def replace_one(tensors: Tensors) -> Tensors:
    return {**tensors, "table": tensors["table"] * 2}


def test_a_version_is_published_once() -> None:
    chain = trained_chain(2)
    assert chain.publish() == []


def test_a_full_disk_publishes_nothing_and_the_next_version_is_whole() -> None:
    chain = trained_chain(2)
    full = OSError("no space left on device")

    def refuse(digest: bytes, content: bytes) -> None:
        raise full

    chain.train()
    chain.publisher._put = refuse
    with pytest.raises(OSError, match="no space"):
        chain.publish()
    chain.publisher._put = chain.chunks.__setitem__
    chain.train()
    chain.publish()
    assert chain.bases(4)[-1] is None
    assert not chain.applier().apply((chain.bodies[4][-1],)).error


def test_canaries_are_the_publishers_own_log_probs() -> None:
    chain = trained_chain(1)
    manifest = opened(chain.bodies[1][0])
    expected = chain.trained.score([[1, 2, 3], [4, 5]])
    for canary, logprobs in zip(manifest.canaries, expected, strict=True):
        np.testing.assert_array_equal(canary.logprobs, logprobs)
    assert replace(manifest, canaries=()) != manifest


def test_a_manifest_of_a_terabyte_with_a_payload_of_bytes_is_refused_before_anything_is_allocated() -> None:
    chain = trained_chain(0)
    manifest = open_manifest(chain.bodies[0][0], TRAINER.node_id, Limits())
    assert not isinstance(manifest, Unusable)
    huge = (TensorSpec(name="table", dtype="bfloat16", shape=(2**39,)),)
    bomb = replace(manifest, tensors=huge, hashes=manifest.hashes[:1], layout=layout_digest(huge))
    found = open_manifest(seal_manifest(bomb, TRAINER), TRAINER.node_id, Limits())
    assert isinstance(found, Unusable) and "are not the" in found.detail


def test_a_manifest_of_no_elements_in_a_shape_that_torch_cannot_make_is_refused() -> None:
    chain = trained_chain(0)
    manifest = open_manifest(chain.bodies[0][0], TRAINER.node_id, Limits())
    assert not isinstance(manifest, Unusable)
    empty = TensorSpec(name="table", dtype="bfloat16", shape=(1, 1, 0))
    object.__setattr__(empty, "shape", (2**40, 2**40, 0))  # what a hostile trainer signs
    hostile = replace(
        manifest,
        tensors=(empty,),
        hashes=manifest.hashes[:1],
        layout=layout_digest((empty,)),
        payload_bytes=full_bytes((empty,)),
        chunks=manifest.chunks[:1],
    )
    found = open_manifest(seal_manifest(hostile, TRAINER), TRAINER.node_id, Limits())
    assert isinstance(found, Unusable) and f"over {2**40} elements" in found.detail
