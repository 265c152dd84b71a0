"""The quantities that recipes over turns claim to change, each a function of a recipe and a seed.

Invariant: both recipes of a figure see the same weights, tasks and seeds.
Shape letters: N rollouts, L longest response in tokens, K most turns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Final

import torch
from torch import Tensor

from benchmarks._turn_episodes import (
    ALWAYS,
    GRID,
    GROUP_SIZE,
    LOOK_UP,
    MAXIMUM,
    NUM_STEP_GROUPS,
    NUM_STEPS,
    NUM_TEST,
    RETRY,
    TRAJECTORY_LEVEL,
    Policy,
    World,
    batch_of,
    played,
    tested,
    trained,
)
from swarm.episode import TurnStatus
from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import coefficients, with_advantages
from swarm.objectives.methods import load_recipe
from swarm.objectives.parts import is_finished, status_mask, turns_of
from swarm.types import ScoredGroup

Measure = Callable[[str, int], float]  # the quantity of a recipe with a seed


@dataclass(frozen=True, slots=True)
class Figure:
    """A quantity of a recipe, and the recipe that it is compared with."""

    name: str  # unique: the recipe, or the recipe and a suffix behind a dot
    quantity: str
    where: str
    claim: str  # "more" or "less" than the baseline
    measure: Measure
    baseline: str = TRAJECTORY_LEVEL

    @property
    def recipe(self) -> str:
        """The recipe that makes the claim."""
        return self.name.partition(".")[0]

    def values(self, seed: int) -> tuple[float, float]:
        """The quantity of the recipe, and that of the baseline."""
        return self.measure(self.recipe, seed), self.measure(self.baseline, seed)


# --- Advantages of the turns of one batch ---------------------------------------------------------------------------


def advantages(recipe: str, batch: Batch) -> Tensor:
    """Advantage of each turn [N, K], that of its first trained token; NaN where it is dropped or there is no turn."""
    found = with_advantages(load_recipe(recipe), batch, "all")
    assert batch.num_turns is not None
    turns = torch.full((batch.num_rollouts, int(batch.num_turns.max())), torch.nan, dtype=torch.float64)
    for row in range(batch.num_rollouts):
        for turn in range(int(batch.num_turns[row])):
            tokens = found.mask[row] & (batch.turn_ids[row] == turn)
            if tokens.any():
                turns[row, turn] = float(found.advantages[row][tokens][0])
    return turns


def correlation(values: Tensor, truth: Tensor) -> float:
    """Over the places where neither is NaN; 0 where one of them is constant."""
    there = ~(torch.isnan(values) | torch.isnan(truth))
    one, other = values[there], truth[there]
    if float(one.std()) == 0.0 or float(other.std()) == 0.0:
        return 0.0
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])


def outcome_only(batch: Batch) -> Batch:
    """The batch with turns of reward 0: a method has nothing but outcomes left."""
    assert batch.turn_rewards is not None
    return replace(batch, turn_rewards=torch.zeros_like(batch.turn_rewards))


def worth_of_turns(batch: Batch) -> Tensor:
    """Rewards of turns by the environment [N, K], NaN without a turn: a step nearer to the goal, a hop found."""
    turns = turns_of(batch)
    return torch.where(turns.exists, turns.rewards, torch.nan)


def found_states(recipe: str, seed: int) -> float:
    """In the grid, from outcomes and states alone: correlation of a turn's advantage with its worth."""
    batch = batch_of(played(GRID, seed))
    return correlation(advantages(recipe, outcome_only(batch)), worth_of_turns(batch))


def found_hops(prepare: Callable[[int], Batch], recipe: str, seed: int) -> float:
    """In look-up: correlation of a turn's advantage with its worth; the answer, which ends an episode, is left out."""
    whole = batch_of(played(LOOK_UP, seed))
    truth = torch.where(turns_of(whole).is_last, torch.nan, worth_of_turns(whole))
    return correlation(advantages(recipe, prepare(seed)), truth)


def _with_rewards(seed: int) -> Batch:
    return batch_of(played(LOOK_UP, seed))


def _with_answers(seed: int) -> Batch:
    return Policy(world=LOOK_UP, recipe="igpo", seed=seed).with_answers(played(LOOK_UP, seed))


def _with_feedback(seed: int) -> Batch:
    return Policy(world=LOOK_UP, recipe="infopo", seed=seed).with_feedback(played(LOOK_UP, seed))


def dead_groups(prepare: Callable[[int], Batch], recipe: str, seed: int) -> float:
    """In look-up: share of groups all of whose advantages are 0."""
    batch = prepare(seed)
    is_alive = advantages(recipe, batch).nan_to_num().abs().amax(dim=1) > 1e-9
    groups = batch.group_index.unique().tolist()
    return sum(not bool(is_alive[batch.group_index == group].any()) for group in groups) / len(groups)


def left_out_scale(recipe: str, seed: int) -> float:
    """Groups of 4 out of 64 episodes of a task: covariance of advantage and a right first search over the true one."""
    groups = played(LOOK_UP, seed, num_groups=24, group_size=64)
    batch = outcome_only(batch_of(groups))
    is_right = (worth_of_turns(batch_of(groups))[:, 0] > 0).to(torch.float64)
    rewards = batch.rewards.to(torch.float64)
    members = [batch.group_index == group for group in range(len(groups))]
    truth = sum(float(torch.cov(torch.stack([rewards[own], is_right[own]]))[0, 1]) for own in members)
    every = torch.arange(batch.num_rollouts)
    small = replace(
        batch,
        group_index=every // 4,
        task_keys=batch.task_keys * 16,
        prompts=batch.prompts * 16,
        sources=batch.sources * 16,
        step_groups=len(every) // 4,
    )
    return float((advantages(recipe, small)[:, 0] * is_right).sum()) / 64 / truth


def slips(recipe: str, seed: int) -> float:
    """In the grid at temperature 1.5: share of the positive pull of successes that is on malformed turns."""
    batch = batch_of(played(replace(GRID, temperature=1.5), seed))
    values = advantages(recipe, batch)
    pull = torch.where(values > 0, values, 0.0)
    return float(pull[status_mask(batch, TurnStatus.MALFORMED)].sum() / pull.sum())


def early_calls(temperature: float, group_size: int, recipe: str, seed: int) -> float:
    """In look-up: advantage of the successes that called earliest minus that of the others."""
    batch = batch_of(played(replace(LOOK_UP, temperature=temperature), seed, group_size=group_size))
    calls = turns_of(batch).calls > 0
    first = calls.int().argmax(dim=1, keepdim=True)
    place = (batch.mask & (batch.turn_ids <= first)).sum(dim=1)
    success = (batch.rewards > 0.5) & calls.any(dim=1)
    values = with_advantages(load_recipe(recipe), batch, "all").advantages[:, 0]
    gaps: list[float] = []
    for group in batch.group_index.unique().tolist():
        own = success & (batch.group_index == group)
        if own.any() and int(place[own].min()) < int(place[own].max()):
            early = own & (place == place[own].min())
            gaps.append(float(values[early].mean() - values[own & ~early].mean()))
    return sum(gaps) / max(1, len(gaps))


def flatness(world: World, num_turns: int, recipe: str, seed: int) -> float:
    """Distance from flat of the advantages' sizes at the turns of episodes with so many turns or more, all outcomes 0.

    The mean distance of the logarithm of (deviation at the turn over that at the last but one) from 0.
    """
    policy = Policy(world=world, recipe="igpo", seed=seed)
    batch = policy.with_answers(played(world, seed))
    batch = replace(batch, rewards=torch.zeros_like(batch.rewards))
    sizes = advantages(recipe, batch)[turns_of(batch).num_turns >= num_turns, : num_turns - 1].std(dim=0)
    return float(torch.log(sizes[:-1] / sizes[-1]).abs().mean())


def within_groups(values: Tensor, batch: Batch, chosen: Tensor) -> Tensor:
    """Values [N] minus their mean over the chosen episodes of the group; NaN for the others."""
    found = torch.full_like(values, torch.nan)
    for group in batch.group_index.unique().tolist():
        own = chosen & (batch.group_index == group)
        found[own] = (values[own] - values[own].mean()).round(decimals=9)  # equal ones differ by nothing at all
    return found


def short_successes(recipe: str, seed: int) -> float:
    """In the grid: correlation of a success's mean advantage with the turns that it saved against its group."""
    batch = batch_of(played(GRID, seed))
    success = batch.rewards > 0.5
    saved = -within_groups(turns_of(batch).num_turns.to(torch.float64), batch, success)
    return correlation(within_groups(advantages(recipe, batch).nanmean(dim=1), batch, success), saved)


def near_misses(world: World, recipe: str, seed: int) -> float:
    """Without rewards of turns: correlation of a failure's mean advantage with those that it earned, in its group."""
    whole = batch_of(played(world, seed))
    is_failure = whole.rewards <= 0.5
    has_success = torch.stack([(~is_failure)[whole.group_index == each].any() for each in whole.group_index])
    chosen = is_failure & has_success
    earned = within_groups(turns_of(whole).rewards.sum(dim=1), whole, chosen)
    batch = outcome_only(whole)
    return correlation(within_groups(advantages(recipe, batch).nanmean(dim=1), batch, chosen), earned)


def new_states(recipe: str, seed: int) -> float:
    """In the grid, from outcomes and states alone: advantage of turns into a new state minus that of others."""
    batch = outcome_only(batch_of(played(GRID, seed)))
    assert batch.state_keys is not None
    is_new = torch.zeros_like(turns_of(batch).exists)
    for row, keys in enumerate(batch.state_keys):
        for turn, key in enumerate(keys):
            is_new[row, turn] = key not in keys[:turn]
    values = advantages(recipe, batch)
    there = ~torch.isnan(values)
    return float(values[there & is_new].mean() - values[there & ~is_new].mean())


# --- Gradients and the weights of turns -----------------------------------------------------------------------------


def void_turns(num_steps: int, recipe: str, seed: int) -> float:
    """In look-up with 3 turns: the largest gradient norm of steps of 4 groups from the starting weights."""
    groups = played(LOOK_UP.but(max_turns=3), seed, num_groups=4 * num_steps)
    steps = [groups[start : start + 4] for start in range(0, len(groups), 4)]
    return max(Policy(world=LOOK_UP, recipe=recipe, seed=seed).gradient_norm(step) for step in steps)


def _stale(recipe: str, seed: int) -> tuple[Tensor, Tensor]:
    """Log-ratios and clips of the trained tokens of a batch in the grid, for weights that are NUM_STEPS steps newer."""
    groups, chosen = played(GRID, seed), load_recipe(recipe)
    batch = with_advantages(chosen, batch_of(groups), "all")
    found = coefficients(chosen, batch, *trained(TRAJECTORY_LEVEL, GRID, seed).scores(groups))
    return found.log_ratio[batch.mask], found.bounded[batch.mask]


def ratio_tail(recipe: str, seed: int) -> float:
    """99th percentile of |log ratio| over the trained tokens of an old batch."""
    return float(_stale(recipe, seed)[0].abs().quantile(0.99))


def stale_clips(recipe: str, seed: int) -> float:
    """Share of the trained tokens of an old batch that are clipped."""
    return float(_stale(recipe, seed)[1].float().mean())


def stale_norm(recipe: str, seed: int) -> float:
    """Gradient norm on an old batch."""
    newest = trained(TRAJECTORY_LEVEL, GRID, seed).newest
    return Policy(world=GRID, recipe=recipe, seed=0, weights=newest).gradient_norm(played(GRID, seed))


def pulls(recipe: str, world: World, seed: int, groups: Sequence[ScoredGroup]) -> Tensor:
    """Size of the coefficients of each turn [N, K] under the weights that played, which are the reference too."""
    chosen, policy = load_recipe(recipe), Policy(world=world, recipe=TRAJECTORY_LEVEL, seed=seed)
    logprobs, entropy = policy.scores(groups)
    batch = with_advantages(chosen, replace(batch_of(groups), reference_logprobs=logprobs), "all")
    found = coefficients(chosen, batch, logprobs, entropy)
    sizes = torch.where(batch.mask, found.logprobs.abs(), 0.0).to(torch.float64)
    turns = torch.zeros((batch.num_rollouts, int(batch.turn_ids.max()) + 1), dtype=torch.float64)
    return turns.scatter_add_(1, torch.where(batch.mask, batch.turn_ids, 0), sizes)


def spread_of_pulls(recipe: str, seed: int) -> float:
    """In look-up: deviation over mean of the pulls of an episode's turns, over episodes with an advantage."""
    rows = [row[row > 0] for row in pulls(recipe, LOOK_UP, seed, played(LOOK_UP, seed))]
    spreads = [float(own.std() / own.mean()) for own in rows if len(own) > 1]
    return sum(spreads) / max(1, len(spreads))


def blame_of_limits(recipe: str, seed: int) -> float:
    """In the grid with 4 turns: share of the negative pull that is on episodes that a limit ended."""
    groups = played(GRID.but(max_turns=4), seed)
    batch = batch_of(groups)
    values = with_advantages(load_recipe(recipe), batch, "all").advantages.nan_to_num()
    blamed = torch.where((values < 0).any(dim=1), pulls(recipe, GRID, seed, groups).sum(dim=1), 0.0)
    return float(blamed[~is_finished(batch)].sum() / blamed.sum().clamp(min=1e-12))


# --- Held-out episodes after training -------------------------------------------------------------------------------


def success(world: World, recipe: str, seed: int, tested_in: World | None = None) -> float:
    """Share of successes."""
    return float((tested(trained(recipe, world, seed), tested_in).rewards > 0.5).float().mean())


def calls_per_success(num_steps: int, recipe: str, seed: int) -> float:
    """Calls of a success in look-up."""
    batch = tested(trained(recipe, LOOK_UP, seed, num_steps=num_steps))
    return float(turns_of(batch).calls.sum(dim=1)[batch.rewards > 0.5].to(torch.float64).mean())


def distinct_tries(world: World, recipe: str, seed: int) -> float:
    """Share of distinct ones among the tries of episodes that did not succeed at first."""
    actions = tested(trained(recipe, world, seed)).actions or ()
    return fmean([len(set(each)) / len(each) for each in actions if len(each) > 1] or [0.0])


def new_states_visited(recipe: str, seed: int) -> float:
    """Share of different ones among the states that the turns of an episode led to, in the grid."""
    keys = tested(trained(recipe, GRID, seed)).state_keys or ()
    return fmean([len(set(each)) / len(each) for each in keys if each] or [0.0])


def corrections(recipe: str, seed: int) -> float:
    """Share of wrong first answers made right minus that of right ones spoilt, where each is asked twice."""
    batch = tested(trained(recipe, ALWAYS, seed))
    return float((batch.rewards - batch.reward_parts["first_try"]).mean())


def turns_beyond_training(recipe: str, seed: int) -> float:
    """Turns of an episode in the grid, trained with at most 4 and tested with at most 8."""
    counts = tested(trained(recipe, GRID.but(max_turns=4), seed), GRID.but(max_turns=8)).num_turns
    assert counts is not None
    return float(counts.to(torch.float64).mean())


def entropy_kept(num_steps: int, recipe: str, seed: int) -> float:
    """Mean entropy of a token in look-up; two updates of each draw, so that clips act."""
    policy = trained(recipe, LOOK_UP, seed, updates_per_step=2, num_steps=num_steps)
    groups = policy.play(LOOK_UP.build(), 0, NUM_TEST, GROUP_SIZE, is_held_out=True)
    return float(policy.scores(groups)[1][batch_of(groups).mask].mean())


_OF_ADVANTAGE: Final = "correlation of a turn's advantage with what the turn was worth"
_TRAINED: Final = f"{NUM_STEPS} steps of {NUM_STEP_GROUPS * GROUP_SIZE} episodes"
_LONG: Final = f"50 steps of {NUM_STEP_GROUPS * GROUP_SIZE} episodes"
_STALE: Final = f"grid_world, a batch {NUM_STEPS} steps old"
_DEAD: Final = "share of dead groups: no advantage is other than 0"
_SUCCESS: Final = "success after training"
_NORM: Final = "largest gradient norm of {} steps of 4 groups; trajectory level is `grpo_tcr`, which has its clip"
_CUT: Final = "size of advantages at turns 1 {} over that at turn {}, logarithm's distance from 0, outcomes 0"
_MORE_TURNS: Final = replace(LOOK_UP.but(max_turns=10), temperature=2.0)
FIGURES: Final = (
    Figure("gigpo", f"{_OF_ADVANTAGE}, from outcomes and states alone", "grid_world", "more", found_states),
    Figure("gigpo.success", _SUCCESS, f"grid_world, {_TRAINED}", "more", partial(success, GRID)),
    Figure("igpo", _DEAD, "look_up", "less", partial(dead_groups, _with_answers)),
    Figure(
        "igpo.hops",
        f"{_OF_ADVANTAGE} (a hop found), from outcomes and the right answer alone",
        "look_up",
        "more",
        partial(found_hops, lambda seed: outcome_only(_with_answers(seed))),
    ),
    Figure("igpo.success", _SUCCESS, f"look_up, {_TRAINED}", "more", partial(success, LOOK_UP)),
    Figure(
        "a2tgpo",
        _CUT.format("and 2", 3),
        "look_up; in place of the trajectory level `igpo`",
        "less",
        partial(flatness, LOOK_UP, 4),
        baseline="igpo",
    ),
    Figure(
        "a2tgpo.long",
        _CUT.format("to 4", 5),
        "look_up at temperature 2, 10 turns; in place of the trajectory level `igpo`",
        "less",
        partial(flatness, _MORE_TURNS, 6),
        baseline="igpo",
    ),
    Figure(
        "trloo",
        "covariance of advantage and a right first search over the true one; 1 is unbiased",
        "look_up, groups of 4; trajectory level is `dr_grpo`",
        "more",
        left_out_scale,
        baseline="dr_grpo",
    ),
    Figure("matchtir", f"{_OF_ADVANTAGE} (a hop found)", "look_up", "more", partial(found_hops, _with_rewards)),
    Figure(
        "turn_reward_to_go", f"{_OF_ADVANTAGE} (a hop found)", "look_up", "more", partial(found_hops, _with_rewards)
    ),
    Figure("turn_reward_to_go.success", _SUCCESS, f"look_up, {_TRAINED}", "more", partial(success, LOOK_UP)),
    Figure("simpletir", _NORM.format(8), "look_up, 3 turns", "less", partial(void_turns, 8), baseline="grpo_tcr"),
    Figure("simpletir.long", _NORM.format(24), "look_up, 3 turns", "less", partial(void_turns, 24), "grpo_tcr"),
    Figure(
        "malformed_turn_filter",
        "share of the positive pull that is on malformed turns",
        "grid_world at temperature 1.5",
        "less",
        slips,
    ),
    Figure(
        "aspo_tool_use",
        "advantage of successes that called earliest minus that of the others",
        "look_up at temperature 1.5",
        "more",
        partial(early_calls, 1.5, GROUP_SIZE),
    ),
    Figure(
        "aspo_tool_use.varied",
        "advantage of successes that called earliest minus that of the others",
        "look_up at temperature 2, groups of 32",
        "more",
        partial(early_calls, 2.0, 32),
    ),
    Figure("ipa", "99th percentile of the log-ratio's size", _STALE, "less", ratio_tail),
    Figure("at2po", "99th percentile of the log-ratio's size", _STALE, "less", ratio_tail),
    Figure("st_ppo", "gradient norm", _STALE, "less", stale_norm),
    Figure("st_ppo.clip", "share of tokens that are clipped", _STALE, "less", stale_clips),
    Figure("otc_po", "calls of a success", f"look_up, {_TRAINED}", "less", partial(calls_per_success, NUM_STEPS)),
    Figure("otc_po.long", "calls of a success", f"look_up, {_LONG}", "less", partial(calls_per_success, 50)),
    Figure(
        "ufo",
        "distinct tries, of those of an episode",
        f"retry around reverse, {_TRAINED}",
        "more",
        partial(distinct_tries, RETRY),
    ),
    Figure(
        "ufo.max",
        "distinct tries, of those of an episode",
        f"retry around max, {_TRAINED}",
        "more",
        partial(distinct_tries, MAXIMUM),
    ),
    Figure(
        "mini_o3",
        "turns of an episode, tested with 8",
        f"grid_world, {_TRAINED} with 4 turns",
        "more",
        turns_beyond_training,
    ),
    Figure(
        "grpo_tcr",
        "entropy of a token after training",
        f"look_up, {_TRAINED}, 2 updates each",
        "more",
        partial(entropy_kept, NUM_STEPS),
    ),
    Figure(
        "grpo_tcr.long",
        "entropy of a token after training",
        f"look_up, {_LONG}, 2 updates each",
        "more",
        partial(entropy_kept, 50),
    ),
    Figure("flow_grpo", "deviation over mean of the pulls of an episode's turns", "look_up", "less", spread_of_pulls),
    Figure("flow_grpo.success", _SUCCESS, f"look_up, {_TRAINED}", "more", partial(success, LOOK_UP)),
    Figure(
        "supo",
        "share of the negative pull that is on episodes that a limit ended",
        "grid_world, 4 turns",
        "less",
        blame_of_limits,
    ),
    Figure(
        "supo.success",
        "success, tested with 8 turns",
        f"grid_world, {_TRAINED} with 4 turns",
        "more",
        partial(success, GRID.but(max_turns=4), tested_in=GRID.but(max_turns=8)),
    ),
    Figure(
        "eapo",
        "correlation of a success's advantage with the turns that it saved against others of its group",
        "grid_world",
        "more",
        short_successes,
    ),
    Figure(
        "srpo",
        "correlation of a failure's advantage with the way it made, in its group, from outcomes and states",
        "grid_world",
        "more",
        partial(near_misses, GRID),
    ),
    Figure("srpo.success", _SUCCESS, f"grid_world, {_TRAINED}", "more", partial(success, GRID)),
    Figure(
        "global_episodic",
        "advantage of turns into a state new to the episode minus that of others, from outcomes and states",
        "grid_world; in place of the trajectory level `turn_reward_to_go`, which it is without the bonus",
        "more",
        new_states,
        baseline="turn_reward_to_go",
    ),
    Figure(
        "global_episodic.visits",
        "states of an episode that differ, of those that its turns led to",
        f"grid_world, {_TRAINED}",
        "more",
        new_states_visited,
    ),
    Figure(
        "score",
        "wrong first answers made right minus right ones spoilt, of all episodes",
        f"retry around max, always asked twice, {_TRAINED}",
        "more",
        corrections,
    ),
    Figure(
        "infopo",
        f"{_OF_ADVANTAGE} (a hop found), from outcomes and log-probs alone",
        "look_up",
        "more",
        partial(found_hops, lambda seed: outcome_only(_with_feedback(seed))),
    ),
    Figure("infopo.dead", _DEAD, "look_up", "less", partial(dead_groups, _with_feedback)),
    Figure("seeupo", _SUCCESS, f"grid_world, {_TRAINED}", "more", partial(success, GRID)),
    Figure(
        "gtpo_turn",
        f"{_OF_ADVANTAGE} (a hop found), from outcomes and texts alone",
        "look_up",
        "more",
        partial(found_hops, _with_rewards),
    ),
    Figure(
        "gtpo_turn.failures",
        "correlation of a failure's advantage with the hops it found, in its group, from outcomes and texts",
        "look_up",
        "more",
        partial(near_misses, LOOK_UP),
    ),
    Figure("gtpo_turn.success", _SUCCESS, f"look_up, {_TRAINED}", "more", partial(success, LOOK_UP)),
)
