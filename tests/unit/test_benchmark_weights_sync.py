"""The bytes of a version on the wire are counted whole, and the version arrives."""

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.weights_sync import measure


@pytest.mark.skipif(sys.platform != "linux", reason="byte counts come from the Linux kernel")
async def test_every_version_arrives_and_costs_more_than_its_patch_and_far_less_than_the_whole(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [{"w": torch.randn(400_000, generator=generator).bfloat16()}]
    for step in range(1, 4):
        changed = tensors[-1]["w"].clone()
        changed[step::5000] += 0.5
        tensors.append({"w": changed})
    syncs = await measure(tensors, tmp_path)
    assert [sync.step for sync in syncs] == [1, 2, 3]
    for sync in syncs:
        assert sync.wire_bytes > sync.payload_bytes + sync.manifest_bytes
        assert sync.full_bytes > 800_000 and sync.ratio > 20
