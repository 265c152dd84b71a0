"""Messages of the engine process: what one side sends is what the other reads, bit for bit."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ConfigError
from swarm.generation.vllm_messages import (
    Continuation,
    EngineSettings,
    GenerateRequest,
    NewWeights,
    decode_line,
    encode_line,
)
from swarm.types import Canary, FinishReason, PolicyVersion, Sampling, VersionSpan

VERSION = PolicyVersion(policy_id="a", step=3, digest=bytes(range(32)))
SETTINGS = EngineSettings(
    model="/m",
    dtype="float32",
    compute_dtype="auto",
    cpu_dtype="float32",
    max_rows=1,
    eos_ids=[1],
    version=VERSION,
    options={"max_model_len": 64},
    stall_s=60.0,
)


@st.composite
def canaries(draw: Any) -> Canary:
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40))
    rest = draw(st.lists(st.floats(-(2.0**100), 0.0, width=32), min_size=len(ids) - 1, max_size=len(ids) - 1))
    return Canary(token_ids=np.array(ids, np.int32), logprobs=np.array([math.nan, *rest], np.float32))


def crossed(message: object) -> Any:
    line = encode_line(message)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    return decode_line(line)


def test_settings_and_requests_are_read_as_they_were_written() -> None:
    request = GenerateRequest(
        prompts=[[1, 2], [3]], num_samples=2, sampling=Sampling(temperature=0.7), seeds=[2**63 - 1, 1, 2, 3]
    )
    assert crossed([np.array([1, 2], np.int32)[0], 3]) == [1, 3]
    for message in (SETTINGS, request):
        assert crossed(message) == message
        assert crossed({"id": 1, "call": "generate", "body": message}) == {"id": 1, "call": "generate", "body": message}


@given(canaries())
def test_any_canary_crosses_bit_for_bit(canary: Canary) -> None:
    new = NewWeights(
        version=VERSION, path=Path("/w"), digest=bytes(32), canaries=[canary], tolerance_nats=0.1, in_flight=True
    )
    back = crossed(new)
    assert (back.version, back.path, back.digest, back.in_flight) == (VERSION, Path("/w"), bytes(32), True)
    assert back.canaries[0].token_ids.tobytes() == canary.token_ids.tobytes()
    assert back.canaries[0].logprobs.tobytes() == canary.logprobs.tobytes()
    assert back.canaries[0].token_ids.dtype == np.int32 and back.canaries[0].logprobs.dtype == np.float32


@given(st.lists(st.floats(-(2.0**100), 0.0, width=32) | st.just(math.nan), max_size=20), st.sampled_from(FinishReason))
def test_any_continuation_crosses_bit_for_bit(logprobs: list[float], finish: FinishReason) -> None:
    made = Continuation(
        token_ids=np.arange(len(logprobs), dtype=np.int32),
        logprobs=np.array(logprobs, np.float32),
        spans=[VersionSpan(start=0, version=VERSION)],
        finish=finish,
    )
    (back,) = crossed([made])
    assert back.logprobs.tobytes() == np.array(logprobs, np.float32).tobytes() and back.finish is finish
    assert back.token_ids.tolist() == made.token_ids.tolist() and back.spans == made.spans
    assert back.logprobs.flags.writeable


@pytest.mark.parametrize("change", [(b'"stall_s"', b'"gone"'), (b"EngineSettings", b"Settings")])
def test_messages_of_another_release_are_told_with_the_fix(change: tuple[bytes, bytes]) -> None:
    with pytest.raises(ConfigError, match=r"another release.*make vllm"):
        decode_line(encode_line(SETTINGS).replace(*change))
