"""The contract of engines for the one in this process: transformers in two dtypes."""

from collections.abc import Callable

import pytest
import torch
from engines import transformers_bench

from swarm.testing.engine_contract import CONTRACT, Check, EngineBench
from swarm.testing.tiny_models import tiny_qwen3

BENCHES: dict[str, Callable[[], EngineBench]] = {
    "transformers-float32": lambda: transformers_bench(torch.float32),
    "transformers-bfloat16": lambda: transformers_bench(torch.bfloat16),
    "transformers-float32-qwen3": lambda: transformers_bench(torch.float32, tiny_qwen3),
}


@pytest.fixture(scope="module", params=BENCHES)
def bench(request: pytest.FixtureRequest) -> EngineBench:
    return BENCHES[request.param]()


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_an_engine_keeps_the_contract(bench: EngineBench, check: Check) -> None:
    check(bench)
