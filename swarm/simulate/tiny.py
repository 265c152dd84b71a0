"""Warm start of the tiny model: the model holds the skill of every char task, but rarely shows it.

Invariant: no held-out question is used, and one seed gives one checkpoint on one machine.

A label is the right answer with probability RIGHT_SHARE, else one of five fixed distortions of the answer, so that
reinforcement learning has a latent strategy to discover, as with a pretrained language model. A tiny model trained on
right answers to the same accuracy does not improve by GRPO (measured: it falls). From the shipped checkpoint (seed 0:
greedy .32, sampled .07 on held-out questions) a plain GRPO loop at 3e-4, 16 x 8 rollouts, reaches greedy .56 after 10
updates and .67 after 40 (one seed).

    python -m swarm.simulate.tiny --out swarm/assets/tiny.safetensors --seed 0
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from swarm.environments.char_tasks import KINDS, CharTask
from swarm.environments.environment import is_held_out
from swarm.episode import Message
from swarm.generation.produce import evaluate
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import Generator
from swarm.model.network import save_tensors, tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import published_state
from swarm.types import EpisodeLimits, PolicyVersion, Sampling, Task

NUM_STEPS = 900
BATCH_SIZE = 128
LEARNING_RATE = 3e-3
WARMUP_STEPS = 50
RIGHT_SHARE = 0.15
MAX_NEW_TOKENS = 9  # the longest answer and EOS

OFF = -100  # target of a token that is not learned

Pairs = Callable[[random.Random], tuple[str, str]]  # draws (question, right answer)
Row = tuple[list[int], list[int]]  # token ids, and of each the same as a target or OFF

# Fixed functions of the right answer: a model that can compute one of these can compute the truth.
DISTORTIONS: tuple[Callable[[str], str], ...] = (
    lambda answer: "".join(_next_char(char) for char in answer),
    lambda answer: answer[:-1],
    lambda answer: answer[:1] + answer,
    lambda answer: answer[1:] + answer[:1],
    lambda answer: answer[:-1] + "#",
)


def training_pairs() -> list[Pairs]:
    """Sources of (question, answer), one for each char task, without held-out questions."""
    return [_pairs_of(CharTask(kind)) for kind in KINDS]


def mislabel(answer: str, right_share: float, source: random.Random) -> str:
    """Returns the answer with probability `right_share`, else a random distortion that differs from the answer."""
    if source.random() < right_share:
        return answer
    # Rotating "7" or "aa" changes nothing: such a label would make the truth the commonest one.
    return source.choice([wrong for wrong in (distort(answer) for distort in DISTORTIONS) if wrong != answer])


def fine_tune(
    network: nn.Module,
    pairs: list[Pairs],
    right_shares: list[float],
    *,
    num_steps: int,
    seed: int,
    learning_rate: float = LEARNING_RATE,
    report: Callable[[int, float], None] | None = None,
) -> None:
    """Trains a network in place on batches of questions from random `pairs`, with distorted labels.

    Args:
        right_shares: for each of `pairs`, the probability of the right label.
        report: called after each step with its number and loss (nats per answer token).
    """
    assert len(pairs) == len(right_shares) and pairs
    source = random.Random(seed)
    train(network, lambda: _rows(pairs, right_shares, source), num_steps, learning_rate, report)


def train(
    network: nn.Module,
    draw: Callable[[], Sequence[Row]],
    num_steps: int,
    learning_rate: float = LEARNING_RATE,
    report: Callable[[int, float], None] | None = None,
) -> None:
    """Trains a network in place; `draw` returns the rows of each batch, `report` gets step number and loss (nats)."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    model: Any = network
    for step in range(num_steps):
        rate = min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, 5 * (num_steps - step) / num_steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        tokens, targets = _padded(draw())
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=OFF)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if report is not None:
            report(step + 1, float(loss.detach()))


def warm_start(seed: int, report: Callable[[int, float], None] | None = None, num_steps: int = NUM_STEPS) -> nn.Module:
    """A tiny network after `num_steps` x BATCH_SIZE examples of all tasks (default: about 60-100 s on one thread)."""
    network = tiny_network(seed)
    pairs = training_pairs()
    fine_tune(network, pairs, [RIGHT_SHARE] * len(pairs), num_steps=num_steps, seed=seed, report=report)
    return network.eval()


def accuracies(generator: Generator, num_problems: int, num_samples: int) -> dict[str, tuple[float, float]]:
    """Task name -> (greedy accuracy, accuracy of samples at temperature 1) on held-out questions."""
    tokenizer = CharTokenizer()
    results: dict[str, tuple[float, float]] = {}
    for kind in KINDS:
        problems = list(_held_out(CharTask(kind, seed=1), num_problems))
        tasks = [Task(env=kind, task_id=i, messages=(Message(role="user", content=q),)) for i, q, _ in problems]
        truths = [answer for _, _, answer in problems]
        greedy = evaluate(generator, tokenizer, tasks, EpisodeLimits(max_new_tokens=MAX_NEW_TOKENS))
        prompts = [tokenizer.encode_prompt(task) for task in tasks]
        groups = generator.generate(prompts, num_samples, Sampling(max_new_tokens=MAX_NEW_TOKENS))
        num_right = sum(r.text == truth for group, truth in zip(groups, truths, strict=True) for r in group)
        hits = sum(actions == (truth,) for actions, truth in zip(greedy, truths, strict=True))
        results[kind] = (hits / len(tasks), num_right / (len(tasks) * num_samples))
    return results


def _pairs_of(task: CharTask) -> Pairs:
    def draw(source: random.Random) -> tuple[str, str]:
        while True:
            question, answer = task.sample(source.randrange(1_000_000))
            if not is_held_out(question):
                return question, answer

    return draw


def _held_out(task: CharTask, num_problems: int) -> Iterator[tuple[int, str, str]]:
    """Yields (task id, question, answer) of up to `num_problems` distinct held-out questions, in order of task id."""
    seen: set[str] = set()
    for task_id in range(num_problems * 50):
        question, answer = task.sample(task_id)
        if is_held_out(question) and question not in seen:
            seen.add(question)
            yield task_id, question, answer
        if len(seen) == num_problems:
            return


def _rows(pairs: list[Pairs], right_shares: list[float], source: random.Random) -> list[Row]:
    tokenizer = CharTokenizer()
    rows: list[Row] = []
    for _ in range(BATCH_SIZE):
        which = source.randrange(len(pairs))
        question, answer = pairs[which](source)
        prompt = tokenizer.encode_response(question)[:-1]
        label = tokenizer.encode_response(mislabel(answer, right_shares[which], source))
        rows.append((prompt + label, [OFF] * len(prompt) + label))
    return rows


def _padded(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets, each int64 [rows, longest]."""
    longest = max(len(tokens) for tokens, _ in rows)
    # Padding stands on the right, where causal attention never sees it.
    tokens = [tokens + [CharTokenizer.pad_id] * (longest - len(tokens)) for tokens, _ in rows]
    targets = [targets + [OFF] * (longest - len(targets)) for _, targets in rows]
    return torch.tensor(tokens), torch.tensor(targets)


def _next_char(char: str) -> str:
    if char.isdigit():
        return str((int(char) + 1) % 10)
    return chr((ord(char) - ord("a") + 1) % 26 + ord("a"))


def _print_progress(step: int, loss: float) -> None:
    if step % 50 == 0:
        print(f"step {step}/{NUM_STEPS} loss {loss:.3f}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Builds a checkpoint, writes it, and prints its accuracy on held-out questions of each task."""
    parser = argparse.ArgumentParser(description="Build the warm start of the tiny model.")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    started_s = time.monotonic()
    network = warm_start(given.seed, _print_progress)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(published_state(network), given.out)
    print(f"{given.out}: {given.out.stat().st_size} bytes, {time.monotonic() - started_s:.0f} s")
    generator = TransformersGenerator(
        network, CharTokenizer(), PolicyVersion(policy_id="tiny", step=0), seed=given.seed
    )
    scores = accuracies(generator, num_problems=64, num_samples=16)
    for kind, (greedy, sampled) in scores.items():
        print(f"{kind:10s} greedy {greedy:.3f}  T=1 {sampled:.3f}")
    means = [sum(values) / len(scores) for values in zip(*scores.values(), strict=True)]
    print(f"{'mean':10s} greedy {means[0]:.3f}  T=1 {means[1]:.3f}")


if __name__ == "__main__":
    main()
