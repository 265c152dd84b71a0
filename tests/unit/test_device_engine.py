"""The transformers engine with its network on a device: the contract of engines, and the samples of the host."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engines import PROMPTS, START, sharp_network, transformers_bench

from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import CompletionRequest
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.testing import engine_contract
from swarm.testing.engine_contract import CONTRACT, Check
from swarm.types import Rollout, Sampling
from tests.worlds.pretended_device import device_named

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["pretended", pytest.param("cuda", marks=CUDA)]
TOKENIZER = CharTokenizer()
tiny_network()  # the model library is imported here, not within the limit of a test


SHORT = (
    engine_contract.check_an_episode_keeps_every_token,
    engine_contract.check_greedy_answers_do_not_vary,
    engine_contract.check_weights_are_taken_as_a_whole_or_not_at_all,
)


def engine(device: torch.device | str) -> TransformersGenerator:
    return TransformersGenerator(sharp_network().to(device), TOKENIZER, START, 0, max_rows=8)


def cases() -> Iterator[Any]:
    """(check, device, dtype): all on a GPU; on the pretended device, which is slow, some, and the rest in a sweep."""
    for check in CONTRACT:
        marks = [] if check in SHORT else [pytest.mark.sweep]
        yield pytest.param(check, "pretended", torch.float32, marks=marks, id=f"{check.__name__}-pretended")
        for dtype in (torch.float32, torch.bfloat16):
            yield pytest.param(check, "cuda", dtype, marks=CUDA, id=f"{check.__name__}-cuda-{dtype}")


@pytest.mark.parametrize(("check", "name", "dtype"), [*cases()])
def test_an_engine_on_a_device_keeps_the_contract(check: Check, name: str, dtype: torch.dtype) -> None:
    with device_named(name) as device:
        check(transformers_bench(dtype, device=device))


def ids_of(groups: list[list[Rollout]]) -> list[list[int]]:
    return [rollout.trace.token_ids.tolist() for group in groups for rollout in group if rollout.trace is not None]


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(
    "sampling", [Sampling(max_new_tokens=12), Sampling(max_new_tokens=12, temperature=0.7, top_k=5, top_p=0.9)]
)
def test_a_device_samples_what_the_host_samples(name: str, sampling: Sampling) -> None:
    """Random numbers are the row's own, so that only a choice within the rounding of its mass may differ."""
    expected = ids_of(engine("cpu").generate(PROMPTS, 8, sampling, [1, 2, 3]))
    with device_named(name) as device:
        found = ids_of(engine(device).generate(PROMPTS, 8, sampling, [1, 2, 3]))
    num_alike = sum(one == other for one, other in zip(found, expected, strict=True))
    assert num_alike == 24 if name == "pretended" else num_alike >= 22


@pytest.mark.parametrize("name", DEVICES)
def test_completions_of_a_device_come_with_their_likeliest_tokens(name: str) -> None:
    request = CompletionRequest(
        prompt_ids=PROMPTS[2], sampling=Sampling(temperature=0.0, max_new_tokens=6), num_top=3, seed=1
    )
    expected = engine("cpu").complete(request).result()
    with device_named(name) as device:
        one = engine(device)
        found = one.complete(request).result()
        one.close()
    assert found.token_ids == expected.token_ids and [len(top) for top in found.top] == [3] * len(found.token_ids)
    assert found.logprobs is not None and expected.logprobs is not None
    np.testing.assert_allclose(np.array(found.logprobs), np.array(expected.logprobs), atol=1e-4)
