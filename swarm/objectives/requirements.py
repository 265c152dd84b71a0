"""Check, before a run starts, that the run supplies every requirement of its recipes.

Invariant: every `Requirement` has an entry in `_FIXES` that names the gap and the fix.
"""

from collections.abc import Collection

from swarm.config import EnvironmentConfig, NodeConfig
from swarm.environments.load import build_environment, signals_of
from swarm.errors import ConfigError
from swarm.objectives.part import Requirement
from swarm.objectives.recipe import Recipe

MAX_REPEATED_TASKS = 10_000  # of one environment: with more, a prompt comes back too seldom for its history to help

_ALWAYS = frozenset(
    {
        Requirement.BEHAVIOR_LOGPROBS,
        Requirement.PROXIMAL_LOGPROBS,
        Requirement.REFERENCE_LOGPROBS,
        Requirement.BASELINE_ROLLOUT,
        Requirement.PERTURBED_LOGPROBS,
        Requirement.ANSWER_PROBS,
        Requirement.FEEDBACK_SHIFTS,
        Requirement.TURN_UPDATES,
    }
)
NOT_YET = frozenset(
    {
        Requirement.REFERENCE_REWARDS,
        Requirement.PREVIOUS_DRAW,
        Requirement.BUDGETS,
    }
)
"""Requirements that no run can supply yet, whatever its configuration."""

_CHOOSE = "choose a recipe without this need, or an environment whose `signals` have"
_NOT_BUILT = "no part of a run makes them yet; choose a recipe without this need (`swarm recipes list`)"
_FIXES = {
    Requirement.BEHAVIOR_LOGPROBS: "the generator must sample at a temperature above 0 "
    "without top_p, top_k or penalties",
    Requirement.PROXIMAL_LOGPROBS: "the learner scores them itself",
    Requirement.REFERENCE_LOGPROBS: "the learner scores them itself with the initial weights",
    Requirement.REFERENCE_REWARDS: f"rewards of the reference policy's own responses: {_NOT_BUILT}",
    Requirement.BASELINE_ROLLOUT: "the learner answers each prompt greedily itself",
    Requirement.ZERO_VARIANCE_GROUPS: "groups whose rewards are all equal are left out: "
    "set replay.keep_zero_variance = true",
    Requirement.SEVERAL_UPDATES: "with one update a draw its policy is always the proximal one: "
    "set learner.updates_per_step = 2 or more",
    Requirement.TURNS: "every environment of this run is single-turn: choose a recipe without this need, "
    "or an environment with several turns",
    Requirement.TURN_REWARDS: f"no environment of this run rewards a turn: {_CHOOSE} `turn_rewards`",
    Requirement.TURN_SIGNAL: "groups of equal outcomes are left out whatever their turns were worth: "
    "set replay.keep_turn_signal = true",
    Requirement.STATE_KEYS: f"no environment of this run says in which state it is: {_CHOOSE} `state_keys`",
    Requirement.TOOL_CALLS: f"no environment of this run has tools: {_CHOOSE} `tool_calls`",
    Requirement.ANSWER_PROBS: "the learner scores the reference answers itself",
    Requirement.FEEDBACK_SHIFTS: "the learner scores turns without the observation before them itself",
    Requirement.TURN_UPDATES: "the learner splits a draw by turns itself",
    Requirement.REPEATED_PROMPTS: "prompts hardly ever come back, so that their history means nothing: "
    f"set num_tasks of each environment that is asked to {MAX_REPEATED_TASKS} or less",
    Requirement.VARIED_GROUPS: "every group has generator.group_size rollouts: "
    "set generator.largest_group on every node",
    Requirement.PREVIOUS_DRAW: f"the draw before, once more: {_NOT_BUILT}",
    Requirement.SEGMENT_LOGPROBS: "nodes of another tokenizer must say what their tokens stand for: "
    "set generator.byte_lengths = true on every node",
    Requirement.PERTURBED_LOGPROBS: "the learner perturbs its layers itself",
    Requirement.BUDGETS: f"prompts that ask for a number of tokens: {_NOT_BUILT}",
    Requirement.REWARD_PARTS: f"every environment of this run gives one reward: {_CHOOSE} `reward_parts`",
}


def check_supply(recipe: Recipe, supplied: Collection[Requirement]) -> None:
    """Raises ConfigError, with every gap and its fix, if the run does not supply all requirements of the recipe."""
    missing = sorted(recipe.needs - set(supplied))
    if missing:
        reasons = "; ".join(f"{need}: {_FIXES[need]}" for need in missing)
        raise ConfigError(f"learner.recipe {recipe.name} needs what this run does not supply. {reasons}")


def how_to_supply(need: Requirement) -> str:
    """Returns a text on how a run supplies a requirement, or why no run can."""
    return _FIXES[need]


def supplied_by(config: NodeConfig) -> frozenset[Requirement]:
    """Requirements that a node with this configuration supplies. Raises ConfigError if an environment has a fault."""
    asked = [
        env
        for env in config.environments
        if not config.generator.env_weights or env.name in config.generator.env_weights
    ]
    found = set(_ALWAYS)
    if config.replay.keep_zero_variance:
        found.add(Requirement.ZERO_VARIANCE_GROUPS)
    if config.replay.keep_turn_signal or config.replay.keep_zero_variance:
        found.add(Requirement.TURN_SIGNAL)
    if config.generator.byte_lengths:
        found.add(Requirement.SEGMENT_LOGPROBS)
    if config.learner.updates_per_step > 1:
        found.add(Requirement.SEVERAL_UPDATES)
    if config.generator.largest_group > config.generator.group_size:
        found.add(Requirement.VARIED_GROUPS)
    if asked and all(env.num_tasks <= MAX_REPEATED_TASKS for env in asked):
        found.add(Requirement.REPEATED_PROMPTS)
    return frozenset(found).union(*(_supplied_by(env) for env in asked))


def _supplied_by(config: EnvironmentConfig) -> frozenset[Requirement]:
    """Requirements that an environment supplies. Raises ConfigError if the environment cannot be built."""
    if config.kind == "function" and config.reward_weights:
        return frozenset({Requirement.REWARD_PARTS})
    if not config.may_have_turns:  # has no signals, and may be slow to build
        return frozenset()
    environment = build_environment(config)
    signals = frozenset(map(Requirement, signals_of(environment)))
    return signals | {Requirement.TURNS} if environment.max_turns > 1 else signals
