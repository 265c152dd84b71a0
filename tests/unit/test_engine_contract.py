"""The contract of engines for the one in this process: transformers in two dtypes."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import Generator as Engine
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import snapshot
from swarm.testing.engine_contract import CONTRACT, Check, EngineBench
from swarm.testing.tiny_models import tiny_qwen3
from swarm.types import Canary, FloatArray, PolicyVersion

START = PolicyVersion(policy_id="a", step=4)
PROMPTS = [[5, 6, 7], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18]]
TEXTS = [[5, 6, 7, 8, 20, 21], [30, 31, 2, 40], [12] * 9]


def _network(seed: int, dtype: torch.dtype, make: Callable[[int], torch.nn.Module]) -> torch.nn.Module:
    """Random weights large enough that logits depend visibly on the whole context."""
    network = make(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)
    return network.to(dtype)


def _full_forward(network: torch.nn.Module, ids: list[int]) -> FloatArray:
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    picked = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    return np.concatenate([np.array([np.nan], np.float32), picked.numpy()])


def _transformers(dtype: torch.dtype, kind: Callable[[int], torch.nn.Module] = tiny_network) -> EngineBench:
    newer = _network(7, dtype, kind)

    @contextmanager
    def on_token(engine: Engine, call: Callable[[], None]) -> Generator[None]:
        assert isinstance(engine, TransformersGenerator)
        handle = engine._network.register_forward_hook(lambda *_: call())
        try:
            yield
        finally:
            handle.remove()

    return EngineBench(
        make=lambda: TransformersGenerator(_network(0, dtype, kind), CharTokenizer(), START, 0, max_rows=8),
        start=START,
        prompts=PROMPTS,
        eos_ids=CharTokenizer().eos_ids,
        newer=snapshot(newer),
        canaries=[Canary(token_ids=np.array(text, np.int32), logprobs=_full_forward(newer, text)) for text in TEXTS],
        misfit={name: tensor[:1] for name, tensor in snapshot(newer).items()},
        on_token=on_token,
        max_rows=8,
        tolerance_nats=1e-4 if dtype is torch.float32 else 0.25,  # bfloat16: of one token with logits about 10
        is_reproducible=dtype is torch.float32,  # in bfloat16 the company of a row can decide a close choice
    )


BENCHES: dict[str, Callable[[], EngineBench]] = {
    "transformers-float32": lambda: _transformers(torch.float32),
    "transformers-bfloat16": lambda: _transformers(torch.bfloat16),
    "transformers-float32-qwen3": lambda: _transformers(torch.float32, tiny_qwen3),
}


@pytest.fixture(scope="module", params=BENCHES)
def bench(request: pytest.FixtureRequest) -> EngineBench:
    return BENCHES[request.param]()


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_an_engine_keeps_the_contract(bench: EngineBench, check: Check) -> None:
    check(bench)
