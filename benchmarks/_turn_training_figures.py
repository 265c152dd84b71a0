"""The figures of recipes over turns that are of runs: what training came to, and of which recipe.

Invariant: a figure is a function of its seed.
"""

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
        row="S012",
        quantity="success after training",
        where=f"grid_world, {_TRAINED}",
        is_more=True,
        measure=training.success("gigpo", GRID),
    ),
    Figure(
        recipe="igpo",
        suffix=".success",
        row="S001",
        quantity="success after training",
        where=f"look_up, {_TRAINED}",
        is_more=True,
        measure=training.success("igpo", LOOK_UP),
    ),
    Figure(
        recipe="turn_reward_to_go",
        suffix=".success",
        row="-",
        quantity="success after training",
        where=f"look_up, {_TRAINED}",
        is_more=True,
        measure=training.success("turn_reward_to_go", LOOK_UP),
    ),
    Figure(
        recipe="otc_po",
        row="S010",
        quantity="calls of a success",
        where=f"look_up, {_TRAINED}",
        is_more=False,
        measure=training.calls_per_success(NUM_STEPS),
    ),
    Figure(
        recipe="ufo",
        row="S158",
        quantity="distinct tries, of those of an episode",
        where=f"retry around reverse, {_TRAINED}",
        is_more=True,
        measure=training.distinct_tries(RETRY),
    ),
    Figure(
        recipe="mini_o3",
        row="S191",
        quantity="turns of an episode, tested with 8",
        where=f"grid_world, {_TRAINED} with 4 turns",
        is_more=True,
        measure=training.turns_beyond_training,
    ),
    Figure(
        recipe="grpo_tcr",
        row="S094",
        quantity="entropy of a token after training",
        where=f"look_up, {_TRAINED}, 2 updates each",
        is_more=True,
        measure=training.entropy_kept(NUM_STEPS),
    ),
    Figure(
        recipe="flow_grpo",
        suffix=".success",
        row="S074",
        quantity="success after training",
        where=f"look_up, {_TRAINED}",
        is_more=True,
        measure=training.success("flow_grpo", LOOK_UP),
    ),
    Figure(
        recipe="supo",
        suffix=".success",
        row="S036",
        quantity="success, tested with 8 turns",
        where=f"grid_world, {_TRAINED} with 4 turns",
        is_more=True,
        measure=training.success_beyond_training("supo"),
    ),
    Figure(
        recipe="srpo",
        suffix=".success",
        row="S019",
        quantity="success after training",
        where=f"grid_world, {_TRAINED}",
        is_more=True,
        measure=training.success("srpo", GRID),
    ),
    Figure(
        recipe="global_episodic",
        suffix=".visits",
        row="S194",
        quantity="states of an episode that differ, of those that its turns led to",
        where=f"grid_world, {_TRAINED}",
        is_more=True,
        measure=training.new_states_visited,
    ),
    Figure(
        recipe="score",
        row="S192",
        quantity="wrong first answers made right minus right ones spoilt, of all episodes",
        where=f"retry around max, always asked twice, {_TRAINED}",
        is_more=True,
        measure=training.corrections,
    ),
    Figure(
        recipe="ufo",
        suffix=".max",
        row="S158",
        quantity="distinct tries, of those of an episode",
        where=f"retry around max, {_TRAINED}",
        is_more=True,
        measure=training.distinct_tries(MAXIMUM),
    ),
    Figure(
        recipe="otc_po",
        suffix=".long",
        row="S010",
        quantity="calls of a success",
        where=f"look_up, {_LONG}",
        is_more=False,
        measure=training.calls_per_success(NUM_LONG_STEPS),
    ),
    Figure(
        recipe="grpo_tcr",
        suffix=".long",
        row="S094",
        quantity="entropy of a token after training",
        where=f"look_up, {_LONG}, 2 updates each",
        is_more=True,
        measure=training.entropy_kept(NUM_LONG_STEPS),
    ),
    Figure(
        recipe="seeupo",
        row="S157",
        quantity="success after training",
        where=f"grid_world, {_TRAINED}",
        is_more=True,
        measure=training.success("seeupo", GRID),
    ),
    Figure(
        recipe="seeupo",
        suffix=".updates",
        row="S157",
        quantity="success after training; trajectory level makes 4 updates of each draw",
        where=f"grid_world, {_TRAINED}",
        is_more=True,
        measure=training.success("seeupo", GRID, baseline_updates=4),
    ),
    Figure(
        recipe="seeupo",
        suffix=".game",
        row="S157",
        quantity="expected outcome over the best; in place of the trajectory level its parts in one joint update",
        where=f"{_GAME}, rate 1",
        is_more=True,
        measure=tabular.outcome_reached(1.0),
    ),
    Figure(
        recipe="seeupo",
        suffix=".falls",
        row="S157",
        quantity="share of steps after which the expected outcome is lower; as above its parts in one joint update",
        where=f"{_GAME}, rate 1",
        is_more=False,
        measure=tabular.falls(1.0),
    ),
    Figure(
        recipe="seeupo",
        suffix=".game_large",
        row="S157",
        quantity="expected outcome over the best; in place of the trajectory level its parts in one joint update",
        where=f"{_GAME}, rate 10",
        is_more=True,
        measure=tabular.outcome_reached(10.0),
    ),
    Figure(
        recipe="seeupo",
        suffix=".falls_large",
        row="S157",
        quantity="share of steps after which the expected outcome is lower; as above its parts in one joint update",
        where=f"{_GAME}, rate 10",
        is_more=False,
        measure=tabular.falls(10.0),
    ),
)
