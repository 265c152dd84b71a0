"""The fused output layer as a differentiable function: tests check it by finite differences, benchmarks compare it.

Invariant: the same numbers as `swarm.learn.fused_head`, which computes each chunk of logits once where this computes it
twice.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from swarm.learn.fused_head import CHUNK_ELEMENTS, Head, Scores, Upstream, fused_backward, score_hidden


def fused_logprobs(
    head: Head, hidden: Tensor, targets: Tensor, temperature: Tensor, chunk_elements: int = CHUNK_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Log-probs [n] and entropies [n], differentiable in hidden states, weight and bias.

    The backward pass computes each chunk of logits a second time. Where upstream gradients are known once a
    chunk is scored, `fused_backward` saves that.
    """
    outputs = _Fused.apply(hidden, head.weight, head.bias, targets, temperature, head, chunk_elements)
    return cast("tuple[Tensor, Tensor]", outputs)


class _Fused(torch.autograd.Function):
    """Autograd function behind `fused_logprobs`, with gradients by log-prob and by entropy."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        hidden, _, _, targets, temperature, head, chunk_elements = arguments
        scores = score_hidden(head, hidden, targets, temperature, None, chunk_elements)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, head.weight, head.bias, targets, temperature)
        ctx.head, ctx.chunk_elements = head, chunk_elements
        return scores.logprobs, scores.entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature = ctx.saved_tensors
        by_logprob, by_entropy = grad_outputs
        if by_logprob is None:
            by_logprob = torch.zeros(targets.shape, dtype=ctx.head.dtype, device=targets.device)
        wanted = ctx.needs_input_grad[1:3]
        weight_grad = torch.zeros_like(weight, dtype=ctx.head.dtype) if wanted[0] else None
        bias_grad = torch.zeros_like(bias, dtype=ctx.head.dtype) if wanted[1] else None

        def known(run: slice, _: Scores) -> Upstream:
            return by_logprob[run], None if by_entropy is None else by_entropy[run]

        hidden_grad = fused_backward(
            replace(ctx.head, weight=weight, bias=bias),
            hidden,
            targets,
            temperature,
            range(1, targets.shape[0] + 1),
            known,
            weight_grad,
            bias_grad,
            chunk_elements=ctx.chunk_elements,
        )
        by_weight, by_bias = (None if each is None else each.to(weight.dtype) for each in (weight_grad, bias_grad))
        return hidden_grad, by_weight, by_bias, None, None, None, None
