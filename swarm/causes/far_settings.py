"""Settings that may be why: keys of node.toml far from the usual, and else those that are not the default.

Invariant: a key is a suspect by its value alone; only where a rule found what it explains, it is blamed.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity, Suspect
from swarm.causes.setting_effects import UNUSED, Far
from swarm.causes.settings_table import FAR
from swarm.causes.signal_rules import NO_SIGNAL
from swarm.causes.snapshot import Snapshot, as_toml, shortened
from swarm.config import EnvironmentConfig, NodeConfig
from swarm.model.source import is_char_model

MOST_KEYS: Final = 3  # that are named beside a finding
MOST_CHARS: Final = 60  # of a value of an environment
FEW_TASKS: Final = 50
FEW: Final = frozenset({"overfits", "held_out_falls", "held_out_stays", "all_right", "all_equal", "one_answer"})
REWARDED: Final = NO_SIGNAL | {"rewards_hardly_differ", "gets_worse", "environment_in_vain", "overfits"}
UNTAKEN: Final = UNUSED | {"environments_differ", "nobody_follows"}
OF_PROMPT: Final = (NO_SIGNAL - {"cannot_be_scored", "all_right"}) | {
    "empty_answers",
    "model_knows_nothing",
    "one_answer",
    "step_needs_many",
}
OF_FILES: Final = frozenset({"path", "question", "answer"})  # params that say nothing of how hard tasks are


def far_settings(snapshot: Snapshot) -> list[Suspect]:
    """Suspects of this node's configuration."""
    config = snapshot.config
    if config is None:
        return []
    found = [
        _suspect(far, value, snapshot)
        for far in FAR
        if far.is_far(value := _value(config, far.key), config) and not _is_of_join(far.key, value, config)
    ]
    return found + [suspect for each in config.environments for suspect in _of_environment(each, snapshot)]


def with_bearing(findings: Sequence[Diagnosed], snapshot: Snapshot) -> list[Diagnosed]:
    """The findings, where that of a bad thing names no key and follows from nothing: with what bears on it in its fix.

    These are keys that are not the default, though none is far from the usual: the likeliest place to look next.
    """
    names = {each.name for each in findings if each.gravity is not Gravity.NOTE}
    is_open = {each.name for each in findings if each.name in names and not each.key and not each.follows_from & names}
    return [_with_keys(each, snapshot) if each.name in is_open else each for each in findings]


def _with_keys(found: Diagnosed, snapshot: Snapshot) -> Diagnosed:
    """With the keys that are not the default and can lead to it in its fix, the farthest from the default first."""
    if snapshot.config is None:
        return found
    config, default, distances = snapshot.config, NodeConfig(), dict[str, float]()
    for far in FAR:
        value, usual = _value(config, far.key), _value(default, far.key)
        if found.name in far.explains and value != usual and not _is_of_join(far.key, value, config):
            distances[far.key] = _distance(value, usual)
    ranked = sorted(distances, key=distances.__getitem__, reverse=True)[:MOST_KEYS]
    keys = [f"{key} = {as_toml(_value(config, key))} (default {as_toml(_value(default, key))})" for key in ranked]
    keys = [
        f"{suspect.finding.key} of {each.name} = {_shown(each, suspect.finding.key)}"
        for each in config.environments
        for suspect in _of_environment(each, snapshot)
        if found.name in suspect.explains
    ] + keys
    said = f"{found.fix}. Of what is not the default, this bears on it: {', '.join(keys[: 2 * MOST_KEYS])}"
    return replace(found, fix=said) if keys else found


def _is_of_join(key: str, value: object, config: NodeConfig) -> bool:
    """Whether `swarm join` wrote it, as the run's manifest has it or for this machine: nobody chose it here."""
    if not config.coordinator.fingerprint:
        return False
    match key:
        case "exchange.anchors":
            return True
        case "exchange.advertise":  # an address of the day of joining, looked up anew at each start
            return str(value).endswith(":0")
        case "worker":
            return is_char_model(config.model.source)
        case _:
            return False


def _shown(env: EnvironmentConfig, key: str) -> str:
    """The beginning of a value of an environment."""
    return shortened(str(getattr(env, key.partition(".")[2])))[:MOST_CHARS]


def _distance(value: object, usual: object) -> float:
    """How far apart two values of a key are: factors of ten of numbers above 0, else 1."""
    numbers = [each for each in (value, usual) if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(numbers) < 2 or min(numbers) <= 0:
        return 1.0
    return abs(math.log10(numbers[0] / numbers[1]))


def _value(config: NodeConfig, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def _suspect(far: Far, value: object, snapshot: Snapshot) -> Suspect:
    name = far.key.rpartition(".")[2]
    words = {"low": "too low", "high": "too high", "set": "set so"}[far.how]
    usual = far.usual(snapshot.config) if callable(far.usual) else far.usual
    finding = Diagnosed(
        name=f"{name}_{words.replace(' ', '_')}",
        claim=f"{far.key} = {as_toml(value)} is {words}: {far.does}",
        evidence=(f"{far.key} (node.toml)" + ("" if usual is None else f"; usual is {as_toml(usual)}"),),
        fix=f"change {far.key} in {snapshot.directory / 'node.toml'}; then {snapshot.start}"
        if usual is None
        else snapshot.set_key(far.key, usual),
        gravity=Gravity.NOTE,
        certainty=far.certainty,
        key=far.key,
    )
    return Suspect(finding=finding, explains=far.explains)


def _params(env: EnvironmentConfig, snapshot: Snapshot) -> Suspect:
    """Parameters of tasks, which decide how hard they are."""
    finding = Diagnosed(
        name="params_set_so",
        claim=f"tasks of {env.name} are made with params of your own, which decide how hard they are",
        evidence=(f"params of [[environments]] {env.name} = {env.params} (node.toml)",),
        fix=f"look at questions and answers: swarm samples {snapshot.directory}; easier or harder ones: "
        "docs/environments.md",
        gravity=Gravity.NOTE,
        certainty=Certainty.POSSIBLE,
        key="environments.params",
    )
    return Suspect(finding=finding, explains=frozenset({"all_wrong", "all_right", "environment_in_vain"}))


def _shapes_prompt(env: EnvironmentConfig) -> bool:
    return bool(env.prefill or env.system) or env.prompt != "{question}"


def _prompt(env: EnvironmentConfig, snapshot: Snapshot) -> Suspect:
    """Words around the question, which may be of another form than the model knows."""
    key = "prefill" if env.prefill else "system" if env.system else "prompt"
    finding = Diagnosed(
        name=f"{key}_set_so",
        claim=f"{key} of {env.name} is not the usual one: a model that does not know that form answers nothing right",
        evidence=(f"{key} under [[environments]] {env.name} (node.toml)",),
        fix=f"look at prompt and answers: swarm samples {snapshot.directory}; the least is prompt = "
        '"{question}", without prefill and system',
        gravity=Gravity.NOTE,
        certainty=Certainty.POSSIBLE,
        key=f"environments.{key}",
    )
    return Suspect(finding=finding, explains=OF_PROMPT)


def _of_environment(env: EnvironmentConfig, snapshot: Snapshot) -> list[Suspect]:
    """Keys of one environment that are far from the usual, each with what such a value does."""
    rows = (
        ("num_tasks", env.num_tasks < FEW_TASKS, "so few questions are soon known by heart", FEW),
        ("reward_range", env.reward_range != (0.0, 1.0), "rewards are rescaled from there to [0, 1]", REWARDED),
        ("reward_weights", bool(env.reward_weights), "an episode is worth this sum, clipped to [0, 1]", REWARDED),
        ("exchange", env.exchange != "replayable", "not everybody's groups of it count, or leave the node", UNTAKEN),
    )
    shaped = [_prompt(env, snapshot)] if _shapes_prompt(env) else []
    shaped += [_params(env, snapshot)] if set(env.params) - OF_FILES else []
    return shaped + [
        Suspect(
            finding=Diagnosed(
                name=f"{key}_set_so",
                claim=f"{key} of {env.name} is {getattr(env, key)}: {does}",
                evidence=(f"{key} under [[environments]] {env.name} (node.toml)",),
                fix=f"change {key} there, in {snapshot.directory / 'node.toml'}; then {snapshot.start}",
                gravity=Gravity.NOTE,
                certainty=Certainty.POSSIBLE,
                key=f"environments.{key}",
            ),
            explains=explains,
        )
        for key, is_far, does, explains in rows
        if is_far
    ]
