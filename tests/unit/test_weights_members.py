"""Rank and select, steps between neighbours, and the ways to write small numbers, against plain definitions."""

import numpy as np
import pytest

from swarm.weights.bitpack import pack_bits, pack_planes, packed_size, unpack_bits, unpack_planes
from swarm.weights.members import Scratch, class_table, members_by_class, places_of
from swarm.weights.steps import stepped, steps
from swarm.weights.streams import StreamReader
from swarm.weights.tensors import DTYPES
from swarm.weights.values import pack_values, read_values

BF16 = DTYPES["bfloat16"]


@pytest.mark.parametrize("density", [0.0, 0.001, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("size", [1, 7, 8, 64, 1000, 100_003])
def test_places_of_a_mask_are_those_that_numpy_finds(size: int, density: float) -> None:
    mask = np.random.default_rng(size).random(size) < density
    assert places_of(mask).tolist() == np.flatnonzero(mask).tolist()


@pytest.mark.parametrize("num_chosen", [1, 30, 3000])
@pytest.mark.parametrize("size", [70, 4096, 200_001])
def test_ranks_and_places_are_those_of_a_list_of_members(size: int, num_chosen: int) -> None:
    rng = np.random.default_rng(size + num_chosen)
    base = ((0.05 * rng.standard_normal(size)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    magnitude = base & 0x7FFF
    thresholds = tuple((127 + exponent) << 7 for exponent in (-14, -10, -6, -5))
    classes = members_by_class(base, BF16, thresholds, class_table(BF16, thresholds), Scratch(BF16))
    assert len(classes) == 5 and sum(one.count for one in classes) == size
    limits = [0, *thresholds, 1 << 15]
    for number, members in enumerate(classes):
        expected = np.flatnonzero((magnitude >= limits[number]) & (magnitude < limits[number + 1]))
        assert members.count == len(expected)
        ranks = np.unique(rng.integers(0, max(1, len(expected)), min(num_chosen, len(expected))))
        places = expected[ranks]
        is_changed = np.zeros(size, np.bool_)
        is_changed[places] = True
        assert members.ranks(places, is_changed).tolist() == ranks.tolist()
        if len(ranks):
            assert members.places(ranks).tolist() == places.tolist()


def test_a_step_is_one_neighbour_and_small_numbers_mean_few_of_them() -> None:
    values = np.array([1.0, -1.0, 0.0, 3.4e38, 1e-45, -2.0], np.float32)
    away = np.nextafter(values, np.copysign(np.float32(np.inf), values))
    found = steps(values.view(np.uint32), away.view(np.uint32), DTYPES["float32"])
    assert found.tolist() == [1] * len(values)
    towards = np.nextafter(np.array([1.0, -1.0, 2.0], np.float32), np.float32(0))
    found = steps(np.array([1.0, -1.0, 2.0], np.float32).view(np.uint32), towards.view(np.uint32), DTYPES["float32"])
    assert found.tolist() == [0, 0, 0]


def test_every_bf16_pattern_reaches_every_other_one_bit_for_bit() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for shift in (1, 2, 255, 32768, 65535):
        target = patterns + np.uint16(shift)
        assert np.array_equal(stepped(patterns, steps(patterns, target, BF16), BF16), target)


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
        reader = StreamReader([pack_values(content)])
        assert np.array_equal(read_values(reader, len(content), kind), content)
        reader.end()
    assert np.array_equal(unpack_planes(pack_planes(few_large), kind), few_large)
    assert len(pack_values(few_large)) < few_large.nbytes / 2 or largest > 14 or kind.itemsize == 1
