"""Several updates of a draw, what recipes remember, the reference policy, and runs that cannot feed a recipe."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from swarm.cli.main import app
from swarm.config import EnvironmentConfig, GeneratorConfig, LearnerConfig, NodeConfig, ReplayConfig
from swarm.errors import ConfigError
from swarm.learn.learner import PolicyLearner
from swarm.model.lora import add_adapters
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.objectives.methods import list_recipes, load_recipe
from swarm.objectives.part import Memory, Prediction, Probe, Requirement, Scope, Scored, TermPart
from swarm.objectives.recipe import Recipe
from swarm.objectives.requirements import check_supply, supplied_by
from swarm.testing.builders import make_group, make_scored
from swarm.types import Draw, DrawnGroup, StepReport

TOKENIZER: Any = CharTokenizer()


class Tracker(TermPart):
    """Notes what it is shown; its term uses what it remembers, and the policies that it asks for."""

    equation = "strength * (1 + seen) * mean (log pi - log pi_ref + log pi - log pi_old)"
    scope = Scope.STEP
    strength: float = 0.01
    log: list[tuple[Scored, Memory]] = dataclasses.field(default_factory=list)

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.REFERENCE_LOGPROBS, Requirement.PROXIMAL_LOGPROBS})

    def initial(self) -> Memory:
        return {"seen": 0, "tokens": {}}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        self.log.append((scored, memory))
        key = int(memory["seen"])
        return {"seen": key + 1, "tokens": {**memory["tokens"], key: scored.batch.step_tokens}}

    def __call__(self, scored: Scored) -> torch.Tensor:
        scale = self.strength * (1 + self.remembered(scored.batch)["seen"]) / scored.batch.step_tokens
        return scale * (2 * scored.logprobs - scored.reference - scored.proximal).sum()


def recipe() -> tuple[Recipe, Tracker]:
    tracker = Tracker()
    return dataclasses.replace(load_recipe("grpo"), terms=(tracker,)), tracker


def text(rng: np.random.Generator) -> str:
    return "".join(rng.choice(list("abcdefgh"), int(rng.integers(1, 7))))


def draw(step: int, num_groups: int = 6, reward: float = 1.0) -> Draw:
    rng = np.random.default_rng(step)
    groups = [
        make_scored(
            make_group(
                ("a" if index < 3 else "b") * 64,
                task_id=index,
                tokenizer=TOKENIZER,
                texts=[text(rng) for _ in range(4)],
            ),
            rewards=[reward, 0.0, 0.0, float(rng.integers(0, 2))],
            is_made_here=index < 3,
        )
        for index in range(num_groups)
    ]
    return Draw(step=step, groups=tuple(DrawnGroup(scored=g, age_steps=0, use=1) for g in groups), num_zero_variance=0)


def learner(dir: Path, chosen: Recipe, lora_rank: int = 0, **config: Any) -> PolicyLearner:
    network = tiny_network(seed=1)
    if lora_rank:
        add_adapters(network, lora_rank)
    settings = LearnerConfig.model_validate({"learning_rate": 3e-3, **config})
    return PolicyLearner(network, TOKENIZER, chosen, settings, ReplayConfig(external="all"), "a" * 64, dir).resume()


def figures(report: StepReport) -> tuple[object, ...]:
    return report.version, report.loss, report.grad_norm


def test_each_update_of_a_draw_sees_its_groups_and_the_memory_of_the_one_before(tmp_path: Path) -> None:
    chosen, tracker = recipe()
    one = learner(tmp_path, chosen, updates_per_step=4)
    report = one.step(draw(1))
    assert report.diagnostics["num_updates"] == 4 and report.version.step == one.version.step == 1
    batches = [scored.batch for scored, _ in tracker.log]
    assert [batch.step_groups for batch in batches] == [2, 2, 1, 1]
    assert [bool(batch.is_external.any()) for batch in batches] == [True, True, False, True]
    assert [memory["seen"] for _, memory in tracker.log] == [0, 1, 2, 3]
    assert report.num_tokens == sum(batch.step_tokens for batch in batches)
    assert one._memory["Tracker"]["tokens"] == {str(i): b.step_tokens for i, b in enumerate(batches)}


def test_proximal_log_probs_are_those_before_the_first_update_of_the_draw(tmp_path: Path) -> None:
    chosen, tracker = recipe()
    one = learner(tmp_path, chosen, updates_per_step=3)
    report = one.step(draw(1))
    gaps = [float((scored.logprobs - scored.proximal).abs().max()) for scored, _ in tracker.log]
    assert gaps[0] < 1e-5 and min(gaps[1:]) > 1e-3, gaps
    assert report.seconds["proximal"] > 0
    start = [float((scored.proximal - scored.reference).abs().max()) for scored, _ in tracker.log]
    assert max(start) < 1e-6, "at the first draw the policy is the reference"
    one.step(draw(2))
    later = [float((scored.proximal - scored.reference).abs().max()) for scored, _ in tracker.log[3:]]
    assert min(later) > 1e-3, later


def test_one_update_a_draw_scores_no_proximal_policy(tmp_path: Path) -> None:
    chosen, tracker = recipe()
    report = learner(tmp_path, chosen).step(draw(1))
    assert "proximal" not in report.seconds and report.seconds["reference"] > 0
    assert tracker.log[0][0].batch.proximal_logprobs is None


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_run_with_memory_reference_and_several_updates_resumes_bit_for_bit(tmp_path: Path, lora_rank: int) -> None:
    settings: dict[str, Any] = {"lora_rank": lora_rank, "updates_per_step": 2}
    whole = learner(tmp_path / "whole", recipe()[0], **settings)
    reports = [whole.step(draw(step, num_groups=2)) for step in (1, 2, 3)]
    first = learner(tmp_path / "parts", recipe()[0], **settings)
    for step in (1, 2):
        first.step(draw(step, num_groups=2))
    first.save()
    second = learner(tmp_path / "parts", recipe()[0], **settings)
    assert figures(second.step(draw(3, num_groups=2))) == figures(reports[2])
    assert second._memory == whole._memory and whole._memory["Tracker"]["seen"] == 6
    assert all(torch.equal(tensor, second.snapshot()[1][name]) for name, tensor in whole.snapshot()[1].items())


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_reference_stays_what_the_network_was(tmp_path: Path, lora_rank: int) -> None:
    chosen, tracker = recipe()
    one = learner(tmp_path, chosen, lora_rank=lora_rank)
    for _ in range(3):
        one.step(draw(7, num_groups=2))
    first, *later = [scored.reference for scored, _ in tracker.log]
    assert first.abs().max() > 0 and all(torch.equal(first, values) for values in later)
    moved = tracker.log[-1][0].logprobs - tracker.log[0][0].logprobs
    assert moved.abs().max() > 1e-3
    learned = [p for name, p in one._network.named_parameters() if name.endswith("lora_b")]
    assert not lora_rank or all(bool(factor.any()) for factor in learned), "the adapters were not put back"


def test_other_initial_weights_at_a_restart_are_refused(tmp_path: Path) -> None:
    learner(tmp_path, recipe()[0], lora_rank=2).save()
    other = tiny_network(seed=2)
    add_adapters(other, 2)
    with pytest.raises(ConfigError, match="the reference policy was"):
        PolicyLearner(other, TOKENIZER, recipe()[0], LearnerConfig(), ReplayConfig(), "a" * 64, tmp_path).resume()


def test_an_update_that_is_not_finite_leaves_memory_and_weights_and_the_next_one_goes_on(tmp_path: Path) -> None:
    chosen, tracker = recipe()
    one = learner(tmp_path, chosen, updates_per_step=2)
    bad, good = draw(1, num_groups=2, reward=float("inf")).groups[0], draw(1, num_groups=2).groups[1]
    before = one.snapshot()[1]
    report = one.step(dataclasses.replace(draw(1), groups=(bad, good)))
    assert report.diagnostics["num_updates"] == 1 and not report.was_skipped and np.isfinite(report.loss)
    assert one._memory["Tracker"]["seen"] == 1 == len(tracker.log) and one.version.step == 1
    assert all(bool(tensor.isfinite().all()) for tensor in one.snapshot()[1].values())
    report = one.step(dataclasses.replace(draw(2), groups=(bad,)))
    assert report.was_skipped and one._memory["Tracker"]["seen"] == 1 and one.version.step == 1
    assert any(not torch.equal(tensor, one.snapshot()[1][name]) for name, tensor in before.items())


def test_the_memory_in_a_checkpoint_is_plain_json(tmp_path: Path) -> None:
    one = learner(tmp_path, recipe()[0])
    one.step(draw(1))
    one.save()
    state = json.loads((tmp_path / "checkpoint-00000001" / "state.json").read_text())
    assert state["memory"] == one._memory and len(state["reference"]) == 64


def again(seen: Prediction) -> torch.Tensor:
    """The token's log-prob at its temperature, from the chunk of logits."""
    table = torch.log_softmax(seen.logits / seen.temperature[:, None], dim=1)
    return table.gather(1, seen.targets[:, None]).squeeze(1)


class Probing(TermPart):
    """Notes what its probe saw, in the loss and when the step is over."""

    equation = "0"
    scope: Scope  # pyright: ignore[reportIncompatibleVariableOverride] - a field: tests vary it
    in_loss: list[Scored] = dataclasses.field(default_factory=list)
    after: list[Scored] = dataclasses.field(default_factory=list)

    @property
    def probes(self) -> Mapping[str, Probe]:
        return {"again": again, "size": lambda seen: seen.hidden.norm(dim=1)}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        self.after.append(scored)
        return memory

    def __call__(self, scored: Scored) -> torch.Tensor:
        self.in_loss.append(scored)
        return scored.logprobs.sum() * 0


@pytest.mark.parametrize("scope", [Scope.TOKEN, Scope.GROUP, Scope.STEP])
def test_probes_are_there_in_the_loss_and_after_the_step_whatever_the_scope(tmp_path: Path, scope: Scope) -> None:
    probing: Any = Probing(scope=scope)
    one = learner(tmp_path, dataclasses.replace(load_recipe("grpo"), terms=(probing,)), token_budget=60)
    report = one.step(draw(1, num_groups=3))  # own ones: others' are clipped by what the whole first step weighs
    assert report.diagnostics["num_micro_batches"] > 1
    for scored in (*probing.in_loss, *probing.after):
        torch.testing.assert_close(scored.probes["again"], scored.logprobs.detach(), rtol=1e-5, atol=1e-5)
        assert bool((scored.probes["size"] > 0).eq(scored.mask).all())
        assert not scored.probes["again"].requires_grad
    assert len(probing.after) == 1 and probing.after[0].batch.num_rollouts == 12
    assert (len(probing.in_loss) == 1) == (scope is Scope.STEP)


# --- what a run supplies -----------------------------------------------------------------------


def node(num_tasks: int = 1_000_000, **sections: Any) -> NodeConfig:
    env = EnvironmentConfig(name="sums", kind="char", dataset="sum", num_tasks=num_tasks)
    return NodeConfig(environments=(env,), **sections)


def needing(*missing: Requirement) -> Recipe:
    class Needy(TermPart):
        equation = "0"
        strength: float = 0.0
        always_needs = frozenset(missing)

        def __call__(self, scored: Scored) -> torch.Tensor:
            return scored.logprobs.sum() * 0

    return dataclasses.replace(load_recipe("sapo_swarm"), terms=(Needy(),))


def episodes(kind: Literal["retry", "grid_world", "calculator", "look_up"], **changes: Any) -> NodeConfig:
    single = EnvironmentConfig(name="sums", kind="char", dataset="sum")
    return NodeConfig(environments=(single, EnvironmentConfig(name="episodes", kind=kind, **changes)))


@pytest.mark.parametrize("need", list(Requirement))
def test_a_need_is_met_or_refused_with_its_name_and_the_fix(need: Requirement) -> None:
    fed = {
        Requirement.ZERO_VARIANCE_GROUPS: node(replay=ReplayConfig(keep_zero_variance=True)),
        Requirement.SEVERAL_UPDATES: node(learner=LearnerConfig(updates_per_step=4)),
        Requirement.REPEATED_PROMPTS: node(num_tasks=200),
        Requirement.TURNS: episodes("retry", params={"inner": {"kind": "char", "dataset": "reverse"}}),
        Requirement.TURN_REWARDS: episodes("grid_world"),
        Requirement.TURN_SIGNAL: node(replay=ReplayConfig(keep_turn_signal=True)),
        Requirement.STATE_KEYS: episodes("grid_world"),
        Requirement.TOOL_CALLS: episodes("calculator"),
        Requirement.REWARD_PARTS: episodes("look_up", params={"style": "char"}),
        Requirement.VARIED_GROUPS: node(generator=GeneratorConfig(group_size=8, largest_group=32)),
    }
    always = {
        Requirement.BEHAVIOR_LOGPROBS,
        Requirement.PROXIMAL_LOGPROBS,
        Requirement.REFERENCE_LOGPROBS,
        Requirement.BASELINE_ROLLOUT,
        Requirement.PERTURBED_LOGPROBS,
        Requirement.ANSWER_PROBS,
        Requirement.FEEDBACK_SHIFTS,
        Requirement.TURN_UPDATES,
    }
    if need in always:
        check_supply(needing(need), supplied_by(node()))
        return
    with pytest.raises(ConfigError, match=rf"sapo_swarm needs .* {need}: .*"):
        check_supply(needing(need), supplied_by(node()))
    if need in fed:
        check_supply(needing(need), supplied_by(fed[need]))


def test_every_missing_thing_is_named_at_once() -> None:
    both = needing(Requirement.TURNS, Requirement.ZERO_VARIANCE_GROUPS)
    with pytest.raises(ConfigError, match=r"turns: .*; zero_variance_groups: .*keep_zero_variance = true"):
        check_supply(both, supplied_by(node()))


def test_most_recipes_run_with_the_defaults() -> None:
    def runs(name: str) -> bool:
        return load_recipe(name).needs <= supplied_by(node())

    names = list_recipes()
    assert runs("grpo") and runs("sapo_swarm") and sum(map(runs, names)) > len(names) / 2


def test_check_refuses_a_recipe_that_the_run_cannot_feed(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    env = 'name = "sums"\nkind = "char"\ndataset = "sort"\n'
    needy = next(name for name in list_recipes() if Requirement.SEVERAL_UPDATES in load_recipe(name).needs)
    config.write_text(f'[learner]\nrecipe = "{needy}"\n[[environments]]\n{env}')
    refused = CliRunner().invoke(app, ["check", "--config", str(config)])
    assert refused.exit_code != 0
    others = [need for need in load_recipe(needy).needs if need not in supplied_by(node())]
    assert others == [Requirement.SEVERAL_UPDATES]
    accepted = CliRunner().invoke(app, ["check", "--config", str(config), "--set", "learner.updates_per_step=2"])
    assert accepted.exit_code == 0, accepted.output
