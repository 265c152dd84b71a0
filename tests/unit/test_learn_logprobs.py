"""Packing and scoring: exact whatever the layout of the rows."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks._fused_autograd import fused_logprobs
from swarm.errors import ConfigError
from swarm.learn.fused_head import Head
from swarm.learn.logprobs import check_head, hidden_states, score_tokens
from swarm.learn.packing import LEAST_ALIKE, MIN_FILL, pack
from swarm.objectives.batch import Batch
from swarm.testing.batches import toy_batch

VOCAB = 23


class Rotary64(torch.nn.Module):
    """The rotary embedding in float64: the library computes it in float32 whatever the network's dtype."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size // config.num_attention_heads
        self.frequencies = 10_000.0 ** (-torch.arange(0, size, 2).double() / size)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[:, :, None] * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def tiny_llama(attention: str = "sdpa", tied: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(7)
    options: dict[str, Any] = {"attn_implementation": attention}  # unknown to the library's types
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.4,
        **options,
    )
    network: Any = LlamaForCausalLM(config)
    network.to(dtype).eval()
    network.model.rotary_emb = Rotary64(config)
    norms = [
        (layer, name) for layer in network.model.layers for name in ("input_layernorm", "post_attention_layernorm")
    ]
    for owner, name in [*norms, (network.model, "norm")]:  # the library's casts to float32
        setattr(owner, name, torch.nn.RMSNorm(config.hidden_size, eps=1e-6, dtype=dtype))
    return network


def batch_of(prompt_lengths: list[int], response_lengths: list[list[int]], seed: int = 0) -> Batch:
    """Random tokens; every third response has an untrained token in its middle."""
    generator = torch.Generator().manual_seed(seed)
    flat = [length for group in response_lengths for length in group]
    mask = torch.zeros(len(flat), max(flat), dtype=torch.bool)
    for index, length in enumerate(flat):
        mask[index, :length] = True
        if index % 3 == 0 and length > 2:
            mask[index, length // 2] = False
    sizes = torch.tensor([len(group) for group in response_lengths])
    return toy_batch(
        torch.zeros(len(flat)),
        mask,
        groups=torch.repeat_interleave(torch.arange(len(sizes)), sizes),
        token_ids=torch.randint(0, VOCAB, mask.shape, generator=generator),
        temperature=0.5 + torch.rand(len(flat), generator=generator),
        prompts=tuple(torch.randint(0, VOCAB, (p,), generator=generator) for p in prompt_lengths),
    )


RAGGED = batch_of([5, 1, 9], [[4, 1, 7], [6, 2], [3, 3, 5, 2]])


def alike(batch: Batch, num_alike: int) -> Batch:
    """The batch with prompts that begin with the same tokens, each before its own."""
    begin = torch.arange(num_alike) % VOCAB
    return replace(batch, prompts=tuple(torch.cat([begin, prompt]) for prompt in batch.prompts))


ALIKE = alike(RAGGED, 20)
OF_ONE_PROMPT = replace(ALIKE, prompts=(ALIKE.prompts[0],) * 3)
TWO_FAMILIES = replace(ALIKE, prompts=(*ALIKE.prompts[:2], torch.arange(25).flip(0) % VOCAB))


def in_conversations(batch: Batch, of_columns: list[int]) -> Batch:
    """The batch with each column in a conversation; the first two of each but the first are untrained, as openings."""
    numbers = torch.tensor(of_columns)[: batch.mask.shape[1]]
    mask = batch.mask.clone()
    for number in range(1, int(numbers.max()) + 1):
        mask[:, torch.nonzero(numbers == number)[:2, 0]] = False
    return replace(batch, mask=mask, conversation_ids=numbers.expand(mask.shape), behavior_logprobs=-1.0 * mask)


LONG = batch_of([5, 1], [[12, 9, 16], [16, 16]])
ALTERNATING = in_conversations(LONG, [0, 1, 1, 1, 0, 0, 1, 2, 2, 0, 1, 1, 2, 2, 0, 1])
SUMMED_UP = in_conversations(LONG, [0] * 5 + [1] * 6 + [2] * 5)


def plain_scores(network: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """A forward pass per conversation, whole logits, no mask, no packing: log-probs and entropies [N, L]."""
    logprobs, entropy = torch.zeros(batch.mask.shape, dtype=torch.float64), torch.zeros(batch.mask.shape).double()
    numbers = torch.zeros_like(batch.token_ids) if batch.conversation_ids is None else batch.conversation_ids
    for i in range(batch.num_rollouts):
        for number in numbers[i].unique().tolist():
            own = torch.nonzero(numbers[i] == number)[:, 0]
            ids = batch.token_ids[i][own]
            prompt = ids[:0] if number else batch.prompts[int(batch.group_index[i])]
            logits = network(torch.cat([prompt, ids])[None]).logits[0] / batch.temperature[i].double()
            table = torch.log_softmax(logits, dim=-1)
            table = torch.cat([table[:1], table])[len(prompt) : -1]  # what predicts an opening is not asked for
            logprobs[i] = logprobs[i].index_put((own,), table.gather(1, ids[:, None])[:, 0])
            entropy[i] = entropy[i].index_put((own,), -(table.exp() * table).sum(-1))
    return torch.where(batch.mask, logprobs, 0.0), torch.where(batch.mask, entropy, 0.0)


def packed_scores(
    network: Any, batch: Batch, budget: int, share: bool, chunk: int, most_alike: int = 0
) -> tuple[Tensor, Tensor]:
    logprobs, entropy = torch.zeros(batch.mask.shape, dtype=torch.float64), torch.zeros(batch.mask.shape).double()
    for packed in pack(batch, budget, math.inf if share else -math.inf, most_alike=most_alike):
        if torch.is_grad_enabled():
            hidden = hidden_states(network, packed)
            values, entropies = fused_logprobs(Head.of(network), hidden, packed.targets, packed.temperature, chunk)
        else:
            scores = score_tokens(network, packed, chunk_elements=chunk)
            values, entropies = scores.logprobs, scores.entropy
        place = (packed.rollouts, packed.positions)
        logprobs, entropy = logprobs.index_put(place, values), entropy.index_put(place, entropies)
    return logprobs, entropy


def gradients(network: Any, scores: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Of a random linear function of log-probs and entropies, by parameter."""
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randn(scores[0].shape, generator=generator).double() for _ in range(2))
    network.zero_grad()
    (scores[0] * first + scores[1] * second).sum().backward()
    return {name: param.grad.clone() for name, param in network.named_parameters()}


@pytest.mark.parametrize("batch", [ALTERNATING, SUMMED_UP])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [10_000, 25])
def test_a_token_sees_its_own_conversation_alone(batch: Batch, share: bool, budget: int) -> None:
    network = tiny_llama()
    expected = plain_scores(network, batch)
    found = packed_scores(network, batch, budget, share, chunk=5 * VOCAB)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    as_one = packed_scores(network, replace(batch, conversation_ids=None), budget, share, chunk=5 * VOCAB)
    assert not torch.allclose(as_one[0], expected[0])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [10_000, 25])
def test_packed_scores_and_gradients_equal_plain_forward_passes(
    attention: str, tied: bool, share: bool, budget: int
) -> None:
    network = tiny_llama(attention, tied)
    atol = 1e-10 if attention == "sdpa" else 2e-5  # eager attention has a float32 softmax
    expected = plain_scores(network, RAGGED)
    found = packed_scores(network, RAGGED, budget, share, chunk=5 * VOCAB)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)
    wanted = gradients(network, expected)
    for name, gradient in gradients(network, found).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def test_scores_without_gradient_are_the_same_bits() -> None:
    network = tiny_llama()
    with torch.no_grad():
        zero_variance = packed_scores(network, RAGGED, 100, True, chunk=3 * VOCAB)
    with_signal = packed_scores(network, RAGGED, 100, True, chunk=3 * VOCAB)
    assert all(torch.equal(a, b.detach()) for a, b in zip(zero_variance, with_signal, strict=True))


def test_no_chunk_of_logits_exceeds_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    network, sizes, plain = tiny_llama(), list[int](), Head.logits

    def noted(head: Head, hidden: Tensor) -> Tensor:
        logits = plain(head, hidden)
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(Head, "logits", noted)
    scores = packed_scores(network, RAGGED, 10_000, True, chunk=4 * VOCAB)
    gradients(network, scores)
    assert max(sizes) == 4 * VOCAB and sum(sizes) == 2 * VOCAB * RAGGED.num_tokens


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [16, 60, 4096])
def test_plan_covers_each_trained_token_once_within_the_budget(share: bool, budget: int) -> None:
    plan = pack(RAGGED, budget, math.inf if share else -math.inf)
    places = [place for p in plan for place in zip(p.rollouts.tolist(), p.positions.tolist(), strict=True)]
    assert (
        sorted(places) == RAGGED.mask.nonzero().tolist() or sorted(map(list, places)) == RAGGED.mask.nonzero().tolist()
    )
    for packed in plan:
        assert packed.token_ids.numel() <= budget
        assert (packed.targets == RAGGED.token_ids[packed.rollouts, packed.positions]).all()
    members = [member for packed in plan for member in packed.members]
    assert len(members) == len(set(members)) == RAGGED.num_rollouts


def test_a_shared_prompt_appears_once_and_a_final_token_never() -> None:
    (packed,) = pack(batch_of([3], [[1, 2, 4]]), 100)
    assert packed.segment_ids.tolist() == [[0, 0, 0, 1, 2, 2, 2]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 3, 4, 5]]
    seen = packed.attention_mask()[0]
    assert seen[6].tolist() == [True, True, True, False, True, True, True]


@pytest.mark.parametrize(
    ("batch", "budget", "most_alike", "rows"),
    [
        (ALIKE, 10_000, 10_000, [20 + 5 + 3 + 0 + 6 + 1 + 5 + 1 + 9 + 2 + 2 + 4 + 1]),
        (ALIKE, 10_000, 0, None),
        (ALIKE, 60, 10_000, None),
        (ALIKE, 25, 10_000, None),
        (OF_ONE_PROMPT, 10_000, 10_000, None),
        (TWO_FAMILIES, 10_000, 10_000, None),
        (alike(ALTERNATING, 30), 10_000, 10_000, None),
        (alike(ALTERNATING, 30), 60, 10_000, None),
    ],
)
def test_prompts_that_begin_alike_share_that_and_nothing_else(
    batch: Batch, budget: int, most_alike: int, rows: list[int] | None
) -> None:
    network = tiny_llama()
    expected = plain_scores(network, batch)
    found = packed_scores(network, batch, budget, True, chunk=5 * VOCAB, most_alike=most_alike)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    wanted = gradients(network, expected)
    for name, gradient in gradients(network, found).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    plan = pack(batch, budget, most_alike=most_alike)
    assert rows is None or [packed.token_ids.shape[1] for packed in plan] == rows
    assert max(packed.token_ids.shape[1] for packed in plan) <= max(budget, 40), "a response alone may exceed it"


def test_the_example_of_packed_rows() -> None:
    a, b, c, d, e, f, x, y, z = range(9)
    begin = [22] * LEAST_ALIKE
    batch = toy_batch(
        torch.zeros(3),
        torch.tensor([[True, True, False], [True, True, True], [True, True, False]]),
        groups=torch.tensor([0, 0, 1]),
        token_ids=torch.tensor([[c, d, 0], [e, f, 9], [y, z, 0]]),
        prompts=(torch.tensor([*begin, a, b]), torch.tensor([*begin, a, x])),
    )
    (packed,) = pack(batch, 100, most_alike=100)
    size = LEAST_ALIKE + 1  # `a` is part of what is alike
    assert packed.token_ids[0, size - 1 :].tolist() == [a, b, c, e, f, x, y]
    assert packed.position_ids[0, size - 1 :].tolist() == [16, 17, 18, 18, 19, 17, 18]
    assert packed.segment_ids[0, size - 1 :].tolist() == [0, 1, 2, 3, 3, 4, 5]
    assert packed.prompt_ids[0, size - 1 :].tolist() == [0, 1, 1, 1, 1, 4, 4]


def test_prompts_that_begin_alike_share_a_row_where_that_is_worth_it() -> None:
    def num_rows(batch: Batch, num_alike: int, break_even: float, num_ranks: int = 1) -> int:
        plan = pack(alike(batch, num_alike), 10_000, break_even, num_ranks, most_alike=1000)
        return sum(packed.token_ids.shape[0] for packed in plan)

    long = batch_of([5, 5], [[60, 60], [60, 60]])  # rows of 143 tokens; one of 266 looks at 29,858 pairs more
    assert [num_rows(long, 20, break_even) for break_even in (1450.0, 1550.0)] == [2, 1]
    assert num_rows(RAGGED, 20, 1000.0) == 1
    assert num_rows(RAGGED, LEAST_ALIKE - 1, 1000.0) == num_rows(RAGGED, 20, 1000.0, num_ranks=2) == 3


def test_a_prompt_is_shared_only_where_its_copy_costs_more_than_the_longer_row() -> None:
    def rows(prompt: int, response: int) -> int:
        batch = batch_of([prompt], [[response] * 8])
        return sum(packed.token_ids.shape[0] for packed in pack(batch, 100_000, break_even=3000))

    assert rows(prompt=500, response=60) == 1
    assert 1 < rows(prompt=32, response=192) < 8
    assert rows(prompt=1, response=192) == 8


def test_padding_share_is_below_a_tenth_on_mixed_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(30, 90, (24,), generator=generator).tolist()
    responses = [torch.randint(1, 40, (8,), generator=generator).tolist() for _ in prompts]
    for share in (True, False):
        plan = pack(batch_of(prompts, responses), 4096, math.inf if share else -math.inf)
        num_padding = sum(packed.num_padding for packed in plan)
        assert num_padding < (1 - MIN_FILL) * sum(packed.token_ids.numel() for packed in plan)


def test_a_member_without_trained_tokens_costs_no_compute() -> None:
    mask = RAGGED.mask.clone()
    mask[:3] = False
    plan = pack(replace(RAGGED, mask=mask), 4096)
    assert sum(packed.token_ids.shape[0] for packed in plan) == 2


def windowed(kind: str) -> Any:
    """A network with an attention window of 4 tokens in all layers (mistral), or in every second layer."""
    kinds: Any = {} if kind == "mistral" else {"layer_types": ["sliding_attention", "full_attention"]}
    shape: Any = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "initializer_range": 0.4,
    }
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **shape, **kinds, sliding_window=4, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config).double().eval()


@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
@pytest.mark.parametrize("batch", [RAGGED, ALIKE, ALTERNATING])
def test_a_token_sees_its_window_alone_also_behind_other_responses(kind: str, batch: Batch) -> None:
    network = windowed(kind)
    with torch.no_grad():
        expected = plain_scores(network, batch)
        for share in (True, False):
            found = packed_scores(network, batch, 10_000, share, chunk=5 * VOCAB, most_alike=10_000)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-5)  # rotations and some norms are float32
    check_head(network)
    assert network.config.sliding_window == 4


def test_a_network_whose_window_the_learner_does_not_know_is_refused() -> None:
    network = tiny_llama()
    network.config.sliding_window = 8  # which a Llama does not have
    with pytest.raises(ConfigError, match="LlamaForCausalLM computes its logits in a way"):
        check_head(network)
