"""Updates of a step by turns: which tokens each learns from, and what the turns behind weigh."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarm.config import EnvironmentConfig, LearnerConfig, ReplayConfig
from swarm.environments.load import build_environment
from swarm.environments.look_up import LookUpEnvironment
from swarm.environments.replay import replay
from swarm.episode import Actions
from swarm.learn import step_plan
from swarm.learn.gradient import Measured
from swarm.learn.learner import PolicyLearner
from swarm.learn.step_plan import split_step
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import with_advantages
from swarm.objectives.fallbacks import RecipeSet
from swarm.objectives.methods import load_recipe
from swarm.objectives.part import Memory, Scored, TermPart
from swarm.objectives.recipe import Recipe
from swarm.testing.batches import toy_batch
from swarm.testing.builders import make_scored
from swarm.testing.episodes import make_episode_group
from swarm.types import Correction, Draw, DrawnGroup, Sampling, StepReport

OWN = "a" * 64
TOKENIZER = CharTokenizer()
LOW, HIGH = 0.01, 30.0


class Watch(TermPart):
    """Notes what each update saw."""

    equation = "0"
    log: list[Scored] = dataclasses.field(default_factory=list[Scored])

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        self.log.append(scored)
        return memory

    def __call__(self, scored: Scored) -> Tensor:
        return 0.0 * scored.logprobs.sum()


def episodes() -> Batch:
    """Two groups of episodes of one to three turns, their tokens in pairs with holes."""
    lengths = torch.tensor([6, 4, 2, 6, 4, 6])
    places = torch.arange(6).expand(6, 6)
    mask = (places < lengths[:, None]) & ~((places == 3) & (torch.arange(6)[:, None] == 0))
    turns = {
        "turn_rewards": torch.zeros((6, 3)),
        "num_turns": lengths // 2,
        "num_calls": torch.zeros((6, 3), dtype=torch.int64),
    }
    rewards = [1.0, 0.0, 1.0, 0.0, 1.0, 0.5]
    return toy_batch(rewards, mask, groups=[0, 0, 0, 1, 1, 1], turn_ids=places // 2, **turns)


@pytest.mark.parametrize("updates_per_step", [1, 2])
def test_each_trained_token_is_learned_from_in_one_update_the_last_turn_first(updates_per_step: int) -> None:
    recipes = RecipeSet(main=load_recipe("seeupo"))
    batch = with_advantages(recipes.main, episodes(), "all")
    plan = split_step(batch, recipes.slices(batch), recipes, updates_per_step)
    learned = torch.zeros_like(batch.mask, dtype=torch.int64)
    advantages = torch.zeros_like(batch.advantages)
    for (each,) in plan.updates:
        assert each.batch.turns is not None
        learned[each.places] += each.batch.learned
        advantages[each.places] += each.batch.advantages
        behind = batch.mask[each.places] & (batch.turn_ids[each.places] >= each.batch.turns[0])
        assert torch.equal(each.batch.mask, behind)
    assert torch.equal(learned, batch.mask.long()) and torch.equal(advantages, batch.advantages)
    assert [each.batch.turns for (each,) in plan.updates] == [
        (turn, turn) for turn in (2, 1, 0) for _ in range(updates_per_step)
    ]


def test_other_recipes_learn_from_all_turns_at_once() -> None:
    recipes = RecipeSet(main=load_recipe("gspo"))
    batch = with_advantages(recipes.main, episodes(), "all")
    plan = split_step(batch, recipes.slices(batch), recipes, 1)
    assert [each.batch.turns for (each,) in plan.updates] == [None]
    assert torch.equal(plan.updates[0][0].batch.learned, batch.mask)


def test_a_token_keeps_the_scores_of_the_update_that_learned_from_it() -> None:
    batch, network = episodes(), tiny_network(1)
    whole, part = Measured.empty(batch, network), Measured.empty(batch, network)
    everyone = torch.arange(batch.num_rollouts)
    for turn in (2, 1, 0):
        part.logprobs = torch.full_like(whole.logprobs, -1.0 - turn)
        whole.put(everyone, part, dataclasses.replace(batch, turns=(turn, turn)).learned)
    assert torch.equal(whole.logprobs, torch.where(batch.mask, -1.0 - batch.turn_ids, 0.0))


def look_up(max_turns: int) -> LookUpEnvironment:
    params: dict[str, str | int] = {"style": "char", "max_turns": max_turns}
    environment = build_environment(EnvironmentConfig(name="look_up", kind="look_up", params=params))
    assert isinstance(environment, LookUpEnvironment)
    return environment


def played_draw() -> tuple[Draw, int]:
    """One group of episodes of one to some turns, and the most turns of one."""
    environment = look_up(max_turns=5)
    right = environment.demonstration(0)
    played: list[Actions] = [("?zzz", *right), (right[0], *right), (right[0], "no"), ("no",)]
    group = make_episode_group(environment, 0, played, TOKENIZER, OWN, Sampling(max_new_tokens=6))
    outcomes = tuple(replay(environment, 0, actions) for actions in played)
    scored = dataclasses.replace(make_scored(group, rewards=[1.0, 0.5, 0.0, 0.0]), outcomes=outcomes)
    draw = Draw(step=1, groups=(DrawnGroup(scored=scored, age_steps=0, use=1),), num_zero_variance=0)
    return draw, max(len(actions) for actions in played)


def step(recipe: Recipe, directory: Path) -> tuple[StepReport, int]:
    """One step of a new learner with one update of the whole draw, or one for each turn; the most turns."""
    draw, most = played_draw()
    settings, replay_settings = LearnerConfig(token_budget=300, learning_rate=3e-3), ReplayConfig(external="all")
    learner = PolicyLearner(tiny_network(3), TOKENIZER, recipe, settings, replay_settings, OWN, directory)
    return learner.step(draw), most


def test_each_update_sees_the_policy_that_the_one_before_made_and_weighs_the_turns_behind(tmp_path: Path) -> None:
    watch = Watch()
    wide = load_recipe("seeupo", {"shapers.later_turns": {"low": 1 - LOW, "high": HIGH - 1}})  # log-probs are made up
    chosen = dataclasses.replace(wide, terms=(watch,))
    report, turns = step(chosen, tmp_path)
    assert report.diagnostics["num_updates"] == turns and report.version.step == 1
    assert [seen.batch.turns for seen in watch.log] == [(turn, turn) for turn in reversed(range(turns))]
    weights = [one for seen in watch.log for one in weights_behind(seen)]
    for seen in watch.log:
        for row, weight in enumerate(weights_behind(seen)):
            own = seen.batch.learned[row]
            torch.testing.assert_close(seen.advantages[row][own], seen.batch.advantages[row][own] * weight)
            assert not bool(seen.advantages[row][~own].any())
    assert len({round(weight, 4) for weight in weights}) > 4, "no update moved the turns behind"
    for earlier, later in zip(watch.log, watch.log[1:], strict=False):
        shared = earlier.batch.mask & later.batch.mask
        assert float((earlier.logprobs - later.logprobs)[shared].abs().max()) > 1e-3, "the policy did not move"


def test_the_proximal_policy_is_that_before_the_first_turn_is_learned_from(tmp_path: Path) -> None:
    watch = Watch()
    chosen = load_recipe("seeupo", {"ratio.against": "proximal", "shapers.later_turns.against": "proximal"})
    step(dataclasses.replace(chosen, terms=(watch,)), tmp_path)
    first, *later = [(seen.logprobs - seen.proximal)[seen.mask].abs().max().item() for seen in watch.log]
    assert first < 1e-6 and min(later) > 1e-3, "the policy moved, and its ratios to the start of the step did not"


def test_a_recipe_that_stands_in_sees_each_token_in_one_update_only() -> None:
    """A constraint on KL, as `drpo` has one, would hold the last turns as often as there are turns before them."""
    recipes = RecipeSet(main=load_recipe("seeupo"), fallbacks={Correction.NO_LOGPROBS: load_recipe("drpo")})
    batch = episodes()
    kinds = (Correction.EXACT,) * 3 + (Correction.NO_LOGPROBS,) * 3
    unknown = batch.mask & (batch.group_index == 1)[:, None]
    batch = dataclasses.replace(
        batch, corrections=kinds, behavior_logprobs=torch.where(unknown, torch.nan, batch.behavior_logprobs)
    )
    times = {name: torch.zeros_like(batch.mask, dtype=torch.int64) for name in recipes.used}
    plan = split_step(batch, recipes.slices(batch), recipes, 1)
    for each in [part for update in plan.updates for part in update]:
        times[each.name][each.places] += each.batch.mask
    own, theirs = times[""], times[str(Correction.NO_LOGPROBS)]
    assert torch.equal(theirs, unknown.long())
    assert torch.equal(own, torch.where(batch.mask & ~unknown, batch.turn_ids + 1, 0)), "ratios of the turns behind"


def test_a_peer_with_longer_episodes_makes_no_updates_of_its_own(tmp_path: Path) -> None:
    """Each of them would move the weights along its groups alone, however little of a usual step its share is."""
    own, theirs = [("?aaa", "no"), ("no",)], [("?aaa",) * 12, ("?bbb",) * 12]
    network = tiny_network(3)
    before = torch.cat([param.detach().flatten().clone() for param in network.parameters()])
    settings, replay_settings = LearnerConfig(learning_rate=1e-3), ReplayConfig(external="all")
    learner = PolicyLearner(network, TOKENIZER, load_recipe("seeupo"), settings, replay_settings, OWN, tmp_path)
    draw = Draw(step=1, groups=(drawn(own, OWN), drawn(theirs, "b" * 64)), num_zero_variance=0)
    report = learner.step(draw)
    moved = torch.cat([param.detach().flatten() for param in network.parameters()]) - before
    assert report.diagnostics["num_updates"] == 2
    assert float(moved.abs().max()) < 2.1e-3, "an update of Adam moves no weight by more than its rate"


def drawn(played: Sequence[Actions], source: str) -> DrawnGroup:
    """A group of two episodes of look-up, the first one right; of a peer where the source is not our own."""
    environment = look_up(max_turns=12)
    group = make_episode_group(environment, 0, played, TOKENIZER, source, Sampling(max_new_tokens=6))
    outcomes = tuple(replay(environment, 0, actions) for actions in played)
    scored = make_scored(group, rewards=[1.0, 0.0], is_made_here=source == OWN)
    return DrawnGroup(scored=dataclasses.replace(scored, outcomes=outcomes), age_steps=0, use=1)


@pytest.mark.parametrize(
    ("sources", "newcomers", "own", "ranges"),
    [
        ("aabb", (), "b", [(2, 4), (1, 1), (0, 0)]),  # turns of a: 5, of b: 3
        ("aabb", (), "", [(2, 4), (1, 1), (0, 0)]),
        ("abcc", (), "", [(turn, turn) for turn in (4, 3, 2, 1, 0)]),
        ("aabb", (2, 3), "", [(turn, turn) for turn in (4, 3, 2, 1, 0)]),  # b has just come
    ],
)
def test_our_own_episodes_or_the_median_source_say_how_many_turns_have_an_update(
    sources: str, newcomers: tuple[int, ...], own: str, ranges: list[tuple[int, int]]
) -> None:
    lengths = torch.tensor([5, 5, 3, 3])
    places = torch.arange(5).expand(4, 5)
    batch = toy_batch([1.0, 0.0, 1.0, 0.0], places < lengths[:, None], groups=[0, 1, 2, 3], turn_ids=places)
    batch = dataclasses.replace(
        batch,
        sources=tuple(sources),
        is_from_peer=torch.tensor([source != own for source in sources]),
        is_newcomer=torch.tensor([row in newcomers for row in range(4)]),
    )
    assert step_plan.turn_ranges(batch) == ranges


def weights_behind(seen: Scored) -> list[float]:
    """The weight of each rollout, by a loop over the turns behind that of the update."""
    found: list[float] = []
    for row in range(seen.batch.num_rollouts):
        weight = 1.0
        assert seen.batch.turns is not None
        for turn in range(9, seen.batch.turns[1], -1):
            own = seen.batch.mask[row] & (seen.batch.turn_ids[row] == turn)
            if bool(own.any()):
                ratio = math.exp(float((seen.logprobs - seen.behavior)[row][own].mean()))
                weight = min(max(weight * min(max(ratio, LOW), HIGH), LOW), HIGH)
        found.append(weight)
    return found
