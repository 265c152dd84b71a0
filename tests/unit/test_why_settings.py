"""Which key is named first where a setting is bad, by what a node with it shows; and that a healthy one is not blamed.

A table of symptoms, each a snapshot, and of keys that lead to one. Right is what the examiners of `benchmarks.ailments`
call right: the first finding is of the key, or names it in its fix.
"""

from collections.abc import Mapping
from typing import Any, Final

import pytest

from swarm.causes import Diagnosed, Gravity, Snapshot, diagnose, is_healthy
from swarm.causes.setting_effects import Far
from swarm.causes.settings_table import FAR
from swarm.config import NodeConfig
from swarm.events import (
    Event,
    GroupPut,
    GroupUnscored,
    NodeStarted,
    StepMade,
    VersionUnpublished,
    WorkerDied,
)

START = NodeStarted(at_s=700.0, node_id="a")
STATUS: Final[dict[str, Any]] = {
    "at_s": 1000.0,
    "last_step_at_s": 1000.0,
    "started_at_s": 700.0,
    "pid": 7,
    "step": 3,
    "num_failures": 0,
}
PEERS: Final[dict[str, Any]] = {"peers": ["bb" * 32], "standing": {"bb" * 32: "member"}}
KNOWN: Final[dict[str, Any]] = {"directory": {"bootstrap": ["/ip4/127.0.0.1/tcp/5/p2p/x"]}}


def own(num_put: int, num_with_signal: int) -> dict[str, Any]:
    counts = {"num_put": num_put, "num_with_signal": num_with_signal, "num_unscored": 0, "error": ""}
    return {"own_since_step": counts}


def step(number: int, waited_s: float = 0.1, **diagnostics: float) -> StepMade:
    return StepMade(
        at_s=700.0 + number,
        step=number,
        draw_step=number,
        digest=str(number),
        loss=0.0,
        grad_norm=1.0,
        num_tokens=5,
        diagnostics=diagnostics,
        seconds={"draw_wait": waited_s},
    )


def put(number: int, reward: float) -> GroupPut:
    return GroupPut(
        at_s=701.0 + number,
        digest=str(number),
        producer="a",
        policy_id="a",
        oldest_step=0,
        env="own",
        reward_mean=reward,
        num_tokens=8,
        size_bytes=1,
    )


def learning(first: float = 0.2, rise: float = 0.01, count: int = 30, moved: float = 0.03) -> list[Event]:
    """Steps that learn."""
    return [
        step(n, reward_mean=first + rise * n, log_ratio_std=moved, age_mean_steps=1.0, entropy_nats=1.0)
        for n in range(1, count + 1)
    ]


SYMPTOMS: Final[dict[str, tuple[Mapping[str, Any], list[Event]]]] = {
    "still": ({}, learning(rise=0.0, moved=1e-6)),
    "worse": ({}, [step(n, reward_mean=0.8 if n < 30 else 0.05 + 0.01 * (n % 2)) for n in range(1, 61)]),
    "no reward": (own(120, 0), [put(n, 0.0) for n in range(120)]),
    "slow": ({"last_step_at_s": 700.0, **own(20, 1)}, [put(n, 0.5) for n in range(20)]),
    "waits": ({}, [step(n, waited_s=0.9, reward_mean=0.2 + 0.01 * n) for n in range(1, 31)]),
    "alone": ({}, []),
    "nothing of others": (PEERS, learning()),
    "late": ({**PEERS, "refusals": {"too_old": 50}, "num_admitted": 5}, []),
    "set aside": ({"last_step_at_s": 600.0, "guard": {"guard_idle_draws": 9.0, "ess_share": 0.6}}, []),
    "not scored": ({}, [GroupUnscored(at_s=800.0 + n, env="own", error="over timeout_s") for n in range(8)]),
    "not published": ({}, [VersionUnpublished(at_s=900.0, step=3, error="no room")]),
    "killed": ({}, [WorkerDied(at_s=900.0 + n, exit_code=-9) for n in range(2)]),
}
BAD: Final[tuple[tuple[str, str, Any], ...]] = (
    ("still", "learner.max_grad_norm", 1e-9),
    ("still", "learner.warmup_steps", 20_000),
    ("still", "learner.recipe_params", {"a": 1.0}),
    ("still", "learner.betas", [0.9, 0.99999]),
    ("still", "learner.learning_rate", 3e-6),
    ("still", "replay.keep_zero_variance", True),
    ("worse", "learner.learning_rate", 5e-5),
    ("worse", "learner.updates_per_step", 16),
    ("worse", "learner.max_grad_norm", 1e6),
    ("worse", "generator.temperature", 1.7),
    ("worse", "replay.max_reuse", 6),
    ("worse", "replay.max_age_steps", 100),
    ("worse", "guard.enabled", False),
    ("worse", "guard.min_tokens", 10**6),
    ("no reward", "generator.temperature", 0.05),
    ("no reward", "generator.group_size", 2),
    ("no reward", "model.template_arguments", {"enable_thinking": True}),
    ("no reward", "learner.weight_decay", 90.0),
    ("slow", "replay.local_groups", 200),
    ("slow", "engine.max_rows", 1),
    ("slow", "learner.token_budget", 64),
    ("slow", "niceness", 19),
    ("slow", "num_threads", 64),
    ("slow", "device", "cpu"),
    ("slow", "learner.share_prompt", False),
    ("slow", "generator.groups_per_batch", 300),
    ("slow", "faults.slow_factor", 30.0),
    ("waits", "engine.max_rows", 1),
    ("waits", "generator.group_size", 128),
    ("waits", "sandbox.cpu_s", 0.1),
    ("alone", "exchange.max_neighbours", 0),
    ("alone", "exchange.lookup_every_s", 3600.0),
    ("alone", "exchange.dial_timeout_s", 0.01),
    ("alone", "directory.shards", 64),
    ("alone", "entry.kind", "work"),
    ("alone", "exchange.reach", "dialable"),
    ("nothing of others", "replay.max_age_s", 5.0),
    ("nothing of others", "replay.max_age_steps", 0),
    ("nothing of others", "replay.max_groups", 5),
    ("nothing of others", "exchange.groups_per_minute", 1),
    ("nothing of others", "learner.recipe_without_logprobs", ""),
    ("nothing of others", "sandbox.replay_s_per_minute", 0.01),
    ("late", "faults.latency_ms", 90_000.0),
    ("late", "replay.max_age_s", 1.0),
    ("set aside", "guard.tight_kl", 0.011),
    ("set aside", "guard.cap", 1.01),
    ("not scored", "sandbox.timeout_s", 0.01),
    ("not scored", "sandbox.memory_bytes", 2**20),
    ("not published", "weights.store_bytes", 10_000_000),
    ("not published", "disk.max_bytes", 10**8),
    ("killed", "learner.token_budget", 10**6),
    ("killed", "engine.max_rows", 5000),
    ("killed", "model.lora_rank", 2048),
)


def said(symptom: str, config: Mapping[str, Any], **changes: Any) -> list[Diagnosed]:
    """What is found of a node with a symptom and these sections, notes left out."""
    status, events = SYMPTOMS[symptom]
    usual = {"environments": [{"name": "own", "kind": "char", "dataset": "sort"}]}
    data = {**usual, **(KNOWN if symptom == "alone" else {}), **config}
    snapshot = Snapshot(
        now_s=1000.0,
        status={**STATUS, **status},
        events=(START, *events),
        config=NodeConfig.model_validate(data),
        **changes,
    )
    return [each for each in diagnose(snapshot) if each.gravity is not Gravity.NOTE]


def set_key(key: str, value: Any, symptom: str) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    own_part = {name: value}
    if key == "guard.tight_kl":
        own_part["loose_kl"] = 0.01
    if symptom == "alone" and section == "directory":
        own_part |= KNOWN["directory"]
    return {section: own_part} if section else own_part


@pytest.mark.parametrize(("symptom", "key", "value"), BAD, ids=lambda each: str(each).replace(" ", "_"))
def test_a_bad_value_is_named_first(symptom: str, key: str, value: Any) -> None:
    (first, *_) = said(symptom, set_key(key, value, symptom))
    assert key in (first.key, *first.fix.split()), (first.name, first.fix)


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_without_a_bad_value_no_key_is_blamed(symptom: str) -> None:
    found = said(symptom, {})
    assert bool(found) is (symptom != "waits")  # which is a note
    assert not [each.name for each in found if each.name.endswith(("_too_low", "_too_high", "_set_so"))]
    assert "not the default" not in "".join(each.fix for each in found)


@pytest.mark.parametrize(("key", "value"), [(key, value) for _, key, value in BAD], ids=lambda each: str(each)[:40])
def test_a_node_that_learns_is_blamed_for_no_value(key: str, value: Any) -> None:
    """Its steps come, its rewards rise and others' groups are used."""
    status = {**STATUS, **PEERS, **own(4, 3), "num_external_used": 20, "num_admitted": 30}
    config = NodeConfig.model_validate(KNOWN | set_key(key, value, "alone"))
    snapshot = Snapshot(now_s=1000.0, status=status, events=(START, *learning(), put(29, 0.5)), config=config)
    # a decay that takes a thousandth at each step is one whatever rewards do, and so is a rate ten times too high
    allowed = {"weights_decay"} if key == "learner.weight_decay" else set[str]()
    assert {each.name for each in diagnose(snapshot) if each.gravity is not Gravity.NOTE} <= allowed


def test_what_is_not_the_default_is_named_where_nothing_is_far_and_the_farthest_first() -> None:
    (first, *_) = said("slow", {"replay": {"local_groups": 40}, "engine": {"max_rows": 32}})
    assert first.name == "step_needs_many"
    assert first.fix.endswith("replay.local_groups = 40 (default 4), engine.max_rows = 32 (default 64)")


def test_of_two_bad_values_the_one_that_could_explain_less_else_comes_first() -> None:
    both = {"replay": {"max_age_s": 1.0}, "faults": {"latency_ms": 90_000.0}}
    assert [each.key for each in said("late", both)[:2]] == ["faults.latency_ms", "replay.max_age_s"]


def test_a_value_that_mostly_does_no_harm_is_not_blamed_for_what_is_seen_of_healthy_nodes_too() -> None:
    """A reward that stays where it was is a note: a hard task looks the same."""
    flat = [step(n, reward_mean=0.2) for n in range(1, 61)]
    config = NodeConfig.model_validate({"learner": {"learning_rate": 4e-6}, "directory": {"kind": "none"}})
    found = diagnose(Snapshot(now_s=1000.0, status=STATUS, events=(START, *flat, put(59, 0.5)), config=config))
    assert [each.name for each in found] == ["learning_rate_set_so", "learns_nothing"] and is_healthy(found)


@pytest.mark.parametrize("name", ["settings_differ", "environments_differ", "clock_is_wrong", "liar", "tokens_differ"])
def test_no_value_of_this_node_explains_what_another_one_does(name: str) -> None:
    blamed: list[Far] = [far for far in FAR if name in far.explains and far.certainty > 1]
    assert {far.key for far in blamed} <= {
        "exchange.max_group_bytes",
        "learner.recipe_without_logprobs",
        "learner.recipe_text_only",
    }


@pytest.mark.parametrize("is_joined", [True, False], ids=["written by swarm join", "chosen by the owner"])
def test_what_swarm_join_wrote_is_not_blamed(is_joined: bool) -> None:
    sections = {
        "worker": "inline",
        "model": {"source": "tiny"},
        "exchange": {"anchors": [f"{'cc' * 32}@example.org:7700"], "advertise": "192.168.1.5:0"},
        "coordinator": {"address": "example.org:443", "fingerprint": "dd" * 32 if is_joined else ""},
    }
    away = {"dials": {"failed": 5, "answered": 0}, "newest_dial_error": "example.org:7700: nobody answered"}
    config = NodeConfig.model_validate(sections)
    found = diagnose(Snapshot(now_s=1000.0, status={**STATUS, **away}, events=(START,), config=config))
    assert found[0].name == "cannot_dial", found
    keys = ("exchange.anchors", "exchange.advertise =", "worker =")
    blamed = [key for key in keys if any(key in f"{each.claim} {each.fix}" for each in found)]
    assert blamed == ([] if is_joined else list(keys)), found
