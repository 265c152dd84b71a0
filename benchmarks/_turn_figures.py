"""The figures: a quantity of each recipe over turns, measured for it and for the trajectory-level method.

Invariant: a figure is a function of its seed. Quantities of one batch are computed on the same episodes for both
methods; quantities of training on runs from the same weights, over as many episodes of the same tasks.
Shape letters: N rollouts, L longest response in tokens, K most turns.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from benchmarks._turn_episodes import GRID, LOOK_UP, RETRY, Policy, World, advantages, batch_of
from swarm.episode import TurnStatus
from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import Coefficients, coefficients, with_advantages
from swarm.objectives.methods import load_recipe
from swarm.objectives.parts import status_mask, turns_of
from swarm.types import ScoredGroup

NUM_GROUPS: Final = 32
GROUP_SIZE: Final = 8
NUM_STEPS: Final = 20
NUM_STEP_GROUPS: Final = 4
NUM_TEST: Final = 32  # tasks
TRAJECTORY_LEVEL: Final = "grpo"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One figure with one seed."""

    figure: str
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a job gave."""

    job: Job
    method: float
    baseline: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A quantity of a recipe."""

    recipe: str
    row: str
    quantity: str
    where: str
    is_more: bool  # what the method claims
    measure: Callable[[int], tuple[float, float]]  # of a seed: for the method, for the trajectory-level one
    suffix: str = ""

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.recipe}{self.suffix}"


def run(job: Job) -> Outcome:
    """One figure (blocking; sets torch to one thread)."""
    torch.set_num_threads(1)
    method, baseline = next(each for each in FIGURES if each.name == job.figure).measure(job.seed)
    return Outcome(job=job, method=method, baseline=baseline)


# --- episodes -----------------------------------------------------------------------------------------


@functools.cache
def played(world: World, seed: int, num_groups: int = NUM_GROUPS, group_size: int = GROUP_SIZE) -> list[ScoredGroup]:
    """Episodes of the starting weights."""
    policy = Policy(world=world, recipe=TRAJECTORY_LEVEL, seed=seed)
    return policy.play(world.build(), 1000 * (seed + 1), num_groups, group_size)


def outcome_only(batch: Batch) -> Batch:
    """The batch with turns of reward 0: what is left is what a method makes of outcomes."""
    assert batch.turn_rewards is not None
    return replace(batch, turn_rewards=torch.zeros_like(batch.turn_rewards))


@functools.cache
def trained(recipe: str, world: World, seed: int, updates_per_step: int = 1) -> Policy:
    """The policy after NUM_STEPS steps."""
    policy = Policy(world=world, recipe=recipe, seed=seed, updates_per_step=updates_per_step)
    policy.train(world.build(), NUM_STEPS, NUM_STEP_GROUPS, GROUP_SIZE)
    return policy


def tested(policy: Policy, world: World | None = None) -> Batch:
    """Sampled episodes of held-out tasks, of its own world or another."""
    environment = (world or policy.world).build()
    return batch_of(policy.play(environment, 0, NUM_TEST, GROUP_SIZE, is_held_out=True))


# --- of advantages ------------------------------------------------------------------------------------


def correlation(values: Tensor, truth: Tensor) -> float:
    """Over the turns [N, K] where neither is NaN; 0 where one of them is constant."""
    there = ~(torch.isnan(values) | torch.isnan(truth))
    one, other = values[there], truth[there]
    if float(one.std()) == 0.0 or float(other.std()) == 0.0:
        return 0.0
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])


def agreement(recipe: str, batch: Batch, truth: Tensor) -> tuple[float, float]:
    """Correlation of a turn's advantage with what the turn was really worth."""
    return correlation(advantages(recipe, batch), truth), correlation(advantages(TRAJECTORY_LEVEL, batch), truth)


def worth_of_turns(batch: Batch) -> Tensor:
    """What the environment says of each turn, NaN where there is none: a step nearer to the goal, a hop found."""
    turns = turns_of(batch)
    return torch.where(turns.exists, turns.rewards, torch.nan)


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


def early_calls(seed: int) -> tuple[float, float]:
    """Look-up at temperature 1.5: advantage of successes that called early minus that of those that called late."""
    batch = batch_of(played(replace(LOOK_UP, temperature=1.5), seed))
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


def dead_groups(seed: int) -> tuple[float, float]:
    """Look-up: share of groups in which no advantage is other than 0."""
    policy = Policy(world=LOOK_UP, recipe="igpo", seed=seed)
    batch = policy.with_answers(played(LOOK_UP, seed))

    def share(recipe: str) -> float:
        is_alive = advantages(recipe, batch).nan_to_num().abs().amax(dim=1) > 1e-9
        groups = batch.group_index.unique().tolist()
        return sum(not bool(is_alive[batch.group_index == group].any()) for group in groups) / len(groups)

    return share("igpo"), share(TRAJECTORY_LEVEL)


def gains_and_hops(seed: int) -> tuple[float, float]:
    """Look-up, outcomes and answers alone; the answer, which ends an episode, is left out."""
    policy = Policy(world=LOOK_UP, recipe="igpo", seed=seed)
    batch = policy.with_answers(played(LOOK_UP, seed))
    truth = torch.where(turns_of(batch).is_last, torch.nan, worth_of_turns(batch))
    return agreement("igpo", outcome_only(batch), truth)


def flatness(seed: int) -> tuple[float, float]:
    """Look-up, four turns or more, every outcome 0: how far the size of advantages at turns 1 to 3 is from flat.

    The mean distance of the logarithm of (deviation at the turn over that at the third) from 0.
    """
    policy = Policy(world=LOOK_UP, recipe="igpo", seed=seed)
    batch = policy.with_answers(played(LOOK_UP, seed))
    batch = replace(batch, rewards=torch.zeros_like(batch.rewards))
    is_long = turns_of(batch).num_turns >= 4

    def distance(recipe: str) -> float:
        sizes = advantages(recipe, batch)[is_long, :3].std(dim=0)
        return float(torch.log(sizes[:2] / sizes[2]).abs().mean())

    return distance("a2tgpo"), distance("igpo")


# --- of gradients -------------------------------------------------------------------------------------


def gradient_norm(recipe: str, world: World, seed: int, groups: Sequence[ScoredGroup]) -> float:
    """Of the parameters, at the starting weights."""
    return Policy(world=world, recipe=recipe, seed=seed).learn(groups).grad_norm


def void_turns(seed: int) -> tuple[float, float]:
    """Look-up with 3 turns: the largest gradient norm of eight steps of 4 groups, with void turns and without."""
    groups = played(LOOK_UP.but(max_turns=3), seed)
    steps = [groups[start : start + 4] for start in range(0, len(groups), 4)]
    found = [max(gradient_norm(recipe, LOOK_UP, seed, step) for step in steps) for recipe in ("simpletir", "grpo_tcr")]
    return found[0], found[1]


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


# --- of training --------------------------------------------------------------------------------------


def calls_per_success(seed: int) -> tuple[float, float]:
    """Look-up, held out, after training."""

    def mean(recipe: str) -> float:
        batch = tested(trained(recipe, LOOK_UP, seed))
        success = batch.rewards > 0.5
        return float(turns_of(batch).calls.sum(dim=1)[success].to(torch.float64).mean())

    return mean("otc_po"), mean(TRAJECTORY_LEVEL)


def success(recipe: str, world: World, baseline: str = TRAJECTORY_LEVEL) -> Callable[[int], tuple[float, float]]:
    """Held out, after training."""

    def measure(seed: int) -> tuple[float, float]:
        found = [
            float((tested(trained(name, world, seed)).rewards > 0.5).float().mean()) for name in (recipe, baseline)
        ]
        return found[0], found[1]

    return measure


def distinct_tries(seed: int) -> tuple[float, float]:
    """Retry, held out, after training: distinct ones among the tries of episodes that did not succeed at first."""

    def share(recipe: str) -> float:
        actions = tested(trained(recipe, RETRY, seed)).actions
        shares = [len(set(each)) / len(each) for each in actions or () if len(each) > 1]
        return sum(shares) / max(1, len(shares))

    return share("ufo"), share(TRAJECTORY_LEVEL)


def turns_beyond_training(seed: int) -> tuple[float, float]:
    """Grid, held out, trained with 4 turns and tested with 8: turns of an episode."""

    def mean(recipe: str) -> float:
        counts = tested(trained(recipe, GRID.but(max_turns=4), seed), GRID.but(max_turns=8)).num_turns
        assert counts is not None
        return float(counts.to(torch.float64).mean())

    return mean("mini_o3"), mean(TRAJECTORY_LEVEL)


def entropy_kept(seed: int) -> tuple[float, float]:
    """Look-up, two updates of each draw so that clips act: mean entropy of a held-out token after training."""

    def mean(recipe: str) -> float:
        policy = trained(recipe, LOOK_UP, seed, updates_per_step=2)
        groups = policy.play(LOOK_UP.build(), 0, NUM_TEST, GROUP_SIZE, is_held_out=True)
        _, entropy = policy.scores(groups)
        return float(entropy[batch_of(groups).mask].mean())

    return mean("grpo_tcr"), mean(TRAJECTORY_LEVEL)


_OF_ADVANTAGE: Final = "correlation of a turn's advantage with what the turn was worth"
_STALE: Final = f"grid_world, a batch {NUM_STEPS} steps old"
_TRAINED: Final = f"{NUM_STEPS} steps of {NUM_STEP_GROUPS * GROUP_SIZE} episodes"
FIGURES: Final = (
    Figure(
        recipe="gigpo",
        row="S012",
        quantity=f"{_OF_ADVANTAGE}, from outcomes and states alone",
        where="grid_world",
        is_more=True,
        measure=states,
    ),
    Figure(
        recipe="gigpo",
        suffix=".success",
        row="S012",
        quantity="success after training",
        where=f"grid_world, {_TRAINED}",
        is_more=True,
        measure=success("gigpo", GRID),
    ),
    Figure(
        recipe="igpo",
        row="S001",
        quantity="share of dead groups: no advantage is other than 0",
        where="look_up",
        is_more=False,
        measure=dead_groups,
    ),
    Figure(
        recipe="igpo",
        suffix=".hops",
        row="S001",
        quantity=f"{_OF_ADVANTAGE} (a hop found), from outcomes and the right answer alone",
        where="look_up",
        is_more=True,
        measure=gains_and_hops,
    ),
    Figure(
        recipe="igpo",
        suffix=".success",
        row="S001",
        quantity="success after training",
        where=f"look_up, {_TRAINED}",
        is_more=True,
        measure=success("igpo", LOOK_UP),
    ),
    Figure(
        recipe="a2tgpo",
        row="S178",
        quantity="size of advantages at turns 1 and 2 over that at turn 3, logarithm's distance from 0, outcomes 0",
        where="look_up; in place of the trajectory level `igpo`",
        is_more=False,
        measure=flatness,
    ),
    Figure(
        recipe="trloo",
        row="S154",
        quantity="covariance of advantage and a right first search over the true one; 1 is unbiased",
        where="look_up, groups of 4; trajectory level is `dr_grpo`",
        is_more=True,
        measure=left_out_scale,
    ),
    Figure(
        recipe="matchtir",
        row="S169",
        quantity=f"{_OF_ADVANTAGE} (a hop found)",
        where="look_up",
        is_more=True,
        measure=hops("matchtir"),
    ),
    Figure(
        recipe="turn_reward_to_go",
        row="-",
        quantity=f"{_OF_ADVANTAGE} (a hop found)",
        where="look_up",
        is_more=True,
        measure=hops("turn_reward_to_go"),
    ),
    Figure(
        recipe="turn_reward_to_go",
        suffix=".success",
        row="-",
        quantity="success after training",
        where=f"look_up, {_TRAINED}",
        is_more=True,
        measure=success("turn_reward_to_go", LOOK_UP),
    ),
    Figure(
        recipe="simpletir",
        row="S179",
        quantity="largest gradient norm of 8 steps of 4 groups; trajectory level is `grpo_tcr`, which has its clip",
        where="look_up, 3 turns",
        is_more=False,
        measure=void_turns,
    ),
    Figure(
        recipe="malformed_turn_filter",
        row="-",
        quantity="share of the positive pull that is on malformed turns",
        where="grid_world at temperature 1.5",
        is_more=False,
        measure=slips,
    ),
    Figure(
        recipe="aspo_tool_use",
        row="S140",
        quantity="advantage of successes that called earliest minus that of the others",
        where="look_up at temperature 1.5",
        is_more=True,
        measure=early_calls,
    ),
    Figure(
        recipe="ipa",
        row="S080",
        quantity="99th percentile of the log-ratio's size",
        where=_STALE,
        is_more=False,
        measure=ratio_tail("ipa"),
    ),
    Figure(
        recipe="at2po",
        row="-",
        quantity="99th percentile of the log-ratio's size",
        where=_STALE,
        is_more=False,
        measure=ratio_tail("at2po"),
    ),
    Figure(
        recipe="st_ppo", row="S166", quantity="gradient norm", where=_STALE, is_more=False, measure=stale_norm("st_ppo")
    ),
    Figure(
        recipe="st_ppo",
        suffix=".clip",
        row="S166",
        quantity="share of tokens that are clipped",
        where=_STALE,
        is_more=False,
        measure=stale_clips,
    ),
    Figure(
        recipe="otc_po",
        row="S010",
        quantity="calls of a success",
        where=f"look_up, {_TRAINED}",
        is_more=False,
        measure=calls_per_success,
    ),
    Figure(
        recipe="ufo",
        row="S158",
        quantity="distinct tries, of those of an episode",
        where=f"retry around reverse, {_TRAINED}",
        is_more=True,
        measure=distinct_tries,
    ),
    Figure(
        recipe="mini_o3",
        row="S191",
        quantity="turns of an episode, tested with 8",
        where=f"grid_world, {_TRAINED} with 4 turns",
        is_more=True,
        measure=turns_beyond_training,
    ),
    Figure(
        recipe="grpo_tcr",
        row="S094",
        quantity="entropy of a token after training",
        where=f"look_up, {_TRAINED}, 2 updates each",
        is_more=True,
        measure=entropy_kept,
    ),
)
