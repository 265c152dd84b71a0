"""The figures: a quantity of each recipe over turns, measured for it and for the trajectory-level method.

Invariant: a figure is a function of its seed.
"""

from dataclasses import replace
from typing import Final

import torch

import benchmarks._turn_advantages as advantages
from benchmarks._turn_episodes import GRID, LOOK_UP
from benchmarks._turn_figure import Figure, Job, Outcome
from benchmarks._turn_played import GROUP_SIZE, NUM_STEPS
from benchmarks._turn_training_figures import TRAINING_FIGURES


def run(job: Job) -> Outcome:
    """One figure (blocking; sets torch to one thread)."""
    torch.set_num_threads(1)
    method, baseline = next(each for each in FIGURES if each.name == job.figure).measure(job.seed)
    return Outcome(job=job, method=method, baseline=baseline)


_OF_ADVANTAGE: Final = "correlation of a turn's advantage with what the turn was worth"
_STALE: Final = f"grid_world, a batch {NUM_STEPS} steps old"
FIGURES: Final = (
    Figure(
        recipe="gigpo",
        quantity=f"{_OF_ADVANTAGE}, from outcomes and states alone",
        where="grid_world",
        is_more=True,
        measure=advantages.states,
    ),
    Figure(
        recipe="igpo",
        quantity="share of dead groups: no advantage is other than 0",
        where="look_up",
        is_more=False,
        measure=advantages.dead_groups,
    ),
    Figure(
        recipe="igpo",
        suffix=".hops",
        quantity=f"{_OF_ADVANTAGE} (a hop found), from outcomes and the right answer alone",
        where="look_up",
        is_more=True,
        measure=advantages.gains_and_hops,
    ),
    Figure(
        recipe="a2tgpo",
        quantity="size of advantages at turns 1 and 2 over that at turn 3, logarithm's distance from 0, outcomes 0",
        where="look_up; in place of the trajectory level `igpo`",
        is_more=False,
        measure=advantages.flatness(LOOK_UP, 4),
    ),
    Figure(
        recipe="trloo",
        quantity="covariance of advantage and a right first search over the true one; 1 is unbiased",
        where="look_up, groups of 4; trajectory level is `dr_grpo`",
        is_more=True,
        measure=advantages.left_out_scale,
    ),
    Figure(
        recipe="matchtir",
        quantity=f"{_OF_ADVANTAGE} (a hop found)",
        where="look_up",
        is_more=True,
        measure=advantages.hops("matchtir"),
    ),
    Figure(
        recipe="turn_reward_to_go",
        quantity=f"{_OF_ADVANTAGE} (a hop found)",
        where="look_up",
        is_more=True,
        measure=advantages.hops("turn_reward_to_go"),
    ),
    Figure(
        recipe="simpletir",
        quantity="largest gradient norm of 8 steps of 4 groups; trajectory level is `grpo_tcr`, which has its clip",
        where="look_up, 3 turns",
        is_more=False,
        measure=advantages.void_turns(8),
    ),
    Figure(
        recipe="malformed_turn_filter",
        quantity="share of the positive pull that is on malformed turns",
        where="grid_world at temperature 1.5",
        is_more=False,
        measure=advantages.slips,
    ),
    Figure(
        recipe="aspo_tool_use",
        quantity="advantage of successes that called earliest minus that of the others",
        where="look_up at temperature 1.5",
        is_more=True,
        measure=advantages.early_calls(1.5, GROUP_SIZE),
    ),
    Figure(
        recipe="ipa",
        quantity="99th percentile of the log-ratio's size",
        where=_STALE,
        is_more=False,
        measure=advantages.ratio_tail("ipa"),
    ),
    Figure(
        recipe="at2po",
        quantity="99th percentile of the log-ratio's size",
        where=_STALE,
        is_more=False,
        measure=advantages.ratio_tail("at2po"),
    ),
    Figure(
        recipe="st_ppo",
        quantity="gradient norm",
        where=_STALE,
        is_more=False,
        measure=advantages.stale_norm("st_ppo"),
    ),
    Figure(
        recipe="st_ppo",
        suffix=".clip",
        quantity="share of tokens that are clipped",
        where=_STALE,
        is_more=False,
        measure=advantages.stale_clips,
    ),
    Figure(
        recipe="flow_grpo",
        quantity="deviation over mean of the pulls of an episode's turns",
        where="look_up",
        is_more=False,
        measure=advantages.spread_of_pulls,
    ),
    Figure(
        recipe="supo",
        quantity="share of the negative pull that is on episodes that a limit ended",
        where="grid_world, 4 turns",
        is_more=False,
        measure=advantages.blame_of_limits,
    ),
    Figure(
        recipe="eapo",
        quantity="correlation of a success's advantage with the turns that it saved against others of its group",
        where="grid_world",
        is_more=True,
        measure=advantages.short_successes,
    ),
    Figure(
        recipe="srpo",
        quantity="correlation of a failure's advantage with the way it made, in its group, from outcomes and states",
        where="grid_world",
        is_more=True,
        measure=advantages.near_misses("srpo", GRID),
    ),
    Figure(
        recipe="global_episodic",
        quantity="advantage of turns into a state new to the episode minus that of others, from outcomes and states",
        where="grid_world; in place of the trajectory level `turn_reward_to_go`, which it is without the bonus",
        is_more=True,
        measure=advantages.new_states,
    ),
    Figure(
        recipe="simpletir",
        suffix=".long",
        quantity="largest gradient norm of 24 steps of 4 groups; trajectory level is `grpo_tcr`, which has its clip",
        where="look_up, 3 turns",
        is_more=False,
        measure=advantages.void_turns(24),
    ),
    Figure(
        recipe="infopo",
        quantity=f"{_OF_ADVANTAGE} (a hop found), from outcomes and log-probs alone",
        where="look_up",
        is_more=True,
        measure=advantages.shifts_and_hops,
    ),
    Figure(
        recipe="infopo",
        suffix=".dead",
        quantity="share of dead groups: no advantage is other than 0",
        where="look_up",
        is_more=False,
        measure=advantages.dead_without_shifts,
    ),
    Figure(
        recipe="gtpo_turn",
        quantity=f"{_OF_ADVANTAGE} (a hop found), from outcomes and texts alone",
        where="look_up",
        is_more=True,
        measure=advantages.hops("gtpo_turn"),
    ),
    Figure(
        recipe="gtpo_turn",
        suffix=".failures",
        quantity="correlation of a failure's advantage with the hops it found, in its group, from outcomes and texts",
        where="look_up",
        is_more=True,
        measure=advantages.near_misses("gtpo_turn", LOOK_UP),
    ),
    Figure(
        recipe="aspo_tool_use",
        suffix=".varied",
        quantity="advantage of successes that called earliest minus that of the others",
        where="look_up at temperature 2, groups of 32",
        is_more=True,
        measure=advantages.early_calls(2.0, 32),
    ),
    Figure(
        recipe="a2tgpo",
        suffix=".long",
        quantity="size of advantages at turns 1 to 4 over that at turn 5, logarithm's distance from 0, outcomes 0",
        where="look_up at temperature 2, 10 turns; in place of the trajectory level `igpo`",
        is_more=False,
        measure=advantages.flatness(replace(LOOK_UP.but(max_turns=10), temperature=2.0), 6),
    ),
    *TRAINING_FIGURES,
)
