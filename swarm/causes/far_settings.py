"""Keys of node.toml that are far from the usual, and what each of them does to a node.

Invariant: a table. A key is a suspect by its value alone; only where a rule found what it explains, it is blamed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity, Suspect
from swarm.causes.refusal_rules import OF_REFUSALS
from swarm.causes.signal_rules import NO_SIGNAL
from swarm.causes.snapshot import Snapshot, as_toml
from swarm.config import EnvironmentConfig, NodeConfig

# What settings lead to, as names of findings.
LITTLE: Final = frozenset({"steps_change_nothing", "learns_nothing", "nothing_trained"})
WILD: Final = frozenset(
    {"gets_worse", "steps_move_far", "held_out_falls", "stays_on_policy", "tokens_left_out", "not_a_number"}
    | {"nothing_trained", "one_answer", "overfits", "answers_alike"}
)
ALIKE: Final = (NO_SIGNAL - {"cannot_be_scored"}) | {
    "answers_alike",
    "one_answer",
    "small_signal",
    "step_needs_many",
    "learns_nothing",
    "no_steps",
}
SLOW: Final = frozenset(
    {"waits_for_groups", "step_needs_many", "no_group_yet", "no_step_yet", "no_steps", "stale", "come_too_late"}
    | {"far_behind", "no_credit"}
)
LONELY: Final = frozenset(
    {"alone", "no_external", "cannot_dial", "no_trainer", "trainer_away", "nobody_follows", "turns_others_away"}
)
UNUSED: Final = frozenset({"no_external", "others_refused", "no_steps"}) | OF_REFUSALS
SET_ASIDE: Final = frozenset(
    {"stays_on_policy", "all_set_aside", "tokens_left_out", "nothing_trained", "no_external", "no_steps"}
    | {"held_out_falls", "waits_for_groups", "step_needs_many", "no_step_yet", "stale"}
)
SCORING: Final = frozenset({"cannot_be_scored", "helpers_die", "ended_with_error", "never_ran"})
OF_WEIGHTS: Final = frozenset(
    {"not_published", "versions_refused", "far_behind", "trainer_away", "no_weights_yet", "ended_with_error"}
    | {"never_ran", "disk_full"}
)
OF_FILES: Final = frozenset({"path", "question", "answer"})  # params that say nothing of how hard tasks are


@dataclass(frozen=True, kw_only=True, slots=True)
class Far:
    """A key whose value is suspect."""

    key: str  # section.key
    is_far: Callable[[Any, NodeConfig], bool]  # (value, configuration)
    usual: object  # what to set; None: it depends
    does: str  # what such a value does, in words
    explains: frozenset[str]
    how: str  # low, high, or set
    certainty: Certainty = Certainty.LIKELY  # POSSIBLE: mostly such a value does no harm


def low(key: str, least: float, usual: object, does: str, *explains: frozenset[str]) -> Far:
    """A key that is suspect below a value."""
    return Far(
        key=key, is_far=lambda v, _: v < least, usual=usual, does=does, explains=frozenset().union(*explains), how="low"
    )


def high(key: str, most: float, usual: object, does: str, *explains: frozenset[str]) -> Far:
    """A key that is suspect above a value."""
    return Far(
        key=key, is_far=lambda v, _: v > most, usual=usual, does=does, explains=frozenset().union(*explains), how="high"
    )


def odd(
    key: str, is_far: Callable[[Any, NodeConfig], bool], usual: object, does: str, *explains: frozenset[str]
) -> Far:
    """A key that is suspect by a condition."""
    return Far(key=key, is_far=is_far, usual=usual, does=does, explains=frozenset().union(*explains), how="set")


def hint(
    key: str, is_far: Callable[[Any, NodeConfig], bool], usual: object, does: str, *explains: frozenset[str]
) -> Far:
    """A key that mostly does no harm, and is named after what it may explain."""
    return replace(odd(key, is_far, usual, does, *explains), certainty=Certainty.POSSIBLE)


def of(*names: str) -> frozenset[str]:
    """Names of findings."""
    return frozenset(names)


FAR: Final = (
    # --- sampling
    low("generator.temperature", 0.3, 1.0, "answers to a question hardly differ", ALIKE),
    high("generator.temperature", 1.8, 1.0, "answers are nearly random", ALIKE, of("gets_worse", "cut_off")),
    low("generator.group_size", 4, 8, "so few tries at a question are mostly all wrong or all right", ALIKE),
    high("generator.group_size", 64, 8, "each question takes very long", SLOW, of("out_of_memory", "cannot_be_scored")),
    high("generator.groups_per_batch", 64, 4, "groups come in bursts, and wait for each other", SLOW),
    high("generator.max_new_tokens", 4096, 1024, "answers may go on for very long", SLOW, of("out_of_memory")),
    odd(
        "generator.max_episode_tokens",
        lambda v, c: v < 2 * c.generator.max_new_tokens and any(each.may_have_turns for each in c.environments),
        2048,
        "episodes end before their last turn",
        ALIKE,
        of("cut_off", "episodes_cut_off"),
    ),
    low("engine.max_rows", 4, 64, "answers are generated one after the other", SLOW),
    low("engine.stall_s", 10, 600.0, "slow work counts as hung", of("cannot_be_scored", "worker_dies", "loops_fail")),
    odd(
        "engine.tolerance_nats",
        lambda v, _: 0 < v < 1e-3,
        0.0,
        "versions that are loaded as they should are refused for rounding",
        of("versions_refused", "far_behind"),
    ),
    hint(
        "engine.url", lambda v, _: bool(v), None, "another server generates, or does not", SCORING, of("no_group_yet")
    ),
    # --- the replay buffer
    high("replay.local_groups", 64, 4, "a step waits for that many groups", SLOW),
    odd(
        "replay.local_groups",
        lambda v, c: v == 0 and c.is_alone,
        4,
        "the node learns from groups of others alone, and has none",
        of("no_steps", "no_external", "alone", "no_step_yet"),
    ),
    hint(
        "replay.external_groups",
        lambda v, c: v == 0 and not c.is_alone,
        4,
        "nothing is learned from others",
        of("alone", "no_external"),
    ),
    low("replay.max_age_steps", 1, 4, "a group of an earlier version is too old at once", SLOW, UNUSED),
    high("replay.max_age_steps", 32, 4, "steps learn from what old versions did", WILD),
    low("replay.max_age_s", 10, 600.0, "groups are too old before a step can use them", SLOW, UNUSED),
    high("replay.max_reuse", 4, 1, "the same groups are learned from again and again", WILD),
    odd(
        "replay.keep_zero_variance",
        lambda v, _: v,
        False,
        "steps are made of groups whose rewards are all equal, which have no gradient",
        LITTLE,
    ),
    hint(
        "replay.barrier", lambda v, _: v, False, "each step waits for the slowest node", of("no_steps", "no_step_yet")
    ),
    # --- the optimizer
    odd("learner.recipe_params", lambda v, _: bool(v), None, "constants are not the recipe's own", WILD, LITTLE),
    hint(
        "learner.recipe",
        lambda v, _: v.endswith("RECIPE") or ":" in v,
        "sapo_swarm",
        "the recipe is one of your own",
        WILD,
        LITTLE,
        of("ended_with_error", "worker_dies", "loops_fail"),
    ),
    odd(
        "learner.betas",
        lambda v, _: not 0 <= v[0] <= 0.98 or not 0.8 <= v[1] <= 0.9999,
        [0.9, 0.99],
        "the optimizer remembers far too long, or nothing",
        WILD,
        LITTLE,
    ),
    low("learner.max_grad_norm", 1e-3, 1.0, "gradients are clipped to next to nothing", LITTLE),
    high("learner.max_grad_norm", 100, 1.0, "no gradient is clipped", WILD),
    high("learner.warmup_steps", 500, 20, "the learning rate stays near 0 for so many steps", LITTLE),
    hint(
        "learner.schedule",
        lambda v, _: v != "constant",
        "constant",
        "the learning rate falls to learner.final_rate_share at learner.num_steps",
        LITTLE,
    ),
    high("learner.updates_per_step", 8, 1, "so many updates of one draw go far from what made it", WILD),
    high("learner.weight_decay", 10, 0.01, "every step takes a part of every weight", WILD, ALIKE),
    low("learner.token_budget", 256, 4096, "a step is cut into many small passes", SLOW, of("loops_fail")),
    high("learner.token_budget", 65_536, 4096, "one pass takes much memory", of("out_of_memory", "worker_dies")),
    high("learner.num_processes", 8, 1, "each process holds a part of the model", of("out_of_memory", "worker_dies")),
    odd(
        "learner.checkpoint_every",
        lambda v, _: not 0 < v < 1000,
        10,
        "nothing is saved on the way",
        of("steps_made_again"),
    ),
    odd(
        "learner.recipe_without_logprobs",
        lambda v, _: not v,
        "sapo_swarm",
        "groups without log-probs are refused",
        UNUSED,
    ),
    odd("learner.recipe_text_only", lambda v, _: not v, "sapo_swarm", "groups of text alone are refused", UNUSED),
    high("model.lora_alpha", 512, 0, "adapters add far too much", WILD, ALIKE),
    odd("model.lora_alpha", lambda v, c: 0 < v < 0.1 * c.model.lora_rank, 0, "adapters add next to nothing", LITTLE),
    # --- the guard
    hint("guard.enabled", lambda v, _: not v, True, "nothing holds back what is far off-policy", WILD),
    high("guard.tight_ess", 0.9, 0.5, "usual groups count as off-policy", SET_ASIDE),
    low("guard.tight_kl", 0.02, 0.1, "usual groups count as off-policy", SET_ASIDE),
    low("guard.tight_m2", 0.05, 0.25, "usual groups count as off-policy", SET_ASIDE),
    low("guard.tight_nll", 0.5, 2.0, "usual groups of others count as unlikely", SET_ASIDE),
    high("guard.alarm_ess", 0.4, 0.05, "usual groups stop the learner", SET_ASIDE),
    low("guard.alarm_kl", 0.2, 1.0, "usual groups stop the learner", SET_ASIDE),
    low("guard.cap", 1.5, 4.0, "tokens with usual ratios are left out", SET_ASIDE),
    high("guard.freeze_steps", 50, 4, "the learner stays frozen", SET_ASIDE),
    # --- others
    low("exchange.max_neighbours", 1, 8, "no node is connected", LONELY, SLOW, of("no_peer_yet")),
    low(
        "exchange.max_group_bytes",
        100_000,
        4 * 2**20,
        "groups are too large to be sent or taken",
        UNUSED,
        of("cannot_be_scored"),
    ),
    low("exchange.store_bytes", 50 * 2**20, 2 * 2**30, "the store is soon full", of("disk_full")),
    low("exchange.groups_per_minute", 60, 6000, "few groups of a peer are taken", UNUSED, of("come_too_late")),
    odd(
        "exchange.max_upload_bytes_per_s",
        lambda v, _: 0 < v < 500_000,
        0,
        "others get groups and weights slowly",
        LONELY,
        of("not_published", "far_behind"),
    ),
    low("exchange.dial_timeout_s", 0.5, 5.0, "connections are given up before they stand", LONELY, SLOW),
    high("exchange.lookup_every_s", 60, 2.0, "the directory is hardly ever looked at", LONELY, SLOW),
    high("exchange.advert_every_s", 600, 30.0, "others learn of this node late", LONELY),
    hint("exchange.reach", lambda v, _: v == "outward", "auto", "others reach it through relays alone", LONELY),
    hint("exchange.advertise", lambda v, _: bool(v), None, "others dial this address", LONELY, of("no_relay")),
    odd(
        "directory.kind",
        lambda v, c: v == "none" and (c.replay.local_groups == 0 or len(c.roles) < 2),
        "dht",
        "the node runs alone, and needs others",
        LONELY,
        of("no_steps", "no_step_yet"),
    ),
    high("directory.shards", 1, 1, "adverts are looked for under other keys than those of a run with 1", LONELY),
    hint("follow.policy", lambda v, _: bool(v), None, "this trainer alone is followed", LONELY),
    high("coordinator.heartbeat_s", 60, 5.0, "the coordinator counts the node as gone", of("coordinator_away"), LONELY),
    high("entry.work_bits", 22, 17, "proof of work takes hours", LONELY, UNUSED, of("never_ran")),
    hint(
        "entry.kind",
        lambda v, _: v in ("members", "invited", "work"),
        None,
        "only some are let into the run, by this node and by others",
        LONELY,
        UNUSED,
    ),
    hint("entry.denied", lambda v, _: bool(v), [], "these are refused, and whom they invited", LONELY, UNUSED),
    odd("entry.established", lambda v, _: v == "members", "everybody", "all others are newcomers", of("newcomers")),
    # --- weights
    low("weights.store_bytes", 200 * 2**20, 8 * 2**30, "a version of the weights finds no room", OF_WEIGHTS),
    high("weights.anchor_every", 200, 10, "who begins to follow has a long chain to fetch", OF_WEIGHTS),
    # --- the process
    low("sandbox.timeout_s", 0.5, 5.0, "scoring is ended before it is done", SCORING),
    low("sandbox.cpu_s", 1.0, 20.0, "the scoring process is replaced all the time", SCORING, SLOW),
    low("sandbox.memory_bytes", 128 * 2**20, 2**30, "the scoring process has too little memory", SCORING),
    low("sandbox.replay_s_per_minute", 1.0, 15.0, "hardly any group of others is scored again", UNUSED),
    odd(
        "disk.max_bytes", lambda v, _: v > 0, 0, "stores are lowered to what is left of it", of("disk_full"), OF_WEIGHTS
    ),
    odd("disk.checkpoint_at_end", lambda v, _: not v, True, "a stop saves nothing", of("steps_made_again")),
    odd(
        "disk.checkpoint_bytes_per_s",
        lambda v, _: 0 < v < 100_000,
        2_000_000,
        "checkpoints are rare",
        of("steps_made_again"),
    ),
    low("evaluation.num_problems", 8, 64, "success on so few problems is mostly luck", of("held_out_falls")),
    high("num_threads", 32, 1, "more threads than cores stand in each other's way", SLOW),
    high("niceness", 10, 0, "other programs of the machine come first", SLOW),
    high("faults.slow_factor", 1, 1, "a fault of simulations: generation and steps are made slower", SLOW),
    high("faults.latency_ms", 0, 0, "a fault of simulations: groups of others are looked at late", SLOW, UNUSED),
)


def far_settings(snapshot: Snapshot) -> list[Suspect]:
    """Suspects of this node's configuration."""
    config = snapshot.config
    if config is None:
        return []
    found = [_suspect(far, value, snapshot) for far in FAR if far.is_far(value := _value(config, far.key), config)]
    found += [_prompt(each, snapshot) for each in config.environments if _shapes_prompt(each)]
    return [*found, *(_params(each, snapshot) for each in config.environments if set(each.params) - OF_FILES)]


def _value(config: NodeConfig, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def _suspect(far: Far, value: object, snapshot: Snapshot) -> Suspect:
    name = far.key.rpartition(".")[2]
    words = {"low": "too low", "high": "too high", "set": "set so"}[far.how]
    finding = Diagnosed(
        name=f"{name}_{words.replace(' ', '_')}",
        claim=f"{far.key} = {as_toml(value)} is {words}: {far.does}",
        evidence=(f"{far.key} (node.toml)" + ("" if far.usual is None else f"; usual is {as_toml(far.usual)}"),),
        fix=f"change {far.key} in {snapshot.directory / 'node.toml'}; then {snapshot.start}"
        if far.usual is None
        else snapshot.set_key(far.key, far.usual),
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
    return Suspect(finding=finding, explains=frozenset({"all_wrong", "empty_answers"}))
