"""One step, its accumulation, its checkpoint."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from swarm.config import LearnerConfig, ReplayConfig
from swarm.errors import ConfigError
from swarm.learn.learner import PolicyLearner
from swarm.learn.packing import pack
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import weights_digest
from swarm.objectives.methods import list_recipes, load_recipe
from swarm.objectives.part import AggregatePart, Part, Requirement, Scope, Scored, TokenLosses, WeightPart
from swarm.objectives.recipe import Recipe
from swarm.objectives.requirements import NOT_YET
from swarm.testing.builders import make_group, make_scored
from swarm.testing.tiny_models import tiny_qwen3
from swarm.types import Correction, Draw, DrawnGroup, FinishReason, Sampling


def without_sharing(*given: Any, **options: Any) -> Any:
    """As `pack`, with one row for each rollout."""
    return pack(*given, **{**options, "break_even": -math.inf})


def representatives() -> list[str]:
    """One recipe of each kind that the learner treats differently."""
    chosen: dict[object, str] = {}
    for name in list_recipes():
        recipe = load_recipe(name)
        if recipe.needs & NOT_YET:
            continue  # no run can supply it
        inputs = recipe.needs & {
            Requirement.REFERENCE_LOGPROBS,
            Requirement.PROXIMAL_LOGPROBS,
            Requirement.PERTURBED_LOGPROBS,
        }
        remembers = any(type(part).observe is not Part.observe for _, part in recipe.parts)
        chosen.setdefault((recipe.scope, inputs, remembers), name)
    return sorted({*chosen.values(), "grpo", "sapo_swarm"})


OWN, PEER = "a" * 64, "b" * 64
TOKENIZER = CharTokenizer()


def drawn(rng: np.random.Generator, is_made_here: bool = True, correction: Correction = Correction.EXACT) -> DrawnGroup:
    group = make_group(
        OWN if is_made_here else PEER,
        task_id=int(rng.integers(0, 100)),
        tokenizer=TOKENIZER,
        texts=["".join(rng.choice(list("abcdefgh"), int(rng.integers(1, 8)))) for _ in range(4)],
        logprob=-3.5,
        sampling=Sampling(temperature=float(rng.choice([0.7, 1.0]))),
    )
    scored = make_scored(group, rewards=[1.0, 0.0, 0.0, 1.0], is_made_here=is_made_here, correction=correction)
    return DrawnGroup(scored=scored, age_steps=int(rng.integers(0, 4)), use=1)


def draw(step: int, num_own: int = 3) -> Draw:
    rng = np.random.default_rng(step)
    groups = tuple(drawn(rng, is_made_here=index < num_own) for index in range(6))
    return Draw(step=step, groups=groups, num_zero_variance=0)


def learner(
    dir: Path, dtype: torch.dtype = torch.float32, recipe: str | Recipe = "grpo", **config: Any
) -> PolicyLearner:
    return PolicyLearner(**arguments(dir, dtype, recipe, **config)).resume()


def arguments(dir: Path, dtype: torch.dtype, recipe: str | Recipe, **config: Any) -> dict[str, Any]:
    return {
        "network": tiny_network(seed=1).to(dtype),
        "tokenizer": TOKENIZER,
        "recipe": load_recipe(recipe) if isinstance(recipe, str) else recipe,
        "config": LearnerConfig.model_validate({"learning_rate": 1e-3, "warmup_steps": 4, **config}),
        "replay": ReplayConfig(),
        "policy_id": OWN,
        "answer_of": lambda _env, _task_id: "42",
        "dir": dir,
    }


# what a recipe remembers is of no dtype; what the optimizer keeps beside bfloat16 weights is of no recipe
@pytest.mark.parametrize(
    ("dtype", "recipe", "make"),
    [
        (torch.float32, "grpo", tiny_network),
        (torch.float32, "grpo", tiny_qwen3),
        *((torch.bfloat16, name, tiny_network) for name in representatives()),
    ],
)
def test_resume_after_two_steps_ends_at_the_same_bits_as_four_steps(
    tmp_path: Path, dtype: torch.dtype, recipe: str, make: Callable[[int], nn.Module]
) -> None:
    def learner(dir: Path, dtype: torch.dtype, recipe: str) -> PolicyLearner:
        own: dict[str, Any] = {**arguments(dir, dtype, recipe), "network": make(1).to(dtype)}
        return PolicyLearner(**own).resume()

    whole = learner(tmp_path / "whole", dtype, recipe)
    reports = [whole.step(draw(step)) for step in range(1, 5)]
    first = learner(tmp_path / "parts", dtype, recipe)
    for step in range(1, 3):
        first.step(draw(step))
    first.save()
    second = learner(tmp_path / "parts", dtype, recipe)
    assert second.version == first.version and second.next_draw == 3
    again = [second.step(draw(step)) for step in range(3, 5)]
    assert [(r.version, r.loss, r.grad_norm) for r in again] == [(r.version, r.loss, r.grad_norm) for r in reports[2:]]
    for name, tensor in whole.snapshot()[1].items():
        assert torch.equal(tensor, second.snapshot()[1][name]), name
    for name, tensor in whole._optimizer.state().items():
        assert torch.equal(tensor, second._optimizer.state()[name]), name


@pytest.mark.parametrize("recipe", [name for name in representatives() if load_recipe(name).ratio.noise is None])
def test_accumulated_micro_batches_make_the_step_of_one_big_batch(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = learner(tmp_path / "a", torch.float64, recipe, token_budget=100_000)
    small = learner(tmp_path / "b", torch.float64, recipe, token_budget=32)
    reports = [one.step(draw(1)) for one in (big, small)]
    monkeypatch.setattr("swarm.learn.learner.pack", without_sharing)
    reports.append(learner(tmp_path / "c", torch.float64, recipe, token_budget=32).step(draw(1)))
    counts = [report.diagnostics["num_micro_batches"] for report in reports]
    assert counts[0] < counts[1] and counts[2] > 3, counts
    for report in reports[1:]:
        # The library computes norms and rotary embeddings in float32 even in a float64 network.
        assert report.loss == pytest.approx(reports[0].loss, rel=1e-4, abs=1e-6)
        assert report.grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-4)


def test_a_version_is_named_by_the_digest_of_what_it_publishes(tmp_path: Path) -> None:
    one = learner(tmp_path, torch.bfloat16)
    before = one.snapshot()
    report = one.step(draw(1))
    version, tensors = one.snapshot()
    assert version == report.version and version.step == 1 and version.policy_id == OWN
    assert version.digest == weights_digest(tensors) != before[0].digest
    assert before[0].digest == weights_digest(before[1]), "an old snapshot changed"
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())


def test_masters_keep_updates_that_bfloat16_would_round_away(tmp_path: Path) -> None:
    one = learner(tmp_path, torch.bfloat16, learning_rate=1e-6, warmup_steps=0)
    initial = {name: tensor.float() for name, tensor in one._optimizer.state().items() if "master" in name}
    initial = {name: tensor.clone() for name, tensor in initial.items()}
    one.step(draw(1))
    state = one._optimizer.state()
    moved = sum(int((state[name] != tensor).sum()) for name, tensor in initial.items())
    total = sum(tensor.numel() for tensor in initial.values())
    assert moved > 0.5 * total


class Explosive(AggregatePart):
    equation = "L = inf"

    def __call__(self, losses: torch.Tensor, scored: Scored) -> torch.Tensor:
        return losses.sum() * float("inf")


def test_a_step_that_is_not_finite_is_skipped_and_leaves_everything_as_it_was(tmp_path: Path) -> None:
    recipe = load_recipe("sapo_swarm")
    explosive = dataclasses.replace(recipe, aggregate=Explosive())
    one = learner(tmp_path, recipe=explosive)
    before, state = one.snapshot(), {k: v.clone() for k, v in one._optimizer.state().items()}
    report = one.step(draw(1))
    assert report.was_skipped and report.version == before[0] == one.version
    assert all(torch.equal(value, state[name]) for name, value in one._optimizer.state().items())
    assert one.next_draw == 2
    assert not learner(tmp_path).step(draw(2)).was_skipped


def test_a_gradient_that_is_not_finite_is_skipped_too(tmp_path: Path) -> None:
    one = learner(tmp_path)
    weight = next(one._network.parameters())
    hook = weight.register_hook(lambda gradient: gradient * float("nan"))
    assert one.step(draw(1)).was_skipped and one.version.step == 0
    hook.remove()
    assert not one.step(draw(2)).was_skipped


def test_external_members_with_negative_advantage_give_no_gradient_but_count_in_the_group(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    external = Draw(step=1, groups=(drawn(rng, is_made_here=False),), num_zero_variance=0)
    positive = learner(tmp_path / "a", recipe="sapo_swarm").step(external)
    settings = arguments(tmp_path / "b", torch.float32, "sapo_swarm")
    everything = PolicyLearner(**settings | dict[str, Any](replay=ReplayConfig(external="all"))).step(external)
    lengths = [len(r.trace.token_ids) for r in external.groups[0].scored.group.rollouts if r.trace is not None]
    assert positive.num_tokens == lengths[0] + lengths[3] and everything.num_tokens == sum(lengths)
    # z-scores of (1, 0, 0, 1) are +-sqrt(3)/2; with ratio 1 the loss is minus their sum over all tokens
    expected = -(lengths[0] + lengths[3]) * 0.75**0.5 / sum(lengths)
    assert positive.loss == pytest.approx(expected, rel=1e-5)
    assert positive.diagnostics["dropped_share"] == pytest.approx(0.5)


def test_a_step_says_how_long_responses_were_and_how_many_were_cut_off(tmp_path: Path) -> None:
    group = drawn(np.random.default_rng(0))
    first, *others = group.scored.group.rollouts
    rollouts = (dataclasses.replace(first, finish=FinishReason.LENGTH), *others)
    scored = dataclasses.replace(group.scored, group=dataclasses.replace(group.scored.group, rollouts=rollouts))
    report = learner(tmp_path).step(
        Draw(step=1, groups=(dataclasses.replace(group, scored=scored),), num_zero_variance=0)
    )
    assert report.diagnostics["cut_off_share"] == 1 / len(rollouts)
    assert report.diagnostics["response_tokens_mean"] == scored.group.num_tokens / len(rollouts)


def test_a_draw_with_nothing_to_train_on_is_skipped(tmp_path: Path) -> None:
    one = learner(tmp_path)
    group = drawn(np.random.default_rng(0))
    rollouts = tuple(dataclasses.replace(r, finish=FinishReason.ABORTED) for r in group.scored.group.rollouts)
    scored = dataclasses.replace(group.scored, group=dataclasses.replace(group.scored.group, rollouts=rollouts))
    report = one.step(Draw(step=1, groups=(dataclasses.replace(group, scored=scored),), num_zero_variance=0))
    assert report.was_skipped and report.num_tokens == 0 and one.version.step == 0


@pytest.mark.parametrize("correction", [Correction.NO_LOGPROBS, Correction.TEXT_ONLY])
def test_a_ratio_that_does_not_exist_is_refused_except_by_swarm_sampling(
    tmp_path: Path, correction: Correction
) -> None:
    rng = np.random.default_rng(0)
    unknown = Draw(
        step=1, groups=(drawn(rng), drawn(rng, is_made_here=False, correction=correction)), num_zero_variance=0
    )
    with pytest.raises(ConfigError, match="needs behaviour log-probs"):
        learner(tmp_path / "a", recipe="grpo").step(unknown)
    report = learner(tmp_path / "b", recipe="sapo_swarm").step(unknown)
    assert not report.was_skipped and report.edges == ()
    assert load_recipe("sapo_swarm").accepts(correction) and not load_recipe("grpo").accepts(correction)


def test_edges_report_each_external_source_and_never_ourselves(tmp_path: Path) -> None:
    report = learner(tmp_path).step(draw(1))
    (edge,) = report.edges
    assert edge.source == PEER and edge.num_groups == 3 and 0 < edge.ess_share <= 1 and edge.mismatch_kl > 0
    assert report.num_local == report.num_external == 3 and len(report.ages_steps) == 6


def test_warm_up_scales_the_first_updates(tmp_path: Path) -> None:
    def moved(warmup_steps: int) -> float:
        one = learner(tmp_path / str(warmup_steps), warmup_steps=warmup_steps)
        before = one.snapshot()[1]
        one.step(draw(1))
        return max(float((one.snapshot()[1][name] - tensor).abs().max()) for name, tensor in before.items())

    assert moved(10) == pytest.approx(moved(0) / 10, rel=1e-2)


def test_a_checkpoint_of_another_lineage_or_model_is_refused(tmp_path: Path) -> None:
    learner(tmp_path).save()
    with pytest.raises(ConfigError, match="checkpoint of policy aaaaaaaa"):
        PolicyLearner(**arguments(tmp_path, torch.float32, "grpo") | dict[str, Any](policy_id=PEER)).resume()
    network: Any = tiny_network(seed=1)
    network.resize_token_embeddings(TOKENIZER.vocab_size + 1)
    with pytest.raises(ConfigError, match="checkpoint of another model"):
        PolicyLearner(**arguments(tmp_path, torch.float32, "grpo") | dict[str, Any](network=network)).resume()


def test_an_architecture_with_logits_of_its_own_is_refused(tmp_path: Path) -> None:
    settings = arguments(tmp_path, torch.float32, "grpo")
    settings["network"].config.logits_scaling = 8.0  # said, and not done by a Llama
    with pytest.raises(ConfigError, match="computes its logits in a way that the learner does not know"):
        PolicyLearner(**settings)


class Spy(WeightPart):
    """Notes how many rollouts the rule sees at a time."""

    equation = "L"
    inner: WeightPart
    seen: list[int]
    scope: Scope  # pyright: ignore[reportIncompatibleVariableOverride] - a field: tests vary it

    def __call__(self, scored: Scored) -> TokenLosses:
        self.seen.append(scored.batch.num_rollouts)
        return self.inner(scored)


@pytest.mark.parametrize(
    ("scope", "share_prompt", "is_whole"),
    [
        (Scope.TOKEN, True, False),
        (Scope.GROUP, True, False),  # every micro-batch holds whole groups
        (Scope.GROUP, False, True),
        (Scope.STEP, True, True),
    ],
)
def test_coefficients_that_reach_beyond_a_micro_batch_are_computed_once_for_the_step(
    tmp_path: Path, scope: Scope, share_prompt: bool, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not share_prompt:
        monkeypatch.setattr("swarm.learn.learner.pack", without_sharing)
    recipe, seen = load_recipe("sapo_swarm"), list[int]()
    spy: Any = Spy(inner=recipe.weight, seen=seen, scope=scope)
    settings = arguments(tmp_path, torch.float32, dataclasses.replace(recipe, weight=spy))
    config = LearnerConfig(token_budget=40)
    settings |= {"replay": ReplayConfig(external="all"), "config": config}
    report = PolicyLearner(**settings).step(draw(1, num_own=6))  # what others' groups may weigh is a further reach
    assert report.diagnostics["num_micro_batches"] > 1 and sum(seen) == 24
    assert (seen == [24]) == is_whole


@pytest.mark.parametrize("recipe", ["grpo", *(name for name in representatives() if load_recipe(name).ratio.noise)])
def test_gradient_checkpointing_changes_memory_and_nothing_else(tmp_path: Path, recipe: str) -> None:
    def kept_bytes(one: PolicyLearner) -> int:
        """Bytes that the steps' forward passes kept for their backward passes."""
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for step in range(1, 4):
                one.step(draw(step))
        return total

    plain, checkpointed = (
        learner(tmp_path / str(on), recipe=recipe, gradient_checkpointing=on) for on in (False, True)
    )
    assert kept_bytes(checkpointed) < 0.5 * kept_bytes(plain)
    assert plain.version == checkpointed.version


def test_a_network_with_gradient_checkpointing_still_generates_with_a_cache(tmp_path: Path) -> None:
    one = learner(tmp_path, gradient_checkpointing=True)
    one.step(draw(1))
    network, token_ids = cast(Any, one._network), torch.arange(1, 9)[None]
    with torch.no_grad():
        cache = network(input_ids=token_ids[:, :7], use_cache=True).past_key_values
        last = network(input_ids=token_ids[:, 7:], past_key_values=cache, use_cache=True)
        whole = network(input_ids=token_ids, use_cache=False).logits[:, -1]
    assert last.past_key_values.get_seq_length() == 8
    torch.testing.assert_close(last.logits[:, -1], whole)
