"""Versions made on a device: published from there, and taken by engines on the device and on the host."""

import numpy as np
import pytest
import torch

from swarm.generation.transformers_engine import TransformersGenerator
from swarm.identity import Identity
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import PublishedTensors, snapshot, weights_digest
from swarm.types import PolicyVersion, SealedManifest
from swarm.weights.apply import Applier, VerifiedVersion
from swarm.weights.manifest import seal_body
from swarm.weights.publish import Publisher
from swarm.weights.tensors import TorchWeights, published_digest
from tests.worlds.pretended_device import device_named

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["pretended", pytest.param("cuda", marks=CUDA)]
OWNER, TOKENIZER = Identity.from_seed(b"o" * 32), CharTokenizer()
TEXTS = [[5, 6, 7, 8, 20, 21], [30, 31, 2, 40]]


def version_of(state: PublishedTensors, step: int) -> PolicyVersion:
    return PolicyVersion(policy_id=OWNER.node_id, step=step, digest=weights_digest(state))


def engine(device: torch.device | str) -> TransformersGenerator:
    network = tiny_network(3).to(torch.bfloat16)
    return TransformersGenerator(network.to(device), TOKENIZER, version_of(snapshot(network), 0), seed=0)


def stepped(state: PublishedTensors) -> PublishedTensors:
    """A step that moves one weight in some."""
    return {name: torch.where(tensor > 0.01, tensor * 1.01, tensor) for name, tensor in state.items()}


def follower(device: torch.device | str, chunks: dict[bytes, bytes]) -> Applier:
    base = snapshot(tiny_network(3).to(torch.bfloat16))
    start = VerifiedVersion(version=version_of(base, 0), weights=TorchWeights(base))
    return Applier(engine(device), start, chunks.get, in_flight=True)


@pytest.mark.parametrize("name", DEVICES)
def test_what_a_device_publishes_is_taken_on_the_device_and_on_the_host(name: str) -> None:
    """The second version as a patch, with log-probs of the device as canaries."""
    chunks: dict[bytes, bytes] = {}
    with device_named(name) as device:
        trained, sealed = engine(device), list[SealedManifest]()
        publisher = Publisher(chunks.__setitem__, TEXTS, trained.score)
        tensors = snapshot(trained._network)
        for step in (1, 2):
            tensors = stepped(tensors)
            version = version_of(tensors, step)
            trained.load(version, tensors)
            assert published_digest(TorchWeights(tensors)) == version.digest
            sealed.append(seal_body(publisher.publish(version, TorchWeights(tensors))[0], OWNER))
        scores, newest = trained.score(TEXTS), trained.version
        whole, patch = len(sealed[0].body), sealed[1]
        assert len(patch.body) < whole, "the second one names its tensors again: it is no patch"
        there = follower(device, chunks)
        for each in sealed:
            report = there.apply((each,))
            assert report.error == "" and report.mismatch_nats == pytest.approx(0.0, abs=1e-6), report
        assert there.version == newest
    here = follower("cpu", chunks)
    for each in sealed:
        report = here.apply((each,))
        assert report.error == "", report
    assert here.version == newest and isinstance(here._engine, TransformersGenerator)
    for own, other in zip(here._engine.score(TEXTS), scores, strict=True):
        np.testing.assert_allclose(own[1:], other[1:], atol=0.25)  # bfloat16: of one token
