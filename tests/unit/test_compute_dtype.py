"""Published dtype and compute dtype: passes use the published values, versions do not depend on who computed them."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarm.config import LearnerConfig, ModelConfig, NodeConfig, ReplayConfig
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.learn.checkpoint_state import newest_compute_dtype
from swarm.learn.learner import PolicyLearner
from swarm.model import compute_dtype
from swarm.model.compute_dtype import BUDGET_S, choose, measure_speeds, remembered_speeds
from swarm.model.lora import add_adapters, merge_adapters, merged_tensors
from swarm.model.network import load_model, tiny_network
from swarm.model.published_dtype import published_dtype, widen
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import load_published, published_state, snapshot, weights_digest
from swarm.objectives.methods import load_recipe
from swarm.testing.builders import make_group, make_scored
from swarm.types import Draw, DrawnGroup, PolicyVersion

TOKENIZER: Any = CharTokenizer()
BFLOAT16 = ModelConfig(source="tiny", dtype="bfloat16")
TEXTS = ["abc", "abd", "b", "cab"]
CPU = torch.device("cpu")


def network_of(seed: int, lora_rank: int = 0, *, is_widened: bool = True) -> torch.nn.Module:
    network = tiny_network(seed).to(torch.bfloat16)
    if lora_rank:
        add_adapters(network, lora_rank)
    if is_widened:
        widen(network, torch.float32)
    return network


def learner_of(network: torch.nn.Module, dir: Path) -> PolicyLearner:
    settings = LearnerConfig(learning_rate=3e-3)
    recipe = load_recipe("grpo")
    return PolicyLearner(network, TOKENIZER, recipe, settings, ReplayConfig(external="all"), "a" * 64, dir).resume()


def draw(step: int) -> Draw:
    rng = np.random.default_rng(step)
    groups = [
        make_scored(
            make_group("a" * 64, task_id=index, tokenizer=TOKENIZER, texts=TEXTS), rewards=rng.random(4).tolist()
        )
        for index in range(3)
    ]
    return Draw(step=step, groups=tuple(DrawnGroup(scored=g, age_steps=0, use=1) for g in groups), num_zero_variance=0)


@pytest.mark.parametrize("lora_rank", [0, 3])
def test_widening_changes_no_published_tensor_and_no_digest(lora_rank: int) -> None:
    plain, wide = network_of(1, lora_rank, is_widened=False), network_of(1, lora_rank)
    assert {param.dtype for param in wide.parameters()} == {torch.float32}
    ours, theirs = published_state(wide), published_state(plain)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == torch.bfloat16 and torch.equal(ours[name], theirs[name]) for name in ours)
    assert weights_digest(ours) == weights_digest(theirs)
    load_published(wide, snapshot(network_of(2, lora_rank, is_widened=False)))
    assert weights_digest(snapshot(wide)) == weights_digest(published_state(network_of(2, lora_rank)))


def test_a_tensor_that_is_published_in_float32_stays_so() -> None:
    network: Any = tiny_network(1).to(torch.bfloat16)
    network.model.norm.float()  # as some families keep their norms or routers
    digest = weights_digest(published_state(network))
    widen(network, torch.float32)
    assert weights_digest(published_state(network)) == digest
    assert published_dtype(network, "model.norm.weight", network.model.norm.weight) == torch.float32


@pytest.mark.parametrize("lora_rank", [0, 3])
def test_passes_use_masters_rounded_to_the_published_dtype(lora_rank: int, tmp_path: Path) -> None:
    network = network_of(1, lora_rank)
    learner = learner_of(network, tmp_path)
    for step in (1, 2, 3):
        learner.step(draw(step))
    masters = {name[7:]: tensor for name, tensor in learner._optimizer.state().items() if name.startswith("master.")}
    trained = {name: param for name, param in network.named_parameters() if param.requires_grad}
    assert masters.keys() == trained.keys()
    for name, param in trained.items():
        assert param.dtype == torch.float32
        assert torch.equal(param, masters[name].bfloat16().float()), name
        assert not torch.equal(param, masters[name]), "masters keep what rounding takes away"
    _, published = learner.snapshot()
    assert all(torch.equal(published[name].float(), trained[name]) for name in published)


@pytest.mark.parametrize("lora_rank", [0, 3])
def test_learner_and_follower_score_alike_to_the_last_bit(lora_rank: int, tmp_path: Path) -> None:
    learner = learner_of(network_of(1, lora_rank), tmp_path)
    learner.step(draw(1))
    ids = [TOKENIZER.encode_response(text) for text in ("abcabc", "bca", "cab dab")]
    own = TransformersGenerator(learner._network, TOKENIZER, learner.version, seed=0)
    follower = TransformersGenerator(network_of(1, lora_rank), TOKENIZER, PolicyVersion(policy_id="b", step=0), seed=0)
    follower.load(*learner.snapshot())
    assert follower.version.digest == weights_digest(snapshot(follower._network)) == learner.version.digest
    for ours, theirs in zip(own.score(ids), follower.score(ids), strict=True):
        assert np.array_equal(ours, theirs, equal_nan=True)


def test_merged_adapters_have_the_values_that_are_published() -> None:
    network, base = network_of(1, 3), published_state(tiny_network(1).to(torch.bfloat16))
    with torch.no_grad():
        for name, param in network.named_parameters():
            if name.endswith("lora_b"):
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(3)).bfloat16())
    expected = merged_tensors(base, published_state(network), 2.0)
    merge_adapters(network)
    assert weights_digest(published_state(network)) == weights_digest(expected)
    assert all(torch.equal(param, param.bfloat16().float()) for param in network.parameters())


def test_a_run_goes_on_in_the_dtype_of_its_checkpoint_and_may_change_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert newest_compute_dtype(tmp_path, "bfloat16") == ""
    learner = learner_of(network_of(1, is_widened=False), tmp_path)
    learner.step(draw(1))
    learner.save()
    saved = newest_compute_dtype(tmp_path, "float32")
    assert saved == "bfloat16"
    assert choose("auto", "bfloat16", CPU, {}, saved).dtype == "bfloat16"
    same = learner_of(network_of(1, is_widened=False), tmp_path)
    assert same.version == learner.version and not caplog.records
    changed = learner_of(network_of(1), tmp_path)
    assert changed.version == learner.version and changed.compute_dtype == "float32"
    assert [(record.__dict__["before"], record.__dict__["now"]) for record in caplog.records] == [
        ("bfloat16", "float32")
    ]


def test_bfloat16_is_taken_where_it_is_a_tenth_faster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))
    for number, (faster, expected) in enumerate([(1.09, "float32"), (1.11, "bfloat16")]):
        monkeypatch.setattr(compute_dtype, "measure_speeds", lambda _, f=faster: {"float32": 10.0, "bfloat16": 10 * f})
        choice = choose("auto", "bfloat16", CPU, {(8, number): 1})
        assert choice.dtype == expected and f"{10 * faster:.1f} in bfloat16" in choice.words
    assert choose("auto", "float32", CPU, {}).dtype == "float32", "a run that publishes float32 is computed in it"
    assert choose("bfloat16", "bfloat16", CPU, {}).reason == "compute_dtype asks for it"


def test_a_machine_is_measured_once_for_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, measured = tmp_path / "speeds.json", []

    def measure(products: Any) -> dict[str, float]:
        measured.append(products)
        return {"float32": 2.0, "bfloat16": 1.0}

    monkeypatch.setattr(compute_dtype, "measure_speeds", measure)
    for products in ({(4, 8): 1}, {(4, 8): 1}, {(4, 9): 1}):
        assert remembered_speeds(products, path) == {"float32": 2.0, "bfloat16": 1.0}
    assert measured == [{(4, 8): 1}, {(4, 9): 1}]
    path.write_text("[]")
    remembered_speeds({(4, 8): 1}, path)
    assert len(measured) == 3 and len(json.loads(path.read_text())) == 1, "a damaged file is measured again"
    blocked = tmp_path / "file"
    blocked.touch()
    assert remembered_speeds({(4, 8): 1}, blocked / "speeds.json")["float32"] == 2.0, "where nothing can be kept, too"


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"KEY": {"float32": 1e400, "bfloat16": 1}}', '{"KEY": {"float32": 5e-324, "bfloat16": 1}}',
             '{"KEY": {"float32": ' + "9" * 400 + ', "bfloat16": 1}}']
)  # fmt: skip
def test_speeds_that_nobody_can_have_measured_are_measured_again(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_dtype, "measure_speeds", lambda _: {"float32": 2.0, "bfloat16": 1.0})
    monkeypatch.setattr(compute_dtype, "_key", lambda _: "KEY")
    path = tmp_path / "speeds.json"
    path.write_text(text)
    assert remembered_speeds({(4, 8): 1}, path)["float32"] == 2.0
    assert json.loads(path.read_text()) == {"KEY": {"float32": 2.0, "bfloat16": 1.0}}


def test_a_damaged_state_does_not_decide_what_the_checkpoint_before_is_resumed_in(tmp_path: Path) -> None:
    learner = learner_of(network_of(1, is_widened=False), tmp_path)
    for step in (1, 2):
        learner.step(draw(step))
        learner.save()
    state = tmp_path / "checkpoint-00000002" / "state.json"
    state.write_text(state.read_text().replace('"bfloat16"', '"float32"'))
    assert newest_compute_dtype(tmp_path, "float32") == "bfloat16"
    state.write_text("[" * 100_000)
    assert newest_compute_dtype(tmp_path, "float32") == "bfloat16"
    assert choose("auto", "bfloat16", CPU, {}, "bfloat06").dtype == "float32"


def test_a_slow_dtype_has_lost_without_being_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    num_slow, mm, linear = [0], torch.mm, torch.nn.functional.linear

    def slow(product: Any, *given: torch.Tensor) -> torch.Tensor:
        if given[0].dtype == torch.bfloat16:
            num_slow[0] += 1
            end_s = time.process_time() + 0.05
            while time.process_time() < end_s:
                pass
        return product(*given)

    monkeypatch.setattr(torch, "mm", lambda *given: slow(mm, *given))
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *given: slow(linear, *given))
    speeds = measure_speeds({(64, 64): 4, (64, 200): 2})
    assert speeds["bfloat16"] < speeds["float32"] / 10
    assert num_slow[0] * 0.05 <= BUDGET_S, "each kind of each size is tried once"


def test_a_run_in_float32_is_not_computed_in_less() -> None:
    with pytest.raises(ValueError, match="compute_dtype: bfloat16 would round"):
        NodeConfig(model=ModelConfig(source="tiny", dtype="float32"), compute_dtype="bfloat16")


def test_the_initial_digest_does_not_depend_on_the_compute_dtype() -> None:
    loaded = load_model(BFLOAT16)
    widen(loaded.network, torch.float32)
    assert weights_digest(published_state(loaded.network)) == loaded.digest
