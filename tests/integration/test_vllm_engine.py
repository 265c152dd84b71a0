"""The vLLM engine against the real vLLM, in its own process and environment, compared with transformers here.

Skipped where there is no such environment (`make vllm` makes one); SWARM_REQUIRE_VLLM=1 makes that a failure.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from waits import HANG_S

from swarm.config import EngineConfig, ModelConfig, NodeConfig
from swarm.episode import Message
from swarm.errors import ConfigError, RolloutFailed, WeightsRefused
from swarm.generation.canaries import tolerance_nats
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.generation.vllm_engine import VllmGenerator
from swarm.interfaces import Generator as Engine
from swarm.model.network import LoadedModel, load_model
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import published_state, snapshot, weights_digest
from swarm.testing.engine_contract import CONTRACT, Check, EngineBench, check_spans_tell_where_new_weights_began
from swarm.testing.tiny_models import KINDS
from swarm.types import Canary, FinishReason, FloatArray, PolicyVersion, Sampling, Task

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
QUESTIONS = ("What is 7+5?", "Say something nice about cats.")
START = PolicyVersion(policy_id="a" * 64, step=0)


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter of vLLM's environment."""
    named = os.environ.get("SWARM_VLLM_PYTHON", "")
    path = Path(named) if named else ROOT / ".venv-vllm" / "bin" / "python"
    if not path.is_file():
        reason = f"no vLLM environment ({path} does not exist): make vllm, or name one in SWARM_VLLM_PYTHON"
        if os.environ.get("SWARM_REQUIRE_VLLM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return str(path)


def _config(directory: Path, python: str, model: ModelConfig, max_rows: int = 64) -> NodeConfig:
    options = {"kv_cache_memory_bytes": 256 << 20, "max_model_len": 256, "max_num_batched_tokens": 256}
    engine = EngineConfig(kind="vllm", python=python, max_rows=max_rows, options=options)
    return NodeConfig(dir=directory, model=model, engine=engine)


# --- the contract of engines, with a small model -----------------------------------------------

PROMPTS = [[5, 6, 7], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18]]
TEXTS = [[5, 6, 7, 8, 20, 21], [30, 31, 2, 40], [12] * 9]


def _small(seed: int, kind: str = "llama") -> Any:
    """A model with heads that vLLM has kernels for, whose logits depend visibly on the whole context."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    tokenizer = CharTokenizer()
    makes: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (LlamaForCausalLM, LlamaConfig, {}),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 128}),  # wider than hidden_size / heads
    }
    of, configuration, own = makes[kind]
    config = configuration(
        vocab_size=tokenizer.vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,  # a call lasts long enough that something can happen meanwhile
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_id,
        eos_token_id=tokenizer.eos_id,
        **own,
    )
    torch.manual_seed(seed)
    network = of(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5.0)
    return network


def _small_folder(directory: Path, kind: str = "llama") -> Path:
    _small(0, kind).save_pretrained(directory / "model")
    (directory / "model" / "tokenizer.json").write_text("{}", encoding="utf-8")  # nothing here reads it
    return directory / "model"


@contextmanager
def _while_it_makes(engine: Engine, call: Callable[[], None]) -> Generator[None]:
    """Calls several times while a call of generate is in progress in the engine's process."""
    over = threading.Event()

    def calling() -> None:
        while not over.wait(0.01):
            call()

    thread = threading.Thread(target=calling)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Of the small model."""
    return str(request.param)


@pytest.fixture(scope="module")
def small(python: str, kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineBench]:
    """One process for all checks; each begins with the first weights."""
    directory = tmp_path_factory.mktemp("small")
    model = ModelConfig(source=str(_small_folder(directory, kind)), dtype="float32")
    engine = VllmGenerator.from_config(_config(directory, python, model, max_rows=8), CharTokenizer(), START)
    first, newer = snapshot(_small(0, kind)), _small(7, kind)

    def make() -> Engine:
        engine.load(START, first)
        return engine

    scored = TransformersGenerator(newer, CharTokenizer(), START, 0).score(TEXTS)
    yield EngineBench(
        make=make,
        start=START,
        prompts=PROMPTS,
        eos_ids=CharTokenizer().eos_ids,
        newer=snapshot(newer),
        canaries=[Canary(token_ids=np.array(t, np.int32), logprobs=s) for t, s in zip(TEXTS, scored, strict=True)],
        misfit={name: tensor[:1] for name, tensor in first.items()},
        on_token=_while_it_makes,
        max_rows=8,
        tolerance_nats=tolerance_nats("vllm", "float32"),
        is_reproducible=False,  # what is taken back after a refusal is made again with other random numbers
    )
    engine.close()


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_vllm_keeps_the_contract(small: EngineBench, kind: str, check: Check) -> None:
    if check is not check_spans_tell_where_new_weights_began:
        check(small)
        return
    made: Iterator[Callable[[], Engine]] = iter(
        [small.make, lambda: TransformersGenerator(_small(0, kind), CharTokenizer(), START, 0)]
    )
    check(replace(small, make=lambda: next(made)()))


def test_numbers_make_the_same_samples_in_any_company(small: EngineBench) -> None:
    together = small.make().generate(PROMPTS, 4, Sampling(max_new_tokens=12), [1, 2, 3])
    for number, prompt, group in zip([1, 2, 3], PROMPTS, together, strict=True):
        alone = small.make().generate([prompt], 4, Sampling(max_new_tokens=12), [number])[0]
        assert [rollout.text for rollout in alone] == [rollout.text for rollout in group]


def test_prompts_that_do_not_fit_one_step_are_read_in_several(small: EngineBench) -> None:
    prompts = [[2 + (start + place) % 40 for place in range(150)] for start in range(6)]
    engine = small.make()
    for prompt, group in zip(prompts, engine.generate(prompts, 3, Sampling(max_new_tokens=8)), strict=True):
        for rollout in group:
            assert rollout.trace is not None and rollout.trace.logprobs is not None
            score = engine.score([[*prompt, *rollout.trace.token_ids.tolist()]])[0]
            np.testing.assert_allclose(rollout.trace.logprobs, score[len(prompt) :], atol=small.tolerance_nats)


def test_what_the_engine_cannot_do_is_said(small: EngineBench) -> None:
    engine = small.make()
    for prompt, sampling, word in (
        ([5] * 250, Sampling(max_new_tokens=16), "exceed"),
        ([5000], Sampling(max_new_tokens=16), "vocabulary"),
        ([5], Sampling(max_new_tokens=16, temperature=1e-3), "temperature"),
    ):
        with pytest.raises(ConfigError, match=word):
            engine.generate([prompt], 1, sampling)
    assert len(engine.generate(PROMPTS, 1, Sampling(max_new_tokens=4))) == 3


def test_the_engine_ends_with_the_process_that_started_it(python: str, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from swarm.config import EngineConfig, ModelConfig, NodeConfig
from swarm.model.tokenizer import CharTokenizer
from swarm.generation.vllm_engine import VllmGenerator
from swarm.types import PolicyVersion
config = NodeConfig(
    dir=Path({str(tmp_path)!r}),
    model=ModelConfig(source={str(_small_folder(tmp_path))!r}, dtype="float32"),
    engine=EngineConfig(kind="vllm", python={python!r}, options={{"kv_cache_memory_bytes": 1 << 26}}),
)
engine = VllmGenerator.from_config(config, CharTokenizer(), PolicyVersion(policy_id="a", step=0))
print(engine.pid, flush=True)
sys.stdin.read()
"""
    worker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdin is not None and worker.stdout is not None
    with worker, worker.stdin, worker.stdout:
        pid = int(worker.stdout.readline())
        assert _is_running(pid)
        worker.kill()
    deadline_s = time.monotonic() + HANG_S
    while _is_running(pid):
        assert time.monotonic() < deadline_s, "the engine outlived its worker"
        time.sleep(0.05)


def test_an_engine_whose_step_takes_too_long_ends_itself(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tmp_path, python, ModelConfig(source=str(_small_folder(tmp_path)), dtype="float32"), max_rows=8)
    monkeypatch.setattr("swarm.generation.vllm_engine.STALL_S", 1e-5)  # no step is so short
    engine = VllmGenerator.from_config(config, CharTokenizer(), START)
    first = engine.pid
    with pytest.raises(RolloutFailed, match="ended twice over one call of generate"):
        engine.generate(PROMPTS, 2, Sampling(max_new_tokens=8))
    assert engine.pid != first, "another one was started"
    log = (tmp_path / "engine" / "vllm.log").read_text(encoding="utf-8", errors="replace")
    assert "Timeout (0:00:00.000010)!" in log  # that a trace of it follows: tests/unit/test_watchdog.py
    engine.close()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- a real model ------------------------------------------------------------------------------


class Real:
    """SmolLM2 in both engines: the learner's side is trained, vLLM follows."""

    def __init__(self, directory: Path, python: str, dtype: Any, **adapters: Any) -> None:
        config = _config(directory, python, ModelConfig(source="smollm2", dtype=dtype, **adapters))
        self.dtype = dtype
        self.model: LoadedModel = load_model(config.model)
        version = replace(START, digest=weights_digest(published_state(self.model.network)))
        self.reference = TransformersGenerator(self.model.network, self.model.tokenizer, version, 0)
        self.engine = VllmGenerator.from_config(config, self.model.tokenizer, version)
        self.prompts = [
            self.model.tokenizer.encode_prompt(
                Task(env="test", task_id=0, messages=(Message(role="user", content=question),))
            )
            for question in QUESTIONS
        ]

    def train(self) -> None:
        """One step of signed gradients that makes the prompts likelier: every trained weight moves."""
        network: Any = self.model.network
        rate = 0.01 if self.dtype == "float32" else 0.002  # a coarse model is noisier in bfloat16, too
        for parameter in network.parameters():
            parameter.grad = None
        for prompt in self.prompts:
            ids = torch.tensor([prompt])
            network(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.requires_grad:
                    parameter.sub_(rate * (parameter.float().std() + 1e-3) * parameter.grad.sign())

    def version(self, step: int) -> tuple[PolicyVersion, dict[str, torch.Tensor]]:
        """The version and the tensors that the learner's side holds now."""
        tensors = snapshot(self.model.network)
        return PolicyVersion(policy_id=START.policy_id, step=step, digest=weights_digest(tensors)), tensors

    def canaries(self) -> list[Canary]:
        """By the learner's side."""
        scores = self.reference.score(self.prompts)
        return [
            Canary(token_ids=np.array(prompt, np.int32), logprobs=score)
            for prompt, score in zip(self.prompts, scores, strict=True)
        ]

    def mismatch(self) -> float:
        """Mean |difference| between the log-probs of freshly sampled tokens and the learner's of the same."""
        groups = self.engine.generate(self.prompts, 2, Sampling(max_new_tokens=8))
        traces = [
            (prompt, rollout.trace) for prompt, group in zip(self.prompts, groups, strict=True) for rollout in group
        ]
        scores = self.reference.score([[*prompt, *trace.token_ids.tolist()] for prompt, trace in traces if trace])
        differences: list[FloatArray] = []
        for (prompt, trace), score in zip(traces, scores, strict=True):
            assert trace is not None and trace.logprobs is not None
            assert {span.version for span in trace.spans} == {self.engine.version}
            differences.append(np.abs(trace.logprobs - score[len(prompt) :]))
        return float(np.concatenate(differences).mean())


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def real(python: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Real]:
    """Both engines with equal weights."""
    both = Real(tmp_path_factory.mktemp("real"), python, request.param)
    yield both
    both.engine.close()


def test_updates_in_place_are_each_what_the_learner_has(real: Real) -> None:
    tolerance, pid = tolerance_nats("vllm", real.dtype), real.engine.pid
    assert real.mismatch() <= tolerance
    scores = real.engine.score(real.prompts)
    for step in range(1, 11 if real.dtype == "bfloat16" else 4):  # a float32 update takes twice as long
        real.train()
        version, tensors = real.version(step)
        report = real.engine.load(version, tensors, canaries=real.canaries())
        assert report.mismatch_nats <= tolerance and report.pause_s > 0 and real.engine.version == version
        assert real.mismatch() <= tolerance
        before, scores = scores, real.engine.score(real.prompts)
        moved = np.concatenate([np.abs(now - old)[1:] for now, old in zip(scores, before, strict=True)]).mean()
        if real.dtype == "float32":  # sharp: an engine with a single layer of the version before would not pass
            assert moved > 10 * tolerance, "hardly another version"
            assert real.engine.greedy(real.prompts, 8) == real.reference.greedy(real.prompts, 8)
    assert real.engine.pid == pid, "the engine was started again"


def test_adapters_are_served_merged(python: str, tmp_path: Path) -> None:
    targets = ("q_proj", "v_proj", "down_proj")
    both = Real(tmp_path, python, "float32", lora_rank=4, lora_alpha=12.0, lora_targets=targets)
    tolerance, scores = tolerance_nats("vllm", "float32"), both.engine.score(both.prompts)
    for step in range(1, 4):
        for _ in range(5):
            both.train()
        version, tensors = both.version(step)
        assert all(name.rsplit(".", 2)[1] in targets for name in tensors), "whole weights are not published"
        report = both.engine.load(version, tensors, canaries=both.canaries())
        assert report.mismatch_nats <= tolerance and both.mismatch() <= tolerance
        before, scores = scores, both.engine.score(both.prompts)
        moved = np.concatenate([np.abs(now - old)[1:] for now, old in zip(scores, before, strict=True)]).mean()
        assert moved > 10 * tolerance, "hardly another version"
    pid = both.engine.pid
    os.kill(pid, signal.SIGKILL)
    np.testing.assert_array_equal(both.engine.score(both.prompts)[0], scores[0])
    assert both.engine.pid != pid
    both.engine.close()


def test_weights_of_another_digest_are_refused(real: Real) -> None:
    served, answers = real.engine.version, real.engine.greedy(real.prompts, 12)
    real.train()
    version, tensors = real.version(served.step + 1)
    name = "model.norm.weight"
    tensors[name] = tensors[name] * 1.5
    with pytest.raises(WeightsRefused, match="digest"):
        real.engine.load(version, tensors)
    assert real.engine.version == served and real.engine.greedy(real.prompts, 12) == answers


def test_a_killed_engine_comes_back_with_the_last_good_weights(real: Real) -> None:
    real.train()
    version, tensors = real.version(real.engine.version.step + 1)
    real.engine.load(version, tensors)
    before, pid = real.engine.score(real.prompts), real.engine.pid
    killer = threading.Timer(1.0, lambda: os.kill(pid, signal.SIGKILL))
    killer.start()
    groups = real.engine.generate(real.prompts, 8, Sampling(max_new_tokens=60))
    killer.join()
    after = real.engine.score(real.prompts)  # one more start where the call was over before the kill
    assert real.engine.pid != pid and real.engine.version == version
    assert all(rollout.finish is not FinishReason.ABORTED for group in groups for rollout in group)
    for old, now in zip(before, after, strict=True):
        np.testing.assert_allclose(now[1:], old[1:], atol=1e-5)
    assert real.mismatch() <= tolerance_nats("vllm", real.dtype)
