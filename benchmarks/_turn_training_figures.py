"""The figures of recipes over turns that are of runs: what training came to, and of which recipe.

Invariant: a figure is a function of its seed.
"""

from dataclasses import replace
from typing import Final

import benchmarks._turn_tabular as tabular
import benchmarks._turn_training as training
from benchmarks._turn_episodes import GRID, LOOK_UP, MAXIMUM, RETRY
from benchmarks._turn_figure import Figure
from benchmarks._turn_played import GROUP_SIZE, NUM_LONG_STEPS, NUM_STEP_GROUPS, NUM_STEPS

_EPISODES: Final = NUM_STEP_GROUPS * GROUP_SIZE
_TRAINED: Final = f"{NUM_STEPS} steps of {_EPISODES} episodes"
_LONG: Final = f"{NUM_LONG_STEPS} steps of {_EPISODES} episodes"
_GAME: Final = f"a game of two turns, tables for a policy, {tabular.NUM_STEPS} steps of {_EPISODES} episodes"
TRAINING_FIGURES: Final = (
    Figure(
        recipe="gigpo",
        suffix=".success",
        quantity="success after training",
        where=f"grid_world, {_TRAINED}",
        is_more=True,
        measure=training.success("gigpo", GRID),
    ),
    Figure(
        recipe="igpo",
        suffix=".success",
        quantity="success after training",
        where=f"look_up, {_TRAINED}",
        is_more=True,
        measure=training.success("igpo", LOOK_UP),
    ),
    Figure(
        recipe="turn_reward_to_go",
        suffix=".success",
        quantity="success after training",
        where=f"look_up, {_TRAINED}",
        is_more=True,
        measure=training.success("turn_reward_to_go", LOOK_UP),
    ),
    Figure(
        recipe="otc_po",
        quantity="calls of a success",
        where=f"look_up, {_TRAINED}",
        is_more=False,
        measure=training.calls_per_success(NUM_STEPS),
    ),
    Figure(
        recipe="ufo",
        quantity="distinct tries, of those of an episode",
        where=f"retry around reverse, {_TRAINED}",
        is_more=True,
        measure=training.distinct_tries(RETRY),
    ),
    Figure(
        recipe="mini_o3",
        quantity="turns of an episode, tested with 8",
        where=f"grid_world, {_TRAINED} with 4 turns",
        is_more=True,
        measure=training.turns_beyond_training(GRID, 4, 8),
    ),
    Figure(
        recipe="grpo_tcr",
        quantity="entropy of a token after training",
        where=f"look_up, {_TRAINED}, 2 updates each",
        is_more=True,
        measure=training.entropy_kept(NUM_STEPS),
    ),
    Figure(
        recipe="flow_grpo",
        suffix=".success",
        quantity="success after training",
        where=f"look_up, {_TRAINED}",
        is_more=True,
        measure=training.success("flow_grpo", LOOK_UP),
    ),
    Figure(
        recipe="supo",
        suffix=".success",
        quantity="success, tested with 8 turns",
        where=f"grid_world, {_TRAINED} with 4 turns",
        is_more=True,
        measure=training.success_beyond_training("supo"),
    ),
    Figure(
        recipe="srpo",
        suffix=".success",
        quantity="success after training",
        where=f"grid_world, {_TRAINED}",
        is_more=True,
        measure=training.success("srpo", GRID),
    ),
    Figure(
        recipe="global_episodic",
        suffix=".visits",
        quantity="states of an episode that differ, of those that its turns led to",
        where=f"grid_world, {_TRAINED}",
        is_more=True,
        measure=training.new_states_visited,
    ),
    Figure(
        recipe="score",
        quantity="wrong first answers made right minus right ones spoilt, of all episodes",
        where=f"retry around max, always asked twice, {_TRAINED}",
        is_more=True,
        measure=training.corrections,
    ),
    Figure(
        recipe="ufo",
        suffix=".max",
        quantity="distinct tries, of those of an episode",
        where=f"retry around max, {_TRAINED}",
        is_more=True,
        measure=training.distinct_tries(MAXIMUM),
    ),
    Figure(
        recipe="otc_po",
        suffix=".long",
        quantity="calls of a success",
        where=f"look_up, {_LONG}",
        is_more=False,
        measure=training.calls_per_success(NUM_LONG_STEPS),
    ),
    Figure(
        recipe="grpo_tcr",
        suffix=".long",
        quantity="entropy of a token after training",
        where=f"look_up, {_LONG}, 2 updates each",
        is_more=True,
        measure=training.entropy_kept(NUM_LONG_STEPS),
    ),
    Figure(
        recipe="seeupo",
        quantity="success after training",
        where=f"grid_world, {_TRAINED}",
        is_more=True,
        measure=training.success("seeupo", GRID),
    ),
    Figure(
        recipe="seeupo",
        suffix=".updates",
        quantity="success after training; trajectory level makes 4 updates of each draw",
        where=f"grid_world, {_TRAINED}",
        is_more=True,
        measure=training.success("seeupo", GRID, baseline_updates=4),
    ),
    Figure(
        recipe="seeupo",
        suffix=".game",
        quantity="expected outcome over the best; in place of the trajectory level its parts in one joint update",
        where=f"{_GAME}, rate 1",
        is_more=True,
        measure=tabular.outcome_reached(1.0),
    ),
    Figure(
        recipe="seeupo",
        suffix=".falls",
        quantity="share of steps after which the expected outcome is lower; as above its parts in one joint update",
        where=f"{_GAME}, rate 1",
        is_more=False,
        measure=tabular.falls(1.0),
    ),
    Figure(
        recipe="seeupo",
        suffix=".game_large",
        quantity="expected outcome over the best; in place of the trajectory level its parts in one joint update",
        where=f"{_GAME}, rate 10",
        is_more=True,
        measure=tabular.outcome_reached(10.0),
    ),
    Figure(
        recipe="seeupo",
        suffix=".falls_large",
        quantity="share of steps after which the expected outcome is lower; as above its parts in one joint update",
        where=f"{_GAME}, rate 10",
        is_more=False,
        measure=tabular.falls(10.0),
    ),
    Figure(
        recipe="gtpo_turn",
        suffix=".success",
        quantity="success after training",
        where=f"look_up, {_TRAINED}",
        is_more=True,
        measure=training.success("gtpo_turn", LOOK_UP),
    ),
    Figure(
        recipe="mini_o3",
        suffix=".look_up",
        quantity="turns of an episode, tested with 6",
        where=f"look_up, {_LONG} with 3 turns",
        is_more=True,
        measure=training.turns_beyond_training(LOOK_UP, 3, 6, NUM_LONG_STEPS),
    ),
    Figure(
        recipe="grpo_tcr",
        suffix=".updates",
        quantity="entropy of a token after training",
        where=f"look_up, {_LONG}, 4 updates each",
        is_more=True,
        measure=training.entropy_kept(NUM_LONG_STEPS, 4),
    ),
    Figure(
        recipe="ufo",
        suffix=".long",
        quantity="distinct tries, of those of an episode",
        where=f"retry around max, {_LONG}",
        is_more=True,
        measure=training.distinct_tries(MAXIMUM, NUM_LONG_STEPS),
    ),
    Figure(
        recipe="otc_po",
        suffix=".warm",
        quantity="calls of a success",
        where=f"look_up at temperature 1.5, {_LONG}",
        is_more=False,
        measure=training.calls_per_success(NUM_LONG_STEPS, replace(LOOK_UP, temperature=1.5)),
    ),
    Figure(
        recipe="score",
        suffix=".stages",
        quantity="wrong first answers made right minus right ones spoilt, of all episodes",
        where=f"retry around max, always asked twice, {_TRAINED} after as many of its first stage",
        is_more=True,
        measure=training.corrections_after_stage_one,
    ),
)
