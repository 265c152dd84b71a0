"""Quantities of one batch of episodes: advantages, ratios and gradients of a recipe over turns and of another.

Invariant: a quantity is a function of its seed, computed on the same episodes for both methods.
Shape letters: N rollouts, L longest response in tokens, K most turns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks._turn_episodes import GRID, LOOK_UP, Policy, World, advantages, batch_of
from benchmarks._turn_played import (
    TRAJECTORY_LEVEL,
    agreement,
    correlation,
    outcome_only,
    played,
    trained,
    worth_of_turns,
)
from swarm.episode import TurnStatus
from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import Coefficients, coefficients, with_advantages
from swarm.objectives.methods import load_recipe
from swarm.objectives.parts import is_finished, status_mask, turns_of
from swarm.types import ScoredGroup


def states(seed: int) -> tuple[float, float]:
    """Grid; methods see outcomes and states alone."""
    batch = batch_of(played(GRID, seed))
    return agreement("gigpo", outcome_only(batch), worth_of_turns(batch))


def hops(recipe: str) -> Callable[[int], tuple[float, float]]:
    """Look-up, with the rewards of turns; the answer, which ends an episode, is left out."""

    def measure(seed: int) -> tuple[float, float]:
        batch = batch_of(played(LOOK_UP, seed))
        truth = torch.where(turns_of(batch).is_last, torch.nan, worth_of_turns(batch))
        return agreement(recipe, batch, truth)

    return measure


def left_out_scale(seed: int) -> tuple[float, float]:
    """Groups of 4 out of 64 episodes of a task: covariance of advantage and a right first search over the true one."""
    groups = played(LOOK_UP, seed, num_groups=24, group_size=64)
    batch = outcome_only(batch_of(groups))
    is_right = (worth_of_turns(batch_of(groups))[:, 0] > 0).to(torch.float64)
    rewards = batch.rewards.to(torch.float64)
    every = torch.arange(batch.num_rollouts)
    truth = sum(
        float(torch.cov(torch.stack([rewards[members], is_right[members]]))[0, 1])
        for group in range(len(groups))
        if len(members := every[batch.group_index == group])
    )
    small = replace(
        batch,
        group_index=every // 4,
        task_keys=batch.task_keys * 16,
        prompts=batch.prompts * 16,
        sources=batch.sources * 16,
        step_groups=len(every) // 4,
    )
    found = [float((advantages(recipe, small)[:, 0] * is_right).sum()) / 64 / truth for recipe in ("trloo", "dr_grpo")]
    return found[0], found[1]


def slips(seed: int) -> tuple[float, float]:
    """Grid, sampled at temperature 1.5: share of the positive pull of successes that is on malformed turns."""
    batch = batch_of(played(replace(GRID, temperature=1.5), seed))
    assert batch.turn_statuses is not None
    is_slip = status_mask(batch, TurnStatus.MALFORMED)

    def share(recipe: str) -> float:
        values = advantages(recipe, batch)
        pull = torch.where(values > 0, values, 0.0)
        return float(pull[is_slip].sum() / pull.sum())

    return share("malformed_turn_filter"), share(TRAJECTORY_LEVEL)


def early_calls(temperature: float, group_size: int) -> Callable[[int], tuple[float, float]]:
    """Look-up at a temperature: advantage of successes that called early minus that of those that called late."""

    def measure(seed: int) -> tuple[float, float]:
        batch = batch_of(played(replace(LOOK_UP, temperature=temperature), seed, group_size=group_size))
        calls = turns_of(batch).calls > 0
        first = calls.int().argmax(dim=1, keepdim=True)
        place = (batch.mask & (batch.turn_ids <= first)).sum(dim=1)
        success = (batch.rewards > 0.5) & calls.any(dim=1)

        def gap(recipe: str) -> float:
            values = with_advantages(load_recipe(recipe), batch, "all").advantages[:, 0]
            gaps: list[float] = []
            for group in batch.group_index.unique().tolist():
                own = success & (batch.group_index == group)
                if own.any() and int(place[own].min()) < int(place[own].max()):
                    early = own & (place == place[own].min())
                    gaps.append(float(values[early].mean() - values[own & ~early].mean()))
            return sum(gaps) / max(1, len(gaps))

        return gap("aspo_tool_use"), gap("grpo")

    return measure


def share_of_dead(recipe: str, batch: Batch) -> float:
    """Of groups: no advantage is other than 0."""
    is_alive = advantages(recipe, batch).nan_to_num().abs().amax(dim=1) > 1e-9
    groups = batch.group_index.unique().tolist()
    return sum(not bool(is_alive[batch.group_index == group].any()) for group in groups) / len(groups)


def dead_groups(seed: int) -> tuple[float, float]:
    """Look-up: share of groups in which no advantage is other than 0."""
    batch = Policy(world=LOOK_UP, recipe="igpo", seed=seed).with_answers(played(LOOK_UP, seed))
    return share_of_dead("igpo", batch), share_of_dead(TRAJECTORY_LEVEL, batch)


def gains_and_hops(seed: int) -> tuple[float, float]:
    """Look-up, outcomes and answers alone; the answer, which ends an episode, is left out."""
    policy = Policy(world=LOOK_UP, recipe="igpo", seed=seed)
    batch = policy.with_answers(played(LOOK_UP, seed))
    truth = torch.where(turns_of(batch).is_last, torch.nan, worth_of_turns(batch))
    return agreement("igpo", outcome_only(batch), truth)


def shifts_and_hops(seed: int) -> tuple[float, float]:
    """Look-up, outcomes and log-probs alone; the answer, which ends an episode, is left out."""
    policy = Policy(world=LOOK_UP, recipe="infopo", seed=seed)
    batch = policy.with_feedback(played(LOOK_UP, seed))
    truth = torch.where(turns_of(batch).is_last, torch.nan, worth_of_turns(batch))
    return agreement("infopo", outcome_only(batch), truth)


def dead_without_shifts(seed: int) -> tuple[float, float]:
    """Look-up: share of groups in which no advantage is other than 0."""
    batch = Policy(world=LOOK_UP, recipe="infopo", seed=seed).with_feedback(played(LOOK_UP, seed))
    return share_of_dead("infopo", batch), share_of_dead(TRAJECTORY_LEVEL, batch)


def flatness(world: World, num_turns: int) -> Callable[[int], tuple[float, float]]:
    """Episodes of so many turns or more, every outcome 0: how far from flat the size of advantages at their turns is.

    The mean distance of the logarithm of (deviation at the turn over that at the last but one) from 0.
    """

    def measure(seed: int) -> tuple[float, float]:
        policy = Policy(world=world, recipe="igpo", seed=seed)
        batch = policy.with_answers(played(world, seed))
        batch = replace(batch, rewards=torch.zeros_like(batch.rewards))
        is_long = turns_of(batch).num_turns >= num_turns

        def distance(recipe: str) -> float:
            sizes = advantages(recipe, batch)[is_long, : num_turns - 1].std(dim=0)
            return float(torch.log(sizes[:-1] / sizes[-1]).abs().mean())

        return distance("a2tgpo"), distance("igpo")

    return measure


def within_groups(values: Tensor, batch: Batch, chosen: Tensor) -> Tensor:
    """Values [N] minus their mean over the chosen episodes of the group; NaN for the others."""
    found = torch.full_like(values, torch.nan)
    for group in batch.group_index.unique().tolist():
        own = chosen & (batch.group_index == group)
        found[own] = (values[own] - values[own].mean()).round(decimals=9)  # equal ones differ by nothing at all
    return found


def short_successes(seed: int) -> tuple[float, float]:
    """Grid: correlation of a success's mean advantage with the turns that it saved against others of its group."""
    batch = batch_of(played(GRID, seed))
    counts = turns_of(batch).num_turns.to(torch.float64)
    saved = -within_groups(counts, batch, batch.rewards > 0.5)

    def agreement_of(recipe: str) -> float:
        means = advantages(recipe, batch).nanmean(dim=1)
        return correlation(within_groups(means, batch, batch.rewards > 0.5), saved)

    return agreement_of("eapo"), agreement_of(TRAJECTORY_LEVEL)


def near_misses(recipe: str, world: World) -> Callable[[int], tuple[float, float]]:
    """Without rewards of turns: correlation of a failure's mean advantage with those that it earned, in its group."""

    def measure(seed: int) -> tuple[float, float]:
        whole = batch_of(played(world, seed))
        batch, is_failure = outcome_only(whole), whole.rewards <= 0.5
        has_success = torch.stack([(~is_failure)[whole.group_index == each].any() for each in whole.group_index])
        way = within_groups(turns_of(whole).rewards.sum(dim=1), whole, is_failure & has_success)

        def agreement_of(name: str) -> float:
            means = advantages(name, batch).nanmean(dim=1)
            return correlation(within_groups(means, batch, is_failure & has_success), way)

        return agreement_of(recipe), agreement_of(TRAJECTORY_LEVEL)

    return measure


def new_states(seed: int) -> tuple[float, float]:
    """Grid, outcomes and states alone: advantage of turns into a state new to the episode minus that of others."""
    batch = outcome_only(batch_of(played(GRID, seed)))
    assert batch.state_keys is not None
    is_new = torch.zeros_like(turns_of(batch).exists)
    for row, keys in enumerate(batch.state_keys):
        for turn, key in enumerate(keys):
            is_new[row, turn] = key not in keys[:turn]

    def gap(recipe: str) -> float:
        values = advantages(recipe, batch)
        there = ~torch.isnan(values)
        return float(values[there & is_new].mean() - values[there & ~is_new].mean())

    return gap("global_episodic"), gap("turn_reward_to_go")


# --- of gradients -------------------------------------------------------------------------------------


def gradient_norm(recipe: str, world: World, seed: int, groups: Sequence[ScoredGroup]) -> float:
    """Of the parameters, at the starting weights."""
    return Policy(world=world, recipe=recipe, seed=seed).learn(groups).grad_norm


def void_turns(num_steps: int) -> Callable[[int], tuple[float, float]]:
    """Look-up with 3 turns: the largest gradient norm of steps of 4 groups, with void turns and without."""

    def measure(seed: int) -> tuple[float, float]:
        groups = played(LOOK_UP.but(max_turns=3), seed, num_groups=4 * num_steps)
        steps = [groups[start : start + 4] for start in range(0, len(groups), 4)]
        names = ("simpletir", "grpo_tcr")
        found = [max(gradient_norm(recipe, LOOK_UP, seed, step) for step in steps) for recipe in names]
        return found[0], found[1]

    return measure


@dataclass(frozen=True, kw_only=True, slots=True)
class Stale:
    """A batch, and weights that are NUM_STEPS steps newer."""

    groups: list[ScoredGroup]
    policy: Policy

    @classmethod
    def of(cls, seed: int) -> "Stale":
        """In the grid."""
        return cls(groups=played(GRID, seed), policy=trained(TRAJECTORY_LEVEL, GRID, seed))

    def coefficients(self, recipe: str) -> tuple[Coefficients, Tensor]:
        """What a recipe makes of the old batch, and its mask."""
        chosen = load_recipe(recipe)
        batch = with_advantages(chosen, batch_of(self.groups), "all")
        return coefficients(chosen, batch, *self.policy.scores(self.groups)), batch.mask

    def norm(self, recipe: str) -> float:
        """Of the gradient of the parameters."""
        policy = Policy(world=GRID, recipe=recipe, seed=0, weights=self.policy.newest)
        return policy.learn(self.groups).grad_norm


def ratio_tail(recipe: str) -> Callable[[int], tuple[float, float]]:
    """99th percentile of |log ratio| over trained tokens."""

    def measure(seed: int) -> tuple[float, float]:
        stale = Stale.of(seed)

        def tail(name: str) -> float:
            found, mask = stale.coefficients(name)
            return float(found.log_ratio[mask].abs().quantile(0.99))

        return tail(recipe), tail(TRAJECTORY_LEVEL)

    return measure


def stale_norm(recipe: str) -> Callable[[int], tuple[float, float]]:
    """Gradient norm on the old batch."""

    def measure(seed: int) -> tuple[float, float]:
        stale = Stale.of(seed)
        return stale.norm(recipe), stale.norm(TRAJECTORY_LEVEL)

    return measure


def stale_clips(seed: int) -> tuple[float, float]:
    """Share of trained tokens that are clipped on the old batch."""
    stale = Stale.of(seed)

    def share(recipe: str) -> float:
        found, mask = stale.coefficients(recipe)
        return float(found.bounded[mask].float().mean())

    return share("st_ppo"), share(TRAJECTORY_LEVEL)


# --- of the weights of turns and episodes -------------------------------------------------------------


def pulls(recipe: str, batch: Batch, policy: Policy, groups: Sequence[ScoredGroup]) -> Tensor:
    """Size of the coefficients of each turn [N, K] under the weights that played, which are the reference too."""
    chosen, (logprobs, entropy) = load_recipe(recipe), policy.scores(groups)
    batch = with_advantages(chosen, replace(batch, reference_logprobs=logprobs), "all")
    found = coefficients(chosen, batch, logprobs, entropy)
    sizes = torch.where(batch.mask, found.logprobs.abs(), 0.0).to(torch.float64)
    turns = torch.zeros((batch.num_rollouts, int(batch.turn_ids.max()) + 1), dtype=torch.float64)
    return turns.scatter_add_(1, torch.where(batch.mask, batch.turn_ids, 0), sizes)


def spread_of_pulls(seed: int) -> tuple[float, float]:
    """Look-up: deviation over mean of the pulls of an episode's turns, over episodes with an advantage."""
    groups = played(LOOK_UP, seed)
    batch, policy = batch_of(groups), Policy(world=LOOK_UP, recipe=TRAJECTORY_LEVEL, seed=seed)

    def spread(recipe: str) -> float:
        found: list[float] = []
        for row in pulls(recipe, batch, policy, groups):
            own = row[row > 0]
            if len(own) > 1:
                found.append(float(own.std() / own.mean()))
        return sum(found) / max(1, len(found))

    return spread("flow_grpo"), spread(TRAJECTORY_LEVEL)


def blame_of_limits(seed: int) -> tuple[float, float]:
    """Grid with 4 turns: share of the negative pull that is on episodes that a limit ended."""
    groups = played(GRID.but(max_turns=4), seed)
    batch, policy = batch_of(groups), Policy(world=GRID, recipe=TRAJECTORY_LEVEL, seed=seed)
    is_cut = ~is_finished(batch)

    def share(recipe: str) -> float:
        values = with_advantages(load_recipe(recipe), batch, "all").advantages.nan_to_num()
        sizes = pulls(recipe, batch, policy, groups).sum(dim=1)
        blamed = torch.where((values < 0).any(dim=1), sizes, 0.0)
        return float(blamed[is_cut].sum() / blamed.sum().clamp(min=1e-12))

    return share("supo"), share(TRAJECTORY_LEVEL)
