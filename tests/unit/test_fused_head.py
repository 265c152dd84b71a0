"""The fused output layer against plain autograd over whole logits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks._fused_autograd import fused_logprobs
from swarm.errors import ConfigError
from swarm.learn.fused_head import Head, Scores, Upstream, fused_backward, score_hidden
from swarm.model.network import tiny_network
from swarm.objectives.part import Prediction

TOKENS, HIDDEN, VOCAB = 23, 7, 19
FAMILIES = {
    "llama": {},
    "granite": {"scale": 1 / 8.0},
    "cohere": {"scale": 0.0625},
    "gemma": {"cap": 3.0},
    "all": {"scale": 1.7, "cap": 2.0},
}


def problem(family: str = "llama", dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[Any, ...]:
    """(head, hidden, targets, temperature), everything trainable."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    head = Head(weight=normal(VOCAB, HIDDEN), bias=normal(VOCAB) if bias else None, **FAMILIES[family])
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    temperature = 0.5 + torch.rand(TOKENS, generator=generator)
    return head, normal(TOKENS, HIDDEN), targets, temperature


def plain(head: Head, hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Whole logits and torch's own log_softmax."""
    logits = nn.functional.linear(hidden, head.weight, head.bias).to(head.dtype) * head.scale
    if head.cap:
        logits = head.cap * torch.tanh(logits / head.cap)
    table = torch.log_softmax(logits / temperature[:, None].to(logits.dtype), dim=1)
    return table.gather(1, targets[:, None]).squeeze(1), -(table.exp() * table).sum(dim=1)


def upstream() -> tuple[Tensor, Tensor]:
    """Random, with tokens that were clipped."""
    generator = torch.Generator().manual_seed(4)
    first, second = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    first[5:9] = second[6:9] = 0
    return first, second


def leaf_tensors(head: Head, hidden: Tensor) -> list[Tensor]:
    return [hidden, head.weight] if head.bias is None else [hidden, head.weight, head.bias]


def close(found: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10 if atol < 1e-10 else 1e-4, atol=atol)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("which", ["both", "logprob", "entropy"])
def test_scores_and_gradients_are_those_of_whole_logits(family: str, bias: bool, rows: int, which: str) -> None:
    head, hidden, targets, temperature = problem(family, bias=bias)
    found = fused_logprobs(head, hidden, targets, temperature, chunk_elements=rows * VOCAB)
    expected = plain(head, hidden, targets, temperature)
    for a, b in zip(found, expected, strict=True):
        close(a, b)
    chosen = {"both": (0, 1), "logprob": (0,), "entropy": (1,)}[which]

    def gradients(scores: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        loss = torch.stack([(scores[index] * upstream()[index]).sum() for index in chosen]).sum()
        return torch.autograd.grad(loss, leaf_tensors(head, hidden))

    for a, b in zip(gradients(found), gradients(expected), strict=True):
        close(a, b)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_pulling_while_the_logits_are_there_gives_the_same_gradients(
    family: str, rows: int, with_entropy: bool
) -> None:
    head, hidden, targets, temperature = problem(family)
    scores, asked = plain(head, hidden, targets, temperature), list[slice]()
    by_logprob, by_entropy = upstream()
    loss = (scores[0] * by_logprob).sum() + (scores[1] * by_entropy).sum() * with_entropy
    expected = torch.autograd.grad(loss, leaf_tensors(head, hidden))

    def rule(run: slice, found: Scores) -> Upstream:
        asked.append(run)
        close(found.logprobs, scores[0][run].detach())
        close(found.entropy, scores[1][run].detach())
        return by_logprob[run], by_entropy[run] if with_entropy else None

    segments = [2, 3, 9, 14, 15, TOKENS]
    weight_grad, bias_grad = torch.zeros_like(head.weight), torch.zeros_like(head.bias)
    by_hidden = fused_backward(
        head,
        hidden.detach(),
        targets,
        temperature,
        segments,
        rule,
        weight_grad,
        bias_grad,
        chunk_elements=rows * VOCAB,
    )
    for a, b in zip((by_hidden, weight_grad, bias_grad), expected, strict=True):
        close(a, b)
    assert [run.start for run in asked] == [0, *(run.stop for run in asked[:-1])] and asked[-1].stop == TOKENS
    assert {run.stop for run in asked} <= set(segments), "a run that belongs together was cut"
    assert all(run.stop - run.start <= max(rows, 8) for run in asked)


def test_a_run_that_fits_one_chunk_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden, targets, temperature = problem()
    sizes, original = list[int](), Head.logits

    def noted(self: Head, hidden: Tensor) -> Tensor:
        sizes.append(hidden.shape[0])
        return original(self, hidden)

    monkeypatch.setattr(Head, "logits", noted)

    def rule(run: slice, _: Scores) -> Upstream:
        return torch.ones(run.stop - run.start), None

    fused_backward(head, hidden, targets, temperature, [5, 10, 15, 20, TOKENS], rule, None, chunk_elements=10 * VOCAB)
    assert sizes == [10, 10, 3]
    sizes.clear()
    fused_backward(head, hidden, targets, temperature, [TOKENS], rule, None, chunk_elements=10 * VOCAB)
    assert sizes == [10, 10, 3, 10, 10, 3]


def test_float32_scores_stay_finite_and_exact_for_tokens_of_no_probability() -> None:
    head = Head(weight=torch.eye(3))
    hidden = torch.tensor([[300.0, 0.0, -300.0], [0.0, 0.0, 0.0]])
    targets, temperature = torch.tensor([2, 1]), torch.tensor([1.0, 0.5])
    scores = score_hidden(head, hidden, targets, temperature)
    assert scores.logprobs[0] == -600 and scores.entropy[0] == 0
    assert scores.logprobs[1].item() == pytest.approx(-1.0986123)
    found = fused_backward(head, hidden, targets, temperature, [2], lambda _, __: (torch.ones(2), torch.ones(2)), None)
    assert found.isfinite().all()
    close(found[0], torch.tensor([-1.0, 0.0, 1.0]), atol=1e-6)


def test_bfloat16_weights_are_scored_in_float32_and_their_gradient_added_up_in_it() -> None:
    head, hidden, targets, temperature = problem(dtype=torch.bfloat16, bias=False)
    total = torch.zeros(VOCAB, HIDDEN)
    by_logprob = upstream()[0].float()
    ends = range(1, TOKENS + 1)
    fused_backward(head, hidden.detach(), targets, temperature, ends, lambda run, _: (by_logprob[run], None), total)
    logprobs, _ = plain(head, hidden, targets, temperature)
    (expected,) = torch.autograd.grad((logprobs * by_logprob).sum(), [head.weight])
    assert logprobs.dtype == torch.float32 and total.dtype == torch.float32
    torch.testing.assert_close(total, expected.float(), rtol=0.05, atol=0.05)
    wide = Head(weight=head.weight.detach().float())  # the same numbers, nothing rounded on the way
    exact = torch.zeros(VOCAB, HIDDEN)
    arguments = (targets, temperature, ends, lambda run, _: (by_logprob[run], None), exact)
    fused_backward(wide, hidden.detach().float(), *arguments)
    error = {
        name: float((value - exact).norm() / exact.norm()) for name, value in (("ours", total), ("torch", expected))
    }
    assert error["ours"] < error["torch"], error


def test_probes_see_each_token_once_with_logits_before_the_temperature() -> None:
    head, hidden, targets, temperature = problem("gemma")
    raw = plain(head, hidden, targets, torch.ones(TOKENS))[0].detach()

    def probe(seen: Prediction) -> Tensor:
        assert seen.hidden.shape == (seen.targets.shape[0], HIDDEN)
        return torch.log_softmax(seen.logits, dim=1).gather(1, seen.targets[:, None]).squeeze(1)

    found = score_hidden(head, hidden, targets, temperature, {"untempered": probe}, chunk_elements=4 * VOCAB)
    close(found.probes["untempered"], raw)
    close(found.logprobs, plain(head, hidden, targets, temperature)[0].detach())


def test_the_head_of_a_network_carries_its_family() -> None:
    network: Any = tiny_network(seed=0)
    assert Head.of(network).scale == 1 and Head.of(network).cap == 0
    assert Head.of(network).weight is network.get_input_embeddings().weight
    network.config.logits_scaling, network.config.final_logit_softcapping = 4.0, 30.0
    assert Head.of(network).scale == 0.25 and Head.of(network).cap == 30
    network.get_output_embeddings = lambda: nn.Identity()
    with pytest.raises(ConfigError, match="its output layer is a Identity"):
        Head.of(network)
