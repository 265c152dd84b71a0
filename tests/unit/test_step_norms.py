"""No method makes an exploding step at its defaults: real learner steps of the tiny model, beside PPO's.

The rollouts are sampled by the model that every learner begins with, so that the first draw is on-policy and the
next ones are one, two and three steps old.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from swarm.clock import ManualClock
from swarm.config import EnvironmentConfig, LearnerConfig, ModelConfig
from swarm.environments.char_tasks import KINDS, CharEnvironment
from swarm.environments.tool_calls import render_call
from swarm.episode import EpisodeOutcome, ToolCall, Transition, TurnStatus
from swarm.generation.produce import produce
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.model.network import LoadedModel, load_model
from swarm.objectives.methods import list_recipes, load_recipe
from swarm.objectives.part import Requirement
from swarm.objectives.requirements import NOT_YET
from swarm.testing.tiny_models import make_learner
from swarm.types import Correction, Draw, DrawnGroup, PolicyVersion, Rollout, Sampling, ScoredGroup, StepReport

NODE = "a" * 64
MOST = 100.0  # of a method's gradient norm before clipping, times PPO's on the same batch
REASONS: dict[str, str] = {}
"""Method -> one sentence on why its steps may be larger than that."""

REWARDS = ("binary", "graded", "binary", "graded")  # of the four draws; the fourth begins with a bundle of flat groups
RUNNABLE = [name for name in list_recipes() if not load_recipe(name).needs & NOT_YET]


@cache
def tiny() -> LoadedModel:
    return load_model(ModelConfig(source="tiny", dtype="float32"))


@cache
def groups(number: int) -> tuple[tuple[ScoredGroup, ...], tuple[float, ...]]:
    """Eight groups of four (one of three) with real log-probs, every second one flat; rewards of greedy answers."""
    model, rng = tiny(), np.random.default_rng(number)
    version = PolicyVersion(policy_id=NODE, step=0)
    generator = TransformersGenerator(network=model.network, tokenizer=model.tokenizer, version=version, seed=number)
    environments = [CharEnvironment(EnvironmentConfig(name=kind, kind="char", dataset=kind)) for kind in KINDS]
    tasks = [env.task(number) for env in environments]
    sampling = Sampling(max_new_tokens=9)
    made = produce(
        generator,
        model.tokenizer,
        tasks,
        4,
        sampling,
        run_id="r",
        producer=NODE,
        clock=ManualClock(),
        byte_lengths=True,
    )
    kept: list[ScoredGroup] = []
    for place, group in enumerate(made):
        size = 3 if place == 1 else 4
        values = rng.integers(0, 2, size) if REWARDS[number] == "binary" else rng.random(size).round(2)
        if place % 2 == 0 or (number == 3 and place < 6):  # no variance: all wrong, all right, or all the same
            values = np.full(size, (0.0, 1.0, 0.0, 0.5)[place // 2])
        elif values.max() == values.min():
            values[0] = 1.0 - values[0]
        kept.append(
            ScoredGroup(
                digest=bytes(31) + bytes([place]),
                group=replace(group, rollouts=group.rollouts[:size]),
                rewards=values.astype(np.float32),
                correction=Correction.EXACT,
                is_made_here=True,
                first_seen_s=0.0,
                size_bytes=1,
            )
        )
    return tuple(kept), tuple(rng.integers(0, 2, len(kept)).astype(float))


def as_episodes(scored: ScoredGroup, seed: int) -> ScoredGroup:
    """The same tokens in two turns where there are two, with rewards, states, calls and statuses of each."""
    rng = np.random.default_rng(seed)
    rollouts: list[Rollout] = []
    outcomes: list[EpisodeOutcome] = []
    for rollout, reward in zip(scored.group.rollouts, scored.rewards.tolist(), strict=True):
        assert rollout.trace is not None
        size = rollout.trace.token_ids.size
        turns = 2 if size > 1 else 1
        call = render_call(ToolCall(name="add", arguments={})) * int(rng.integers(0, 3))
        turn_ids = (np.arange(size) >= (size + 1) // 2).astype(np.int16)
        actions = (call, rollout.text)[-turns:]
        rollouts.append(replace(rollout, actions=actions, trace=replace(rollout.trace, turn_ids=turn_ids)))
        transitions = tuple(
            Transition(
                is_end=turn == turns - 1,
                reward=float(rng.choice((-0.5, 0.0, 0.25, 1.0))),
                status=TurnStatus(rng.choice(["ok", "ok", "ok", *TurnStatus])),
                state_key=str(rng.choice(("", "here", "there"))),
            )
            for turn in range(turns)
        )
        outcomes.append(EpisodeOutcome(reward=reward, transitions=transitions))
    return replace(scored, group=replace(scored.group, rollouts=tuple(rollouts)), outcomes=tuple(outcomes))


def draw(step: int, keep_zero_variance: bool, has_turns: bool) -> Draw:
    found, baselines = groups(step - 1)
    if has_turns:
        found = tuple(as_episodes(each, 10 * step + place) for place, each in enumerate(found))
    chosen = [i for i, each in enumerate(found) if keep_zero_variance or each.has_signal or each.has_turn_signal]
    return Draw(
        step=step,
        groups=tuple(DrawnGroup(scored=found[place], age_steps=step - 1, use=1) for place in chosen),
        num_zero_variance=0,
        baselines=tuple(baselines[place] for place in chosen),
    )


def reports(name: str, folder: Path) -> list[StepReport]:
    """Four steps of one learner, each older than the one before."""
    recipe = load_recipe(name)
    several = Requirement.SEVERAL_UPDATES in recipe.needs
    config = LearnerConfig(learning_rate=3e-4, updates_per_step=2 if several else 1)
    for number in range(len(REWARDS)):
        groups(number)  # sampled before the first learner trains
    start = {key: value.clone() for key, value in tiny().network.state_dict().items()}
    try:
        given = {"network": tiny().network, "config": config, "policy_id": NODE, "answer_of": lambda *_: "42"}
        learner = make_learner(folder, recipe, **given)
        keep = Requirement.ZERO_VARIANCE_GROUPS in recipe.needs
        has_turns = Requirement.TURNS in recipe.needs
        return [learner.step(draw(step, keep, has_turns)) for step in range(1, len(REWARDS) + 1)]
    finally:
        tiny().network.load_state_dict(start)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """PPO's norms on the same draws."""
    return [report.grad_norm for report in reports("ppo", tmp_path_factory.mktemp("ppo"))]


@pytest.mark.parametrize("name", RUNNABLE)
def test_no_method_makes_an_exploding_step_at_its_defaults(name: str, usual: list[float], tmp_path: Path) -> None:
    for step, (report, norm) in enumerate(zip(reports(name, tmp_path), usual, strict=True), 1):
        assert np.isfinite(report.grad_norm) and np.isfinite(report.loss), (step, report.grad_norm, report.loss)
        if name not in REASONS:
            assert report.grad_norm < MOST * norm, f"step {step}: norm {report.grad_norm:.4g}, PPO's {norm:.4g}"


def test_every_reason_is_of_a_method_that_needs_one(usual: list[float], tmp_path: Path) -> None:
    for name in REASONS:
        found = [report.grad_norm for report in reports(name, tmp_path / name)]
        assert any(norm >= MOST * ppo for norm, ppo in zip(found, usual, strict=True)), (name, found, usual)


def test_the_first_draw_is_on_policy_and_the_others_are_not(tmp_path: Path) -> None:
    found = [report.diagnostics["ess_share"] for report in reports("ppo", tmp_path)]
    assert found[0] > 0.9999 > max(found[1:]), found
