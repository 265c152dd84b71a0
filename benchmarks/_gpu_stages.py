"""The stages of `benchmarks.gpu_check`: each measures or checks one thing on one device, in a process of its own.

Invariant: a stage gives figures of what it did on its device, or raises; on the CPU it does the same
with less.
"""

import argparse
import asyncio
import copy
import gc
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks._learner_child import GROUP, PROMPT
from benchmarks._made_network import ONE_BILLION, SMALL, SMOLLM2, NumberTokenizer, made_network
from benchmarks._trained_policy import TrainedPolicy, draw_of
from node.run_estimate import CONTEXT_BYTES, Lengths, ModelShape, estimate_memory
from swarm.config import EnvironmentConfig, LearnerConfig, ModelConfig, NodeConfig, ReplayConfig
from swarm.environments.environment import AnswerEnvironment, Problem
from swarm.environments.load import build_environments
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import Environment
from swarm.learn.learner import PolicyLearner
from swarm.learn.ranks import OneProcess
from swarm.model.device import device_memory, forget_peak, wait_for
from swarm.model.network import LoadedModel, load_model
from swarm.objectives.methods import load_recipe
from swarm.testing.builders import make_scored
from swarm.types import RolloutGroup, Sampling, ScoredGroup, StepReport

ROOT: Final = Path(__file__).resolve().parents[1]
MIB: Final = 2**20
OWN: Final = "a" * 64
SMOLLM2_ID: Final = "smollm2"

Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The device and the model of a stage."""

    device: torch.device
    model: str  # folder or name of SmolLM2; empty: there is none, weights of its shape are made up

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


def device_facts(job: Job) -> Figures:
    """Kind of the device, and its copy speeds."""
    facts: Figures = {name: version(name) for name in ("torch", "transformers")}
    facts |= {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    if job.is_gpu:
        memory = device_memory(job.device)
        assert memory is not None
        facts |= {"name": torch.cuda.get_device_name(job.device), "total_mib": memory.total // MIB}
        facts |= {
            "free_mib": memory.free // MIB,
            "has_bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
        }
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            facts["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
        except (OSError, subprocess.TimeoutExpired) as error:
            facts["driver"] = f"not known: {error}"
    else:
        facts |= {"name": f"{platform.machine()} with {os.cpu_count()} cores"}
    host = torch.zeros((256 if job.is_gpu else 16) * MIB, dtype=torch.uint8)
    there = host.to(job.device, copy=True)
    pinned = host.pin_memory() if job.is_gpu else host
    facts["to_device_gb_s"] = _gb_per_s(job, host.numel(), lambda: there.copy_(host))
    facts["to_device_pinned_gb_s"] = _gb_per_s(job, host.numel(), lambda: there.copy_(pinned, non_blocking=True))
    facts["to_host_gb_s"] = _gb_per_s(job, host.numel(), lambda: host.copy_(there))
    facts["on_device_gb_s"] = _gb_per_s(job, 2 * host.numel(), lambda: there.clone())
    return facts


def _gb_per_s(job: Job, num_bytes: int, work: Callable[[], object], times: int = 5) -> float:
    work()
    wait_for(job.device)
    began_s = time.perf_counter()
    for _ in range(times):
        work()
    wait_for(job.device)
    return round(times * num_bytes / (time.perf_counter() - began_s) / 1e9, 2)


def run_tests(job: Job) -> Figures:
    """The GPU tests; on the CPU their twins on a device that does not exist."""
    marked = ["-m", "gpu"] if job.is_gpu else ["-k", "pretended or host"]
    environment = {name: value for name, value in os.environ.items() if name != "SWARM_NIGHTLY"}
    if job.is_gpu:  # every recipe, and the whole contract
        environment["SWARM_NIGHTLY"] = "1"
    paths = [*map(str, sorted((ROOT / "tests/unit").glob("test_device_*.py"))), "tests/unit/test_gpu_facts.py"]
    paths.append("tests/unit/test_weights_benchmark.py")
    # a library's warning on another release is no fault of what is tested
    options = ["-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *paths, *marked, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    last = done.stdout.strip().splitlines()[-1:] or [""]
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last[0])}
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode or not counts.get("passed"):
        raise StageFailed("\n".join([last[0], *failed[:20], done.stdout[-3000:], done.stderr[-1000:]]), counts)
    return counts


class StageFailed(Exception):
    """A stage did not pass; with what it had found by then."""

    def __init__(self, reason: str, figures: Figures | None = None) -> None:
        super().__init__(reason)
        self.figures = figures or {}


# --- learning ----------------------------------------------------------------------------------


class Sums(AnswerEnvironment):
    """a+b of two one-digit numbers."""

    def __init__(self) -> None:
        config = EnvironmentConfig(name="sums", kind="plugin", dataset="-", num_tasks=100, prefill="Answer:", seed=1)
        super().__init__(config, verifier="sums/1")

    def build(self, task_id: int) -> Problem:
        """a+b of the number ab."""
        a, b = divmod(task_id, 10)
        return Problem(question=f"What is {a} + {b}?", reference=str(a + b))

    def judge(self, problem: Problem, answer: str) -> float:
        """1 where the answer is the sum and nothing else."""
        return float(answer.strip().rstrip(".") == problem.reference)


def learn_tiny(job: Job) -> Figures:
    """The character model learns to write words backwards."""
    config = EnvironmentConfig(name="reverse", kind="char", dataset="reverse", seed=1)
    environment = build_environments([config])["reverse"]
    loaded = load_model(ModelConfig(source="tiny", dtype="float32"))
    run = LearningRun(job, loaded, environment, learning_rate=3e-4, max_new_tokens=9)
    return run.figures(num_steps=60, num_problems=100, least_gain=0.1)


def learn_smollm2(job: Job) -> Figures:
    """SmolLM2 learns sums; where there is no SmolLM2, how fast weights of its shape are, from which nothing learns."""
    if not job.model:
        figures = measure_speed(job, SMOLLM2, torch.bfloat16, num_prompts=2, num_tokens=64 if job.is_gpu else 8)
        return {**figures, "left_out": "learning: no MODEL= was given, and nothing learns from random weights"}
    loaded = load_model(ModelConfig(source=job.model, dtype="bfloat16"))
    run = LearningRun(job, loaded, Sums(), learning_rate=1e-5, max_new_tokens=8)
    if not job.is_gpu:
        return run.figures(num_steps=2, num_problems=8, least_gain=-1.0)
    return run.figures(num_steps=40, num_problems=50, least_gain=0.1)


class LearningRun:
    """One node without peers: an engine and a learner on one device, in turn."""

    def __init__(
        self, job: Job, loaded: LoadedModel, environment: Environment, learning_rate: float, max_new_tokens: int
    ) -> None:
        self._job = job
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-check-")
        twin = copy.deepcopy(loaded.network)
        self._policy = TrainedPolicy(
            OWN,
            (loaded.network, twin.to(job.device)),
            loaded.tokenizer,
            load_recipe("sapo_swarm"),
            LearnerConfig(learning_rate=learning_rate),
            ReplayConfig(),
            Path(self._folder.name),
            environments={environment.name: environment},
            seed=0,
            max_new_tokens=max_new_tokens,
            ranks=OneProcess(job.device),
        )

    def figures(self, num_steps: int, num_problems: int, least_gain: float) -> Figures:
        """Accuracy before and after, and speeds. Raises StageFailed where it gained less."""
        forget_peak(self._job.device)
        policy = self._policy
        before, generate_s, learn_s, generated, learned = self._accuracy(num_problems), 0.0, 0.0, 0, 0
        for step in range(1, num_steps + 1):
            began_s = time.perf_counter()
            scored = asyncio.run(policy.make(4, str(step)))
            generate_s += time.perf_counter() - began_s
            generated += sum(each.group.num_tokens for each in scored)
            groups = [each for each in scored if each.has_signal]
            if not groups:
                continue
            began_s = time.perf_counter()
            report = policy.learner.step(draw_of(step, groups, num_zero_variance=len(scored) - len(groups)))
            wait_for(self._job.device)
            learn_s += time.perf_counter() - began_s
            learned += report.num_tokens
            policy.follow()
        after, memory = self._accuracy(num_problems), device_memory(self._job.device)
        found: Figures = {
            "steps": num_steps,
            "accuracy_before": round(before, 3),
            "accuracy_after": round(after, 3),
            "generated_tokens_s": round(generated / max(generate_s, 1e-9)),
            "learned_tokens_s": round(learned / max(learn_s, 1e-9)),
            "peak_mib": None if memory is None else memory.peak // MIB,
        }
        if after < before + least_gain or not learned:
            gain = f"accuracy {before:.2f} -> {after:.2f} in {num_steps} steps"
            raise StageFailed(f"{gain}: it has to gain {least_gain}", found)
        return found

    def _accuracy(self, num_problems: int) -> float:
        return float(np.mean(list(self._policy.accuracies(num_problems, split="all", seed=0).values())))


# --- speed and memory --------------------------------------------------------------------------


def measure_billion(job: Job) -> Figures:
    """1.1e9 random parameters in bfloat16: generation, a step, new weights and a checkpoint, with their memory."""
    if not job.is_gpu:
        return measure_speed(job, SMALL, torch.bfloat16, num_prompts=2, num_tokens=8)
    memory = device_memory(job.device)
    assert memory is not None
    for num_layers in (ONE_BILLION["num_hidden_layers"], 11, 5):  # fewer where the card is small
        shape = {**ONE_BILLION, "num_hidden_layers": num_layers}
        needed = estimated_peak(speed_config(8, False), shape, 256) + CONTEXT_BYTES
        if needed <= memory.free:
            break
    else:
        return {"left_out": f"5 layers of it need {needed // MIB} MiB, {memory.free // MIB} are free on the card"}
    plain = measure_speed(job, shape, torch.bfloat16, num_prompts=8, num_tokens=256)
    gc.collect()
    torch.cuda.empty_cache()
    saving = measure_speed(job, shape, torch.bfloat16, num_prompts=8, num_tokens=256, checkpointing=True)
    return {**plain, **{f"checkpointed_{key}": saving[key] for key in ("learn_s", "peak_mib", "estimated_peak_mib")}}


def speed_config(num_prompts: int, checkpointing: bool) -> NodeConfig:
    """Of a node that learns from so many groups in a step."""
    return NodeConfig(
        model=ModelConfig(dtype="bfloat16"),
        learner=LearnerConfig(recipe="grpo", gradient_checkpointing=checkpointing, token_budget=4096),
        replay=ReplayConfig(local_groups=num_prompts, external_groups=0),
    )


def estimated_peak(config: NodeConfig, shape: dict[str, Any], num_tokens: int) -> int:
    """Bytes of the device by arithmetic."""
    counted = ModelShape.of(shape)
    assert counted is not None
    return estimate_memory(config, counted, Lengths(prompt=PROMPT, response=num_tokens)).device_peak


def measure_speed(
    job: Job,
    shape: dict[str, Any],
    dtype: torch.dtype,
    num_prompts: int,
    num_tokens: int,
    checkpointing: bool = False,
) -> Figures:
    """One node's engine and learner with random weights: what each phase takes, and the memory beside the estimate."""
    device, rng = job.device, np.random.default_rng(0)
    forget_peak(device)
    tokenizer = NumberTokenizer(shape["vocab_size"])
    network, twin = made_network(shape, dtype, device), made_network(shape, dtype, device)
    config = speed_config(num_prompts, checkpointing)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        ranks, recipe = OneProcess(device), load_recipe("grpo")
        learner = PolicyLearner(
            network, tokenizer, recipe, config.learner, config.replay, OWN, Path(folder), ranks=ranks
        )
        engine = TransformersGenerator(twin, tokenizer, learner.version, seed=0)
        prompts = rng.integers(1, shape["vocab_size"], (num_prompts, PROMPT)).tolist()
        sampling = Sampling(max_new_tokens=num_tokens)
        engine.generate(prompts[:1], 1, Sampling(max_new_tokens=2))  # kernels are loaded and chosen here
        began_s = time.perf_counter()
        groups = engine.generate(prompts, GROUP, sampling)
        generate_s = time.perf_counter() - began_s
        reports: list[StepReport] = []
        seconds: list[float] = []
        for step in (1, 2, 3):
            draw = draw_of(step, _groups(prompts, groups, tokenizer))
            wait_for(device)
            began_s = time.perf_counter()
            reports.append(learner.step(draw))
            wait_for(device)
            seconds.append(time.perf_counter() - began_s)
        pause_s = engine.load(*learner.snapshot(), in_flight=True).pause_s
        memory = device_memory(device)
        began_s = time.perf_counter()
        if not checkpointing:  # 12 bytes a parameter: once is enough
            learner.save()
        save_s = time.perf_counter() - began_s
        saved_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    if any(report.was_skipped for report in reports) or not all(np.isfinite(report.loss) for report in reports):
        raise StageFailed(f"losses {[report.loss for report in reports]}: a step was skipped")
    num_made = sum(len(rollout.trace.token_ids) for group in groups for rollout in group if rollout.trace is not None)
    return {
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "generated_tokens_s": round(num_made / generate_s),
        "learn_s": round(min(seconds[1:]), 4),
        "learned_tokens_s": round(reports[-1].num_tokens / min(seconds[1:])),
        "learn_phases_s": {name: round(value, 4) for name, value in reports[-1].seconds.items()},
        "mismatch_kl": round(float(reports[0].diagnostics.get("mismatch_kl_k3", float("nan"))), 6),
        "pause_s": round(pause_s, 4),
        "save_s": round(save_s, 2),
        "saved_mib": saved_bytes // MIB,
        "peak_mib": None if memory is None else memory.peak // MIB,
        "estimated_peak_mib": estimated_peak(config, shape, num_tokens) // MIB,
    }


def _groups(prompts: Sequence[Sequence[int]], rollouts: Sequence[Sequence[Any]], tokenizer: Any) -> list[ScoredGroup]:
    """Groups of these rollouts; every second one was right."""
    scored: list[ScoredGroup] = []
    for index, (prompt, of_prompt) in enumerate(zip(prompts, rollouts, strict=True)):
        group = RolloutGroup(
            run_id="gpu-check",
            producer=OWN,
            policy_id=OWN,
            env="numbers",
            task_id=index,
            tokenizer_digest=tokenizer.digest,
            prompt_ids=np.asarray(prompt, np.int32),
            rollouts=tuple(of_prompt),
            verifier="numbers/1",
            created_at_s=0.0,
        )
        scored.append(make_scored(group, rewards=[float(place % 2) for place in range(len(of_prompt))]))
    return scored


# --- the benchmarks ----------------------------------------------------------------------------


def benchmark_learner(job: Job) -> Figures:
    """`python -m benchmarks.learner` on the device."""
    size = [] if job.is_gpu else ["--cases", "head", "--rollouts", "8", "--longest", "16"]
    command = [sys.executable, "-m", "benchmarks.learner", "--device", str(job.device), "--repetitions", "2"]
    command += ["--without", "function,trl", "--json", *size, *([] if job.is_gpu else ["--repetitions", "1"])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise StageFailed(done.stderr[-3000:])
    found: dict[str, dict[str, list[dict[str, float]]]] = json.loads(done.stdout.splitlines()[-1])
    return {
        f"{case}/{path}/{key}": round(float(np.median([run[key] for run in runs])), 4)
        for case, paths in found.items()
        for path, runs in paths.items()
        for key in ("seconds", "peak_mib")
    }


def benchmark_weights(job: Job) -> Figures:
    """`python -m benchmarks.weights --device`."""
    from benchmarks._weights_made import measure_made

    found = measure_made(str(job.device), 500_000_000 if job.is_gpu else 1_000_000, 1e-5)
    return {"parameters": found["parameters"], **{f"ours/{k}": v for k, v in _numbers(found["ours"]).items()}} | {
        f"transfer/{key}": value for key, value in _numbers(found["transfer"]).items()
    }


def _numbers(found: dict[str, Any]) -> Figures:
    return {key: round(value, 4) for key, value in found.items() if isinstance(value, int | float)}


def vllm_tests(job: Job) -> Figures:
    """The engine's own tests against the vLLM of .venv-vllm."""
    if not job.is_gpu:
        return {"left_out": "vLLM: .ci/run tests it on the CPU"}
    python = ROOT / ".venv-vllm/bin/python"
    if not python.is_file():
        return {"left_out": "vLLM: no .venv-vllm here; make vllm VLLM=vllm makes it, with a package index"}
    command = [sys.executable, "-m", "pytest", "tests/integration/test_vllm_engine.py", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "SWARM_REQUIRE_VLLM": "1"}
    )
    last = done.stdout.strip().splitlines()[-1:] or [""]
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last[0])}
    if done.returncode:
        raise StageFailed(done.stdout[-4000:], counts)
    return counts


STAGES: Final[dict[str, Callable[[Job], Figures]]] = {
    "device": device_facts,
    "tests": run_tests,
    "learning": learn_tiny,
    SMOLLM2_ID: learn_smollm2,
    "billion": measure_billion,
    "learner": benchmark_learner,
    "weights": benchmark_weights,
    "vllm": vllm_tests,
}


def main() -> None:
    """Runs one stage and prints its outcome as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--device", required=True)
    parser.add_argument("--model", default="")
    arguments = parser.parse_args()
    job = Job(device=torch.device(arguments.device), model=arguments.model)
    try:
        outcome: Figures = {"passed": True, "figures": STAGES[arguments.stage](job)}
    except StageFailed as error:
        outcome = {"passed": False, "figures": error.figures, "error": str(error)}
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
