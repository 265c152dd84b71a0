"""Groups of a hostile node against admission: what is let in, how long its rows are, and what a step of it costs.

    python -m benchmarks.hostile_groups --groups 1000000 --file runs/hostile_groups.jsonl
    python -m benchmarks.hostile_groups --model smollm2 --groups 10000 --file runs/hostile_smollm2.jsonl

Every group is signed, opened and admitted as a node does it. What is let in is judged by an oracle, and eight groups
at a time are packed as the rows of a step. Each line of the file is a block of 500 groups, made from its number alone;
started again with the same file it goes on after those that are there.
"""

import argparse
import asyncio
import functools
import json
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

from swarm.clock import ManualClock
from swarm.config import GeneratorConfig, ModelConfig, NodeConfig
from swarm.exchange.checks.reward_recheck import to_scored_group
from swarm.model.tokenizer import load_tokenizer
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import ToyTokenizer, make_group, make_identity, make_sealed
from swarm.testing.nodes import make_admission, make_context
from swarm.types import Refused, ScoredGroup
from swarm.wire.envelopes import seal_group
from tests.attacks.hostile_groups import (
    GROUP_SIZE,
    MAX_NEW_TOKENS,
    Kind,
    Vocabulary,
    any_group,
    kind_of,
    rows_of,
    step_cost,
    wrong_about,
)

BLOCK: Final = 500  # groups
DRAW: Final = 8  # groups of a step
PAUSE_S: Final = 600.0  # between two groups: a refusal is forgotten, or the first ten would be all that is looked at
OURS, EVE = make_identity(3), make_identity(5)


@dataclass(slots=True)
class Findings:
    """The effect of a number of hostile groups."""

    groups: int = 0
    admitted: Counter[str] = field(default_factory=Counter[str])  # by kind
    refused: Counter[str] = field(default_factory=Counter[str])  # by reason
    wrong: list[str] = field(default_factory=list[str])  # what the oracle found
    longest: dict[str, int] = field(default_factory=dict[str, int])  # tokens of a row, by kind
    steps: int = 0
    worst_of_tokens: float = 0.0  # cost of a step of groups with our tokens, over the costliest honest one of as many
    worst_of_texts: float = 0.0  # the same of a step with texts that are encoded here

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> "Findings":
        """The findings of a line of the file."""
        return cls(**{name: line[name] for name in cls.__slots__})

    def add(self, other: "Findings") -> None:
        """Sums, and the worst of both."""
        self.groups += other.groups
        self.admitted.update(other.admitted)
        self.refused.update(other.refused)
        self.wrong += other.wrong
        for kind, tokens in other.longest.items():
            self.longest[kind] = max(self.longest.get(kind, 0), tokens)
        self.steps += other.steps
        self.worst_of_tokens = max(self.worst_of_tokens, other.worst_of_tokens)
        self.worst_of_texts = max(self.worst_of_texts, other.worst_of_texts)


def play_block(number: int, vocabulary: Vocabulary, num_groups: int = BLOCK) -> Findings:
    """The groups of one block, each through the whole of admission, and their steps."""
    return asyncio.run(_play_block(Random(number), vocabulary, num_groups))


async def _play_block(rng: Random, vocabulary: Vocabulary, num_groups: int) -> Findings:
    tokenizer, clock, findings = vocabulary.tokenizer, ManualClock(), Findings(groups=num_groups)
    config = NodeConfig(generator=GeneratorConfig(group_size=GROUP_SIZE, max_new_tokens=MAX_NEW_TOKENS))
    context = make_context(config, OURS, clock=clock)
    admission = make_admission(context, MemoryGroupStore(clock, 10**9), tokenizer=tokenizer)
    waiting: dict[str, list[ScoredGroup]] = {"ours": [], "texts": [], "any": []}
    for _ in range(num_groups):
        clock.advance(PAUSE_S)
        group = any_group(rng, vocabulary, EVE.node_id, clock.now_s())
        result = await admission.admit(seal_group(group, EVE), EVE.node_id)
        if isinstance(result, Refused):
            findings.refused[str(result.reason)] += 1
            continue
        kind = kind_of(result.group, tokenizer)
        findings.admitted[str(kind)] += 1
        wrong = wrong_about(result, tokenizer)
        if wrong is not None:
            findings.wrong.append(wrong)
        rows = rows_of(result, tokenizer)
        findings.longest[str(kind)] = max(findings.longest.get(str(kind), 0), *map(len, rows))
        for name in ("ours" if kind is Kind.TOKENS else "texts", "any"):
            waiting[name].append(result)
            if len(waiting[name]) == DRAW:
                _count_step(waiting[name], vocabulary, findings)
                waiting[name].clear()
    return findings


def _count_step(groups: Sequence[ScoredGroup], vocabulary: Vocabulary, findings: Findings) -> None:
    over_honest = step_cost(groups, vocabulary.tokenizer) / costliest_honest(vocabulary, len(groups))
    findings.steps += 1
    if all(kind_of(each.group, vocabulary.tokenizer) is Kind.TOKENS for each in groups):
        findings.worst_of_tokens = max(findings.worst_of_tokens, over_honest)
    else:
        findings.worst_of_texts = max(findings.worst_of_texts, over_honest)


@functools.cache
def costliest_honest(vocabulary: Vocabulary, num_groups: int) -> int:
    """Cost of the costliest step of so many honest groups of our tokenizer, all of whose answers are equally long."""
    return max(
        step_cost([_honest(vocabulary, length, number) for number in range(num_groups)], vocabulary.tokenizer)
        for length in range(1, MAX_NEW_TOKENS + 1)
    )


def _honest(vocabulary: Vocabulary, length: int, number: int) -> ScoredGroup:
    tokenizer = vocabulary.tokenizer
    group = make_group(task_id=100_000 + number, texts=["7" * (length - 1)] * GROUP_SIZE, tokenizer=tokenizer)
    rewards = torch.zeros(GROUP_SIZE).numpy()
    return to_scored_group(group, make_sealed(group), rewards, tokenizer, is_made_here=True, now_s=0.0)


def _play_with(model: str, number: int) -> Findings:
    torch.set_num_threads(1)
    return play_block(number, _vocabulary(model))


@functools.cache
def _vocabulary(model: str) -> Vocabulary:
    return Vocabulary.of(ToyTokenizer() if model == "toy" else load_tokenizer(ModelConfig(source=model)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing; exits with 1 where something was let in that should not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("toy", "smollm2"), default="toy", help="whose tokenizer admits")
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--file", type=Path, required=True, help="one line for each block")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    options.file.parent.mkdir(parents=True, exist_ok=True)
    known: list[dict[str, Any]] = []
    if options.file.exists():
        known = [json.loads(line) for line in options.file.read_text(encoding="utf-8").splitlines()]
    total = Findings()
    for line in known:
        total.add(Findings.of_line(line))
    numbers = range(len(known), -(-options.groups // BLOCK))
    play = functools.partial(_play_with, options.model)
    with (
        ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool,
        options.file.open("a", encoding="utf-8") as file,
    ):
        for number, findings in zip(numbers, pool.map(play, numbers), strict=True):
            file.write(
                json.dumps({"block": number, **{name: getattr(findings, name) for name in Findings.__slots__}}) + "\n"
            )
            file.flush()
            total.add(findings)
            if number % 20 == 19 or findings.wrong:
                print(total, flush=True)
    print(total, flush=True)
    raise SystemExit(1 if total.wrong or max(total.worst_of_tokens, total.worst_of_texts) > 1.0 else 0)


if __name__ == "__main__":
    main()
