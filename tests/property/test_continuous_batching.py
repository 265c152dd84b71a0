"""Rows that share a cache: whatever runs beside them, and however many may run, the result is the same."""

import copy

import numpy as np
import torch
from engines import sharp_network
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.generation.transformers_engine import TransformersGenerator
from swarm.model.tokenizer import CharTokenizer
from swarm.types import FinishReason, PolicyVersion, Rollout, Sampling

VERSION = PolicyVersion(policy_id="a", step=0)
TOKENIZER = CharTokenizer()


NETWORK = sharp_network()


def _made(max_rows: int, prompts: list[list[int]], num_samples: int, sampling: Sampling) -> list[list[Rollout]]:
    engine = TransformersGenerator(NETWORK, TOKENIZER, VERSION, 3, max_rows=max_rows)
    return engine.generate(prompts, num_samples, sampling, list(range(len(prompts))))


@settings(max_examples=25, deadline=None)
@given(
    shared=st.lists(st.integers(2, 40), max_size=12),  # computed once for the prompts that begin together
    prompts=st.lists(st.lists(st.integers(2, 40), min_size=1, max_size=20), min_size=1, max_size=4),
    num_samples=st.integers(1, 9),
    max_rows=st.integers(1, 12),
    max_new_tokens=st.integers(1, 20),
)
def test_a_result_does_not_depend_on_max_rows(
    shared: list[int], prompts: list[list[int]], num_samples: int, max_rows: int, max_new_tokens: int
) -> None:
    prompts = [shared + prompt for prompt in prompts]
    sampling = Sampling(temperature=1.3, max_new_tokens=max_new_tokens)
    wide = _made(64, prompts, num_samples, sampling)
    narrow = _made(max_rows, prompts, num_samples, sampling)
    for group, same in zip(wide, narrow, strict=True):
        assert len(group) == num_samples
        for one, two in zip(group, same, strict=True):
            assert one.trace is not None and two.trace is not None
            assert one.trace.logprobs is not None and two.trace.logprobs is not None
            assert one.trace.token_ids.tolist() == two.trace.token_ids.tolist()
            assert one.finish is two.finish and one.finish is not FinishReason.ABORTED
            np.testing.assert_allclose(one.trace.logprobs, two.trace.logprobs, atol=1e-4)


def test_a_group_larger_than_max_rows_never_has_more_rows_in_the_cache() -> None:
    network = copy.deepcopy(NETWORK)
    rows: list[int] = []
    widths: list[int] = []

    def note(_module: object, _args: object, kwargs: dict[str, torch.Tensor]) -> None:
        rows.append(kwargs["input_ids"].shape[0])
        widths.append(kwargs["input_ids"].shape[1])

    network.register_forward_pre_hook(note, with_kwargs=True)
    engine = TransformersGenerator(network, TOKENIZER, VERSION, 0, max_rows=4)
    sampling = Sampling(temperature=2.0, max_new_tokens=40)
    groups = engine.generate([[5, 6, 7], [9, 10]], 32, sampling)
    assert [len(group) for group in groups] == [32, 32]
    assert max(rows) == 4 and widths.count(1) == len(widths) - 2  # each prompt prefilled once
    # Room is used at once: the rows that run at each token, but for the last rows of all.
    lengths = [len(r.trace.token_ids) for group in groups for r in group if r.trace is not None]
    running = sum(count for count, width in zip(rows, widths, strict=True) if width == 1)
    assert running == sum(lengths) - len(lengths)  # an ended row is not computed again
    assert sum(count < 4 for count, width in zip(rows, widths, strict=True) if width == 1) <= max(lengths)
