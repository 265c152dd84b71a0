"""The transformers engine with its network on a device: the contract of engines, and the samples of the host."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import CompletionRequest
from swarm.interfaces import Generator as Engine
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import snapshot
from swarm.testing import engine_contract
from swarm.testing.engine_contract import CONTRACT, Check, EngineBench
from swarm.types import Canary, PolicyVersion, Rollout, Sampling
from tests.worlds.pretended_device import device_named

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["pretended", pytest.param("cuda", marks=CUDA)]
START = PolicyVersion(policy_id="a", step=4)
TOKENIZER = CharTokenizer()
tiny_network()  # the model library is imported here, not within the limit of a test
PROMPTS = [[5, 6, 7], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18]]
TEXTS = [[5, 6, 7, 8, 20, 21], [30, 31, 2, 40], [12] * 9]


SHORT = (
    engine_contract.check_an_episode_keeps_every_token,
    engine_contract.check_greedy_answers_do_not_vary,
    engine_contract.check_weights_are_taken_as_a_whole_or_not_at_all,
)


def network(seed: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Random weights large enough that logits depend visibly on the whole context."""
    made = tiny_network(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)
    return made.to(dtype)


def engine(device: torch.device | str, seed: int = 0, dtype: torch.dtype = torch.float32) -> TransformersGenerator:
    return TransformersGenerator(network(seed, dtype).to(device), TOKENIZER, START, 0, max_rows=8)


def bench_on(device: torch.device, dtype: torch.dtype) -> EngineBench:
    """New weights and canaries come from the host, as those of another node do."""
    scores = engine("cpu", 7, dtype).score(TEXTS)
    newer = snapshot(network(7, dtype))

    @contextmanager
    def on_token(one: Engine, call: Callable[[], None]) -> Generator[None]:
        assert isinstance(one, TransformersGenerator)
        handle = one._network.register_forward_hook(lambda *_: call())
        try:
            yield
        finally:
            handle.remove()

    return EngineBench(
        make=lambda: engine(device, 0, dtype),
        start=START,
        prompts=PROMPTS,
        eos_ids=TOKENIZER.eos_ids,
        newer=newer,
        canaries=[Canary(token_ids=np.array(t, np.int32), logprobs=s) for t, s in zip(TEXTS, scores, strict=True)],
        misfit={name: tensor[:1] for name, tensor in newer.items()},
        on_token=on_token,
        max_rows=8,
        tolerance_nats=1e-4 if dtype is torch.float32 else 0.25,
        is_reproducible=dtype is torch.float32,
    )


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
        check(bench_on(device, dtype))


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
