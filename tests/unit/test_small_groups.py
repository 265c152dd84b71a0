"""Groups that are checked in place: those that are small as they travelled and as they are decompressed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from swarm.node_context import IN_PLACE_BYTES
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import make_group, make_identity, make_sealed
from swarm.testing.nodes import make_admission, make_context
from swarm.types import RolloutGroup, SealedGroup
from swarm.wire.envelopes import stated_bytes

EVE = make_identity(5)
SMALL = make_group(EVE.node_id)
LONG = replace(SMALL, prompt_ids=np.random.default_rng(1).integers(3, 90, 2 * IN_PLACE_BYTES, np.int32))
BOMB = replace(SMALL, prompt_ids=np.full(100 * IN_PLACE_BYTES, 3, np.int32))


async def offloaded(sealed: SealedGroup) -> list[str]:
    """Names of the functions that admission of a group did not call in place."""
    names: list[str] = []

    async def offload(function: Callable[..., Any], /, *arguments: object) -> Any:
        names.append(function.__name__)
        return function(*arguments)

    context = make_context(offload=offload, in_place_bytes=IN_PLACE_BYTES)
    await make_admission(context, MemoryGroupStore(context.clock, 10**8)).admit(sealed, EVE.node_id)
    return names


async def test_a_small_group_needs_no_thread() -> None:
    assert await offloaded(make_sealed(SMALL, EVE)) == []


@pytest.mark.parametrize("group", [pytest.param(LONG, id="long"), pytest.param(BOMB, id="small until decompressed")])
async def test_what_takes_long_never_runs_on_the_event_loop(group: RolloutGroup) -> None:
    sealed = make_sealed(group, EVE)
    assert stated_bytes(sealed) > IN_PLACE_BYTES
    assert "open_group" in await offloaded(sealed)


@pytest.mark.parametrize("body", [b"", b"\x28\xb5\x2f\xfd", b"no frame at all", b"\x50\x2a\x4d\x18\xff\xff\xff\xff"])
async def test_a_body_that_is_no_frame_states_what_travelled(body: bytes) -> None:
    sealed = replace(make_sealed(SMALL, EVE), body=body, is_compressed=True)
    assert stated_bytes(sealed) == len(body)
    assert await offloaded(sealed) == []
