"""Distance of a generator's log-probs from the learner's at equal weights, and the cost of new weights.

    python -m benchmarks.mismatch                              # SmolLM2-135M, about 4 minutes on 2 cores
    python -m benchmarks.mismatch --engines vllm --dtypes bfloat16 --python /path/to/vllm/env/bin/python

    python -m benchmarks.mismatch --engines transformers --dtypes bfloat16 --computes float32,bfloat16 --loads 0
    ATEN_CPU_CAPABILITY=default python -m benchmarks.mismatch --made groups.bin ...   # sampled at a lower CPU level,
    python -m benchmarks.mismatch --made groups.bin ...                               # and scored at this one

Every token is sampled by the engine and scored by the learner's own path (packed rows, chunked output layer) with the
same published values, in each pair of compute dtypes. ESS is that of the ratios learner/generator, as a share of the
tokens. KL is the k3 estimate of KL(generator || learner) in nats per token, as the learner's diagnostics have it.
Canaries: the prompts, as `Generator.score` sees them against transformers. Loads: the same weights again and again,
with canaries, each with its digest verified; pause is how long generation stood still.
"""

import argparse
import base64
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks._trained_policy import draw_of
from swarm.clock import SystemClock
from swarm.config import EngineConfig, ModelConfig, NodeConfig
from swarm.generation.produce import produce
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.generation.vllm_engine import VllmGenerator
from swarm.interfaces import Generator
from swarm.learn.logprobs import score_tokens
from swarm.learn.packing import pack
from swarm.model.compute_dtype import place
from swarm.model.network import LoadedModel, load_model
from swarm.model.version_digest import snapshot, weights_digest
from swarm.objectives.draw_batch import make_batch
from swarm.testing.builders import make_scored
from swarm.types import Canary, Message, PolicyVersion, RolloutGroup, Sampling, Task
from swarm.wire.rollout_groups import body_to_group, group_to_body
from swarm.wire.v1 import rollout_pb2

QUESTIONS: Final = (
    "What is 7 + 5?",
    "State the final answer to the following arithmetic problem: 8 * 6 =",
    "Say something nice about cats.",
    "Name three colours of the rainbow and a thing that has each of them.",
    "Why is the sky blue? Answer in one sentence.",
    "Write a short poem about a river.",
    "A train leaves at 9:40 and arrives at 11:15. How long does it take?",
    "Translate to French: The weather is good today.",
)
PRODUCER: Final = "0" * 64
TOKEN_BUDGET: Final = 4096
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Of one engine, dtype and temperature."""

    engine: str
    dtype: str  # published
    computes: str  # compute dtypes: generator > learner
    temperature: float
    num_tokens: int
    kl: float  # k3, nats per token
    ess: float  # of the ratios of tokens, as a share
    mean: float  # |difference of log-prob|, nats
    most: float
    canary: float  # mean |difference| of the prompts' log-probs
    tokens_per_s: float
    load_s: float  # median, all of it
    pause_s: float  # median


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Mismatch of generator and learner at equal weights.")
    parser.add_argument("--engines", default="transformers,vllm")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--computes", default="", help="compute dtypes, each paired with each; default: the published")
    parser.add_argument(
        "--made", type=Path, default=None, help="file of groups: scored where it is there, else written"
    )
    parser.add_argument("--temperatures", default="1.0,0.7")
    parser.add_argument("--model", default="smollm2", help="as model.source")
    parser.add_argument("--python", default="", help="interpreter of vLLM's environment, as engine.python")
    parser.add_argument("--samples", type=int, default=8, help="of each of the 8 questions")
    parser.add_argument("--tokens", type=int, default=32, help="longest response")
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="figures instead of a table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    found: list[Figures] = []
    for dtype in arguments.dtypes.split(","):
        computes = arguments.computes.split(",") if arguments.computes else [dtype]
        for engine, ours, theirs in product(arguments.engines.split(","), computes, computes):
            console.print(f"{engine} {dtype}: {ours} > {theirs}")
            found += measure(engine, dtype, ours, theirs, arguments)
    if arguments.json:
        print(json.dumps([asdict(figures) for figures in found], indent=1))
    else:
        Console().print(table(found))


def measure(engine: str, dtype: Dtype, generates_in: Dtype, learns_in: Dtype, arguments: Any) -> list[Figures]:
    """Starts the engine, compares it with the learner at each temperature, and loads weights into it."""
    model = load_model(ModelConfig(source=arguments.model, dtype=dtype))
    place(model.network, "cpu", learns_in)
    weights = snapshot(model.network)
    version = PolicyVersion(policy_id=PRODUCER, step=0, digest=weights_digest(weights))
    tasks = [Task(env="q", task_id=i, messages=(Message(role="user", content=q),)) for i, q in enumerate(QUESTIONS)]
    prompts = [model.tokenizer.encode_prompt(task) for task in tasks]
    reference = TransformersGenerator(model.network, model.tokenizer, version, 0)
    canaries = [
        Canary(token_ids=np.asarray(prompt, np.int32), logprobs=scores)
        for prompt, scores in zip(prompts, reference.score(prompts), strict=True)
    ]
    with tempfile.TemporaryDirectory() as directory:
        generator, close = start(engine, dtype, generates_in, model, version, Path(directory), arguments)
        try:
            generator.greedy(prompts, 2)  # the first call of an engine is slower than the others
            canary = _canary_difference(canaries, generator)
            made = [_made(generator, model, tasks, float(t), arguments) for t in arguments.temperatures.split(",")]
            loads = [_load(generator, version, weights, canaries) for _ in range(arguments.loads)] or [(0.0, 0.0)]
        finally:
            close()
    load_s, pause_s = (median(values) for values in zip(*loads, strict=True))
    return [
        Figures(
            engine=engine,
            dtype=dtype,
            computes=f"{generates_in} > {learns_in}",
            temperature=temperature,
            num_tokens=differences.size,
            kl=float((np.exp(differences) - 1 - differences).mean()),
            ess=float(np.exp(differences).sum() ** 2 / np.exp(2 * differences).sum() / differences.size),
            mean=float(np.abs(differences).mean()),
            most=float(np.abs(differences).max()),
            canary=canary,
            tokens_per_s=rate,
            load_s=load_s,
            pause_s=pause_s,
        )
        for temperature, differences, rate in made
    ]


def start(
    engine: str,
    dtype: Dtype,
    computes_in: Dtype,
    model: LoadedModel,
    version: PolicyVersion,
    directory: Path,
    arguments: Any,
) -> tuple[Generator, Callable[[], None]]:
    """An engine with the model's weights, and what ends it."""
    if engine == "vllm":
        config = NodeConfig(
            dir=directory,
            model=ModelConfig(source=arguments.model, dtype=dtype),
            compute_dtype=computes_in,
            engine=EngineConfig(kind="vllm", python=arguments.python),
        )
        vllm = VllmGenerator.from_config(config, model.tokenizer, version)
        return vllm, vllm.close
    own = load_model(ModelConfig(source=arguments.model, dtype=dtype))
    place(own.network, "cpu", computes_in)
    return TransformersGenerator(own.network, model.tokenizer, version, 0), lambda: None


def _made(
    generator: Generator, model: LoadedModel, tasks: Sequence[Task], temperature: float, arguments: Any
) -> tuple[float, "np.ndarray[Any, Any]", float]:
    """Temperature, learner's minus generator's log-prob of each sampled token [n], tokens per second."""
    if arguments.made is not None and arguments.made.exists():
        return temperature, learner_difference(_read(arguments.made), model), 0.0
    sampling = Sampling(temperature=temperature, max_new_tokens=arguments.tokens)
    began_s = time.monotonic()
    groups = produce(
        generator,
        model.tokenizer,
        tasks,
        arguments.samples,
        sampling,
        run_id="benchmark",
        producer=PRODUCER,
        clock=SystemClock(),
    )
    rate = sum(group.num_tokens for group in groups) / (time.monotonic() - began_s)
    if arguments.made is not None:
        lines = [base64.b64encode(group_to_body(group).SerializeToString()) for group in groups]
        arguments.made.write_bytes(b"\n".join(lines))
    return temperature, learner_difference(groups, model), rate


def _read(path: Path) -> list[RolloutGroup]:
    """Groups that an earlier call kept."""
    bodies = [rollout_pb2.GroupBody.FromString(base64.b64decode(line)) for line in path.read_bytes().splitlines()]
    return [body_to_group(body, PRODUCER) for body in bodies]


def learner_difference(groups: Sequence[RolloutGroup], model: LoadedModel) -> "np.ndarray[Any, Any]":
    """[n] nats: the learner's log-prob minus the generator's, of every token of some groups."""
    scored = [make_scored(group, rewards=[0.0] * len(group.rollouts)) for group in groups]
    batch = make_batch(draw_of(1, scored), model.tokenizer)
    found: list[torch.Tensor] = []
    for packed in pack(batch, TOKEN_BUDGET):
        ours = score_tokens(model.network, packed).logprobs
        found.append(ours - batch.behavior_logprobs[packed.rollouts, packed.positions])
    return cast("np.ndarray[Any, Any]", torch.cat(found).double().numpy())


def _canary_difference(canaries: Sequence[Canary], generator: Generator) -> float:
    scores = generator.score([canary.token_ids.tolist() for canary in canaries])
    differences = [np.abs(own - canary.logprobs)[1:] for own, canary in zip(scores, canaries, strict=True)]
    return float(np.concatenate(differences).mean())


def _load(
    generator: Generator, version: PolicyVersion, weights: object, canaries: Sequence[Canary]
) -> tuple[float, float]:
    began_s = time.monotonic()
    report = generator.load(version, weights, canaries=canaries)
    return time.monotonic() - began_s, report.pause_s


def table(found: Sequence[Figures]) -> Table:
    """One row for each engine, dtype and temperature."""
    made = Table(title="generator against learner, equal weights (nats)")
    for name in ("engine", "dtype", "generator > learner"):
        made.add_column(name)
    for name in ("T", "tokens", "KL (k3)", "ESS", "mean |d|", "max |d|", "canary", "tok/s", "load", "pause"):
        made.add_column(name, justify="right")
    for each in found:
        nats = [f"{value:.1e}" for value in (each.mean, each.most, each.canary)]
        seconds = [f"{value:.2f} s" for value in (each.load_s, each.pause_s)]
        counts = (f"{each.temperature:g}", str(each.num_tokens), f"{each.kl:.1e}", f"{each.ess:.5f}")
        cells = (each.engine, each.dtype, each.computes, *counts, *nats, f"{each.tokens_per_s:.0f}", *seconds)
        made.add_row(*cells)
    return made


if __name__ == "__main__":
    main()
