"""Rank and select, ulp deltas, and the encodings of small numbers, against plain definitions."""

import numpy as np
import pytest

from swarm.weights.exponent_classes import ClassOrder, ExponentClasses, Scratch, positions_of
from swarm.weights.payload import StreamReader, pack_bits, pack_planes, packed_size, unpack_bits, unpack_planes
from swarm.weights.segment import gaps_of
from swarm.weights.tensors import DTYPES
from swarm.weights.ulp_delta import add_ulp_deltas, pack_ulps, read_ulps, ulp_deltas

BF16 = DTYPES["bfloat16"]


@pytest.mark.parametrize("density", [0.0, 0.001, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("size", [1, 7, 8, 64, 1000, 100_003])
def test_positions_of_a_mask_are_those_that_numpy_finds(size: int, density: float) -> None:
    mask = np.random.default_rng(size).random(size) < density
    assert positions_of(mask).tolist() == np.flatnonzero(mask).tolist()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.03, 0.4, 1.0])
@pytest.mark.parametrize("size", [1, 70, 4096, 200_001])
@pytest.mark.parametrize("exponents", [(), (-2,), (-14, -10, -6, -5), (-60, -50, -40), (-9, 0, 20)])
def test_ranks_are_the_order_of_class_then_place(size: int, share: float, exponents: tuple[int, ...]) -> None:
    rng = np.random.default_rng(size)
    base = ((0.05 * rng.standard_normal(size)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    magnitude = base & 0x7FFF
    limits = [(127 + exponent) << 7 for exponent in exponents]
    class_of = np.searchsorted(limits, magnitude, side="right")
    expected = np.argsort(class_of, kind="stable")
    order = ClassOrder(base, ExponentClasses(BF16, tuple(limits)), Scratch(BF16))
    assert order.starts == [0, *np.cumsum(np.bincount(class_of, minlength=len(limits) + 1)).tolist()]
    is_changed = rng.random(size) < share
    positions = np.flatnonzero(is_changed)
    by_rank, ranks, flags = order.ranks(positions, base[positions], is_changed)
    assert ranks.tolist() == np.flatnonzero(is_changed[expected]).tolist()
    assert positions[by_rank].tolist() == expected[ranks].tolist()
    assert flags.tolist() == is_changed[expected[: len(flags)]].tolist()
    assert order.positions(ranks).tolist() == expected[ranks].tolist()


def test_the_example_in_the_docstring_of_class_order_is_true() -> None:
    small, large = 0x3000, 0x3F80
    base = np.array([small, large, large, small, large, large, large, small], np.uint16)
    order = ClassOrder(base, ExponentClasses(BF16, (0x3800,)), Scratch(BF16))
    assert order.starts == [0, 3, 8]
    assert order.positions(np.arange(8)).tolist() == [0, 3, 7, 1, 2, 4, 5, 6]
    is_changed = np.isin(np.arange(8), [3, 5, 7])
    _, ranks, _ = order.ranks(np.flatnonzero(is_changed), base[is_changed], is_changed)
    assert ranks.tolist() == [1, 2, 6]
    assert gaps_of(ranks, order.starts, [2, 1]).tolist() == [1, 0, 3]


def test_a_step_is_one_neighbour_and_small_numbers_mean_few_of_them() -> None:
    values = np.array([1.0, -1.0, 0.0, 3.4e38, 1e-45, -2.0], np.float32)
    away = np.nextafter(values, np.copysign(np.float32(np.inf), values))
    found = ulp_deltas(values.view(np.uint32), away.view(np.uint32), DTYPES["float32"])
    assert found.tolist() == [1] * len(values)
    towards = np.nextafter(np.array([1.0, -1.0, 2.0], np.float32), np.float32(0))
    found = ulp_deltas(
        np.array([1.0, -1.0, 2.0], np.float32).view(np.uint32), towards.view(np.uint32), DTYPES["float32"]
    )
    assert found.tolist() == [0, 0, 0]


def test_every_bf16_pattern_reaches_every_other_one_bit_for_bit() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for shift in (1, 2, 255, 32768, 65535):
        target = patterns + np.uint16(shift)
        assert np.array_equal(add_ulp_deltas(patterns, ulp_deltas(patterns, target, BF16), BF16), target)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 13, 24])
@pytest.mark.parametrize("count", [0, 1, 5, 1000])
def test_packed_numbers_come_back(width: int, count: int) -> None:
    numbers = np.random.default_rng(width).integers(0, 1 << width, count).astype(np.uint32)
    data = pack_bits(numbers, width)
    assert len(data) == packed_size(count, width)
    assert unpack_bits(data, count, width).tolist() == numbers.tolist()


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u4", "<u8"])
@pytest.mark.parametrize("largest", [1, 3, 14, 200, 255])
def test_values_come_back_in_every_way_of_writing_them(dtype: str, largest: int) -> None:
    kind = np.dtype(dtype)
    rng = np.random.default_rng(largest)
    numbers = rng.integers(0, largest + 1, 5000).astype(kind)
    few_large = numbers.copy()
    few_large[::97] = np.iinfo(kind).max
    for content in (numbers, few_large, rng.integers(0, np.iinfo(kind).max, 3000, kind, endpoint=True)):
        reader = StreamReader([pack_ulps(content)])
        assert np.array_equal(read_ulps(reader, len(content), kind), content)
        reader.end()
    assert np.array_equal(unpack_planes(pack_planes(few_large), kind), few_large)
    assert len(pack_ulps(few_large)) < few_large.nbytes / 2 or largest > 14 or kind.itemsize == 1
