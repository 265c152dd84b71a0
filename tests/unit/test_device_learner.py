"""The learner with its network on a device, beside the same learner on the host."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swarm.config import EnvironmentConfig, LearnerConfig
from swarm.environments.load import build_environments
from swarm.environments.replay import replay
from swarm.learn.checkpoint import read_checkpoint
from swarm.learn.fused_head import Head, Scores, Upstream, fused_backward, has_wide_product
from swarm.learn.learner import PolicyLearner
from swarm.learn.ranks import OneProcess
from swarm.model.lora import add_adapters
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.objectives.methods import list_recipes, load_recipe
from swarm.objectives.part import Requirement
from swarm.objectives.requirements import NOT_YET
from swarm.telemetry.shown_updates import ShownUpdate
from swarm.testing.builders import make_group, make_scored
from swarm.testing.episodes import make_episode_group
from swarm.testing.tiny_models import make_learner
from swarm.types import Draw, DrawnGroup, Sampling, StepReport
from tests.worlds.pretended_device import device_named

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["pretended", pytest.param("cuda", marks=CUDA)]
tiny_network()  # the model library is imported here, not within the limit of a test
TOKENIZER, OWN, PEER = CharTokenizer(), "a" * 64, "b" * 64
# a probe, a reference, noise, a second pass, and what remembers
NEED_A_NODE = ("remax",)  # greedy answers, which a learner alone does not have
KINDS = ("grpo", "poise", "alp", "mdpo", "prompt_gdro")


def every_recipe() -> list[Any]:
    """The recipes that a run can supply; all but a few kinds only in a sweep."""
    names = [name for name in list_recipes() if not load_recipe(name).needs & NOT_YET and name not in NEED_A_NODE]
    return [name if name in KINDS else pytest.param(name, marks=pytest.mark.sweep) for name in names]


def draw(step: int) -> Draw:
    rng = np.random.default_rng(step)
    groups: list[DrawnGroup] = []
    for index in range(4):
        texts = ["".join(rng.choice(list("abcdefgh"), int(rng.integers(1, 7)))) for _ in range(4)]
        group = make_group(PEER if index == 3 else OWN, task_id=index, tokenizer=TOKENIZER, texts=texts)
        rewards = [1.0, 0.0, 0.0, float(index % 2)]
        groups.append(DrawnGroup(scored=make_scored(group, rewards=rewards), age_steps=index % 2, use=1))
    return Draw(step=step, groups=tuple(groups), num_zero_variance=0)


def episodes(step: int) -> Draw:
    """Episodes of one to three turns on a grid."""
    rng, groups = np.random.default_rng(step), list[DrawnGroup]()
    params = {"style": "char", "max_turns": 6, "steps": 3}
    config = EnvironmentConfig(name="grid", kind="grid_world", params=params, seed=1)
    environment = build_environments([config])["grid"]
    for task_id in range(3):
        tries = [tuple(rng.choice(["up", "down", "left", "right"], int(rng.integers(1, 4))).tolist()) for _ in range(4)]
        played = [actions[: len(replay(environment, task_id, actions).transitions)] for actions in tries]
        owner = OWN if task_id else PEER
        group = make_episode_group(environment, task_id, played, TOKENIZER, owner, Sampling(max_new_tokens=8))
        groups.append(DrawnGroup(scored=make_scored(group, rewards=[1.0, 0.0, 0.0, 1.0]), age_steps=0, use=1))
    return Draw(step=step, groups=tuple(groups), num_zero_variance=0)


def learner(
    dir: Path,
    device: torch.device | str,
    recipe: str = "grpo",
    dtype: torch.dtype = torch.float32,
    lora_rank: int = 0,
    **config: Any,
) -> PolicyLearner:
    network = tiny_network(seed=1).to(dtype)
    if lora_rank:
        add_adapters(network, lora_rank, 1.0, ())
    settings = LearnerConfig.model_validate({"learning_rate": 1e-3, "token_budget": 96, **config})
    parts = {"ranks": OneProcess(device), "answer_of": lambda _env, _task_id: "42", "show": list[ShownUpdate]().append}
    return make_learner(dir, recipe, network=network, config=settings, **parts)


def close(found: StepReport, expected: StepReport, rel: float) -> None:
    assert not found.was_skipped and not expected.was_skipped and found.version.step == expected.version.step
    assert found.loss == pytest.approx(expected.loss, rel=rel, abs=rel)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=10 * rel, abs=1e-6)  # m2po_mask: rounding alone
    assert found.diagnostics.keys() == expected.diagnostics.keys()
    for edge, other in zip(found.edges, expected.edges, strict=True):
        assert edge.source == other.source and edge.mismatch_kl == pytest.approx(other.mismatch_kl, rel=rel, abs=rel)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("recipe", every_recipe())
def test_a_step_on_a_device_is_that_of_the_host(tmp_path: Path, name: str, recipe: str) -> None:
    on_host = learner(tmp_path / "host", "cpu", recipe)
    expected = [on_host.step(draw(step)) for step in (1, 2)]
    with device_named(name) as device:
        one = learner(tmp_path / "device", device, recipe)
        reports = [one.step(draw(step)) for step in (1, 2)]
        assert {tensor.device.type for tensor in one.snapshot()[1].values()} == {device.type}
    if load_recipe(recipe).needs & {Requirement.PERTURBED_LOGPROBS} and name == "cuda":
        assert not any(report.was_skipped for report in reports)  # its random numbers are the device's own
        return
    # AdamW divides by the gradient's size: where that is rounding, the second step begins elsewhere
    for report, other, rel in zip(reports, expected, (1e-4, 1e-4 if name == "pretended" else 5e-3), strict=True):
        close(report, other, rel)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("recipe", every_recipe())
def test_a_step_over_turns_on_a_device_is_that_of_the_host(tmp_path: Path, name: str, recipe: str) -> None:
    expected = learner(tmp_path / "host", "cpu", recipe, token_budget=256).step(episodes(1))
    with device_named(name) as device:
        one = learner(tmp_path / "device", device, recipe, token_budget=256)
        one.dry_run(episodes(1))
        report = one.step(episodes(1))
        frozen = one.step(episodes(2), is_frozen=True, ratio_band=2.0)
    assert frozen.version == report.version
    if load_recipe(recipe).needs & {Requirement.PERTURBED_LOGPROBS} and name == "cuda":
        assert not report.was_skipped  # its random numbers are the device's own
        return
    close(report, expected, rel=1e-4)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_checkpointing": True}, {"lora_rank": 4, "recipe": "mdpo"}],  # mdpo asks for the reference
    ids=["plain", "checkpointing", "adapters"],
)
def test_a_bfloat16_step_on_a_device_is_nearly_that_of_the_host(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    expected = learner(tmp_path / "host", "cpu", dtype=torch.bfloat16, **options).step(draw(1))
    with device_named(name) as device:
        report = learner(tmp_path / "device", device, dtype=torch.bfloat16, **options).step(draw(1))
    close(report, expected, rel=0.01)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("recipe", ["grpo", "alp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_a_device_goes_on_there_and_on_the_host(
    tmp_path: Path, name: str, recipe: str, dtype: torch.dtype
) -> None:
    """The bits read are those written; a step after it is as close as two kernels are."""
    with device_named(name) as device:
        first = learner(tmp_path, device, recipe, dtype)
        first.step(draw(1))
        first.save()
        saved = {key: tensor.cpu().clone() for key, tensor in first._optimizer.state().items()}
        there = learner(tmp_path, device, recipe, dtype)
        assert there.version == first.version and there.next_draw == 2
        for key, tensor in there._optimizer.state().items():
            assert torch.equal(tensor.cpu(), saved[key]), key
        expected, report = first.step(draw(2)), there.step(draw(2))
    stored = read_checkpoint(tmp_path).tensors
    assert all(torch.equal(tensor, stored[key]) for key, tensor in saved.items())
    here = learner(tmp_path, "cpu", recipe, dtype)
    assert here.version.step == 1 and here.next_draw == 2
    rel = 1e-4 if dtype is torch.float32 else 0.02
    close(report, expected, rel)
    if recipe != "alp" or name != "cuda":  # noise is the device's own
        close(here.step(draw(2)), expected, rel)


def head_gradients(
    device: torch.device | str, rounded: torch.dtype, dtype: torch.dtype, chunk_elements: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, d by hidden, d by weight) on the host, of numbers rounded to one dtype, computed in another."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn((300, 64), generator=generator).to(rounded).to(device, dtype)
    weight = (0.1 * torch.randn((500, 64), generator=generator)).to(rounded).to(device, dtype)
    targets = torch.randint(0, 500, (300,), generator=generator).to(device)
    upstream, scored = torch.randn(300, generator=generator).to(device), list[Tensor]()
    head = Head(weight=weight)
    weight_grad = torch.zeros(weight.shape, dtype=head.dtype, device=device)

    def rule(run: slice, scores: Scores) -> Upstream:
        scored.append(scores.logprobs)
        return upstream[run], None

    ones, ends = torch.ones(300, device=device), range(1, 301)
    by_hidden = fused_backward(head, hidden, targets, ones, ends, rule, weight_grad, chunk_elements=chunk_elements)
    return torch.cat(scored).cpu().double(), by_hidden.cpu().double(), weight_grad.cpu().double()


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_layer_of_a_device_adds_up_its_gradient_in_float32(name: str, dtype: torch.dtype) -> None:
    """Of 38 chunks: rounded to bfloat16 each, it would be off by .0023 of its norm, and where the sum is, by .0069."""
    exact = head_gradients("cpu", dtype, torch.float64, chunk_elements=2**20)
    with device_named(name) as device:
        found = head_gradients(device, dtype, dtype, chunk_elements=500 * 8)
    bounds = (1e-5, 1e-5, 1e-5) if dtype is torch.float32 else (0.005, 0.01, 0.002)
    for each, expected, bound in zip(found, exact, bounds, strict=True):
        assert float((each - expected).norm() / expected.norm()) < bound


def test_a_product_that_torch_does_not_have_is_no_error() -> None:
    assert not has_wide_product(torch.device("cpu"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_adds_half_precision_products_in_float32() -> None:
    """A GPU that does not makes a right step more slowly."""
    assert has_wide_product(torch.device("cuda"), torch.bfloat16)
