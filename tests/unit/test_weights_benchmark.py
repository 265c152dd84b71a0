"""The weights benchmark on made-up weights: from a CUDA device where there is one, and its twin on this machine."""

import pytest
import torch

from benchmarks._weights_made import made_step, measure_made, shapes_of
from benchmarks._weights_table import made_table
from benchmarks.weights import windows_of


def test_shapes_have_at_least_as_many_parameters_as_asked_for() -> None:
    for asked in (10_000, 1_000_000, 1_000_000_000):
        count = sum(rows * columns for rows, columns in shapes_of(asked).values())
        assert asked <= count <= 2 * asked


def test_the_last_steps_are_reported_apart_once_they_are_others() -> None:
    assert windows_of(3) == [range(1, 4)]
    assert windows_of(8) == windows_of(15)[:1] == [range(1, 9)]
    assert windows_of(40) == [range(1, 9), range(33, 41)]


def test_a_made_step_changes_more_weights_at_a_higher_rate() -> None:
    shares: list[float] = []
    for rate in (1e-6, 1e-5):
        before, after = made_step(200_000, rate, "cpu")
        changed = sum(int((before[name].bits != after[name].bits).sum()) for name in before)
        shares.append(changed / sum(spec.num_elements for spec in before.specs))
    assert 0 < shares[0] < shares[1] < 0.5


def measured_on(device: str) -> None:
    """measure_made compares every decoded tensor, and stage every hash."""
    result = measure_made(device, 200_000, 1e-5)
    assert result["parameters"] >= 200_000
    assert result["ours"]["full_bytes"] == 2 * result["parameters"]
    assert result["ours"]["ours_bytes"] < result["ours"]["full_bytes"] / 10
    assert f"| {result['device']} |" in made_table([result])


def test_weights_of_the_host_are_coded_and_told_apart() -> None:
    measured_on("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_of_a_cuda_device_are_coded_from_there() -> None:
    measured_on("cuda")
