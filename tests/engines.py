"""Transformers engines over tiny random networks, and the bench of the engines' contract for them."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np
import torch

from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import Generator as Engine
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import snapshot
from swarm.testing.engine_contract import EngineBench
from swarm.types import Canary, FloatArray, PolicyVersion

START = PolicyVersion(policy_id="a", step=4)
PROMPTS = [[5, 6, 7], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18]]
TEXTS = [[5, 6, 7, 8, 20, 21], [30, 31, 2, 40], [12] * 9]


def sharp_network(seed: int = 0, make: Callable[[int], torch.nn.Module] = tiny_network) -> torch.nn.Module:
    """Random weights large enough that logits depend visibly on the whole context."""
    network = make(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)
    return network


def full_forward(network: torch.nn.Module, ids: list[int]) -> FloatArray:
    """Log-probs of a text without cache, padding or batch; the first token has none."""
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    picked = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    return np.concatenate([np.array([np.nan], np.float32), picked.numpy()])


def canaries_of(network: torch.nn.Module) -> list[Canary]:
    """TEXTS with the log-probs that the network gives them."""
    return [Canary(token_ids=np.array(text, np.int32), logprobs=full_forward(network, text)) for text in TEXTS]


@contextmanager
def on_token(engine: Engine, call: Callable[[], None]) -> Generator[None]:
    """Calls after each forward pass of a transformers engine."""
    assert isinstance(engine, TransformersGenerator)
    handle = engine._network.register_forward_hook(lambda *_: call())
    try:
        yield
    finally:
        handle.remove()


def transformers_bench(
    dtype: torch.dtype,
    make: Callable[[int], torch.nn.Module] = tiny_network,
    device: torch.device | str = "cpu",
) -> EngineBench:
    """Engines on a device; new weights and canaries come from the host, as those of another node do."""
    newer = sharp_network(7, make).to(dtype)

    def engine() -> TransformersGenerator:
        network = sharp_network(0, make).to(dtype).to(device)
        return TransformersGenerator(network, CharTokenizer(), START, 0, max_rows=8)

    return EngineBench(
        make=engine,
        start=START,
        prompts=PROMPTS,
        eos_ids=CharTokenizer().eos_ids,
        newer=snapshot(newer),
        canaries=canaries_of(newer),
        misfit={name: tensor[:1] for name, tensor in snapshot(newer).items()},
        on_token=on_token,
        max_rows=8,
        tolerance_nats=1e-4 if dtype is torch.float32 else 0.25,  # bfloat16: of one token with logits about 10
        is_reproducible=dtype is torch.float32,  # in bfloat16 the company of a row can decide a close choice
    )
