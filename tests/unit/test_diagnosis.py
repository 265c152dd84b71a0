"""Rules of `swarm why` on made snapshots: each known ailment comes first, and its healthy neighbour is not blamed."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from node.status import problems
from node.worker import errors_in_words
from swarm.cli import main as cli
from swarm.config import NodeConfig
from swarm.config.section import Usual
from swarm.diagnosis import (
    RULES,
    STATUS_RULES,
    Diagnosed,
    Gravity,
    Snapshot,
    diagnose,
    health_words,
    is_healthy,
    read_snapshot,
)
from swarm.diagnosis.process_rules import COVERED
from swarm.diagnosis.settings_rules import SHORTFALLS, far_values
from swarm.diagnosis.snapshot import AnsweredGroup, as_toml
from swarm.environments.record_facts import RecordFacts
from swarm.errors import ConfigError
from swarm.events import (
    NODE,
    ApplyFailed,
    DiskFull,
    Event,
    GroupAdmitted,
    GroupPut,
    GroupRefused,
    GroupsDrawn,
    GroupStored,
    GroupUnscored,
    GroupUse,
    LoopFailed,
    NodeRestored,
    NodeStarted,
    OwnerEquivocated,
    PolicyEvaluated,
    StepMade,
    VersionApplied,
    VersionUnpublished,
    WorkerDied,
)
from swarm.process import lock_directory
from swarm.telemetry import EventLog, LoggedWarning
from swarm.telemetry.warning_log import DOUBT, NOTHING_TO_LEARN, SLOW_DTYPE, STATUS_WITHOUT_ROOM, UPSIDE_DOWN
from swarm.trained.learning_evidence import learning_evidence
from swarm.wire.run_manifest import write_toml

ROOT = Path(__file__).parents[2]
PEER, TRAINER = "bb" * 32, "cc" * 32
START = NodeStarted(at_s=700.0, node_id="a")
STATUS: Final[dict[str, Any]] = {
    "at_s": 1000.0, "last_step_at_s": 1000.0, "started_at_s": 700.0, "pid": 7, "num_put": 40, "step": 3,
}  # fmt: skip
OWN: Final = {"name": "own", "kind": "function", "dataset": "my.py:score", "params": {"path": "q.jsonl"}}
JSONL: Final = {"name": "own", "kind": "jsonl", "dataset": "q.jsonl"}
ALONE: Final = {"environments": [OWN], "directory": {"kind": "none"}, "model": {"source": "tiny"}}
SWARM: Final = {"directory": {"kind": "dht", "bootstrap": ["/ip4/127.0.0.1/tcp/5/p2p/x"]}}
FOLLOWS: Final = {"roles": ["generator"], "directory": {"kind": "dht"}}


# --- builders ---------------------------------------------------------------------------------------------


def put(number: int, reward: float, at_s: float | None = None, **changes: Any) -> GroupPut:
    figures: dict[str, Any] = {"producer": "a", "policy_id": "a", "oldest_step": 0, "env": "own", **changes}
    at_s = 701.0 + number if at_s is None else at_s
    return GroupPut(at_s=at_s, digest=str(number), reward_mean=reward, num_tokens=8, size_bytes=1, **figures)


def step(number: int, reward: float = 0.2, at_s: float | None = None, **changes: Any) -> StepMade:
    diagnostics = {"reward_mean": reward, "log_ratio_std": changes.pop("moved", 0.03), "age_mean_steps": 1.0}
    figures: dict[str, Any] = {"digest": str(number), "loss": 0.0, "grad_norm": 1.0, "num_tokens": 5, **changes}
    at_s = 970.0 + number if at_s is None else at_s
    return StepMade(at_s=at_s, step=number, draw_step=number, diagnostics=diagnostics, **figures)


def steps(rise: float = 0.02, count: int = 30, **changes: Any) -> list[Event]:
    """A course of rewards that rises by so much at each step."""
    return [step(n, 0.2 + rise * n + 0.01 * (n % 3), **changes) for n in range(1, count + 1)]


def group(number: int = 0, **changes: Any) -> AnsweredGroup:
    figures: dict[str, Any] = {
        "rewards": (0.0, 1.0), "is_cut": (False, False), "num_tokens": (3, 4), "task_id": number, "prompt": number,
        "texts": (2 * number, 2 * number + 1), **changes,
    }  # fmt: skip
    return AnsweredGroup(env="own", **figures)


def groups(rewards: Sequence[float] = (0.0, 1.0), count: int = 32, **changes: Any) -> tuple[AnsweredGroup, ...]:
    return tuple(group(number, rewards=tuple(rewards), **changes) for number in range(count))


def own(num_put: int = 120, num_with_signal: int = 0, num_unscored: int = 0, error: str = "") -> dict[str, Any]:
    counts = {"num_put": num_put, "num_with_signal": num_with_signal, "num_unscored": num_unscored, "error": error}
    return {"own_since_step": counts}


def vain(reward: float = 0.0) -> dict[str, Any]:
    """Own groups of equal rewards, and no step."""
    return {"status": own(), "events": [put(number, reward) for number in range(120)]}


def records(**facts: Any) -> dict[str, RecordFacts]:
    counts: dict[str, Any] = {"num_records": 100, "num_questions": 100, **facts}
    return {"own": RecordFacts(**counts)}


def warned(message: str, fields: str = "", level: str = "WARNING", **changes: Any) -> LoggedWarning:
    figures: dict[str, Any] = {"at_s": 950.0, "logger": "swarm.x", **changes}
    return LoggedWarning(level=level, message=message, fields=fields, **figures)


def followed(**changes: Any) -> dict[str, Any]:
    following = {
        "policy": TRAINER, "candidates": [], "trainers_without_weights": [], "is_trainer_connected": True,
        "served_step": 5, "head_step": 5, "last_error": "", "credit": 1, "state": "ready", "num_applied": 3, **changes,
    }  # fmt: skip
    return {"following": following, "peers": [TRAINER]}


def refused(reason: str, count: int = 20, **status: Any) -> dict[str, Any]:
    return {"config": SWARM, "status": {"peers": [PEER], "num_admitted": 0, "refusals": {reason: count}, **status}}


def admitted(at_s: float, env: str = "own") -> GroupAdmitted:
    return GroupAdmitted(
        at_s=at_s, digest="a", producer=PEER, policy_id=PEER, env=env, oldest_step=0, size_bytes=1, reward_mean=0.5,
        via=PEER, age_s=0.1,
    )  # fmt: skip


def evaluated(at_s: float, number: int, accuracy: float) -> PolicyEvaluated:
    return PolicyEvaluated(
        at_s=at_s, step=number, env="own", split="held_out", accuracy=accuracy, num_problems=64, majority_baseline=0.1
    )


def drawn(number: int, **changes: Any) -> GroupsDrawn:
    of = GroupUse(digest="a", producer="a", policy_id="a", age_steps=1, is_own_policy=True)
    return GroupsDrawn(at_s=970.0 + number, draw_step=number, groups=(of,), max_age_steps=4, max_reuse=64, **changes)


def stored(number: int, at_s: float) -> GroupStored:
    return put(number, 0.5, at_s=at_s)


def snapshot(config: dict[str, Any] | None = None, **changes: Any) -> Snapshot:
    """A node that is well, with these changes; it began to serve at 700 s, and it is 1,000 s now."""
    status = {**STATUS, **changes.pop("status", {})}
    events = (START, *changes.pop("events", ()))
    sections = NodeConfig.model_validate({**ALONE, **(config or {})})
    return Snapshot(now_s=changes.pop("now_s", 1000.0), status=status, events=events, config=sections, **changes)


def said(config: dict[str, Any] | None = None, **changes: Any) -> list[Diagnosed]:
    """Findings, without notes."""
    return [each for each in diagnose(snapshot(config, **changes)) if each.gravity is not Gravity.NOTE]


# --- each known ailment ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A snapshot, the finding or the key of node.toml that comes first, and a change after which nothing is wrong."""

    expected: str
    ill: dict[str, Any]
    well: dict[str, Any] | None = field(default_factory=dict[str, Any])  # None: not tried


def case(expected: str, ill: dict[str, Any], well: dict[str, Any] | None = None, is_tried: bool = True) -> Any:
    return pytest.param(Case(expected=expected, ill=ill, well=(well or {}) if is_tried else None), id=expected)


LEARNER: Final[Callable[..., dict[str, Any]]] = lambda **keys: {"learner": {"learning_rate": 1e-4, **keys}}  # noqa: E731


def kinds(name: str, flags: tuple[bool, bool] = (True, False)) -> dict[str, Any]:
    """Answers compared with the right one: of this kind or not, and of no other."""
    names = ("is_right", "is_nearly_right", "is_of_neighbour", "is_end_of_right")
    return dict.fromkeys(names, (False, False)) | {name: flags}


NEARLY, RIGHT, ENDS, SHIFTED = map(kinds, ("is_nearly_right", "is_right", "is_end_of_right", "is_of_neighbour"))
WRONG: Final = kinds("is_right", (False, False))
RISING: Final = steps(0.02)
FALLING: Final[list[Event]] = [step(n, 0.8 if n < 15 else 0.05 + 0.01 * (n % 2)) for n in range(1, 31)]
STILL: Final = steps(0.0, moved=1e-6)
DIED: Final = [WorkerDied(at_s=900.0 + n, exit_code=-9) for n in range(2)]
HELD_OUT: Final = [evaluated(971.0, 1, 0.2), evaluated(980.0, 10, 0.8), evaluated(999.0, 29, 0.1)]
WORSE: Final = [*(put(n, 0.0) for n in range(120)), evaluated(700.0, 0, 0.4), evaluated(999.0, 3, 0.0)]
LATER: Final = {"now_s": 1060.0, "status": {"at_s": 1060.0, "last_step_at_s": 990.0}}
CASES: Final = (
    # the process
    case("process_stopped", {"stopped_pids": (9,)}),
    case("hangs", {"status": {"at_s": 900.0}}, {"status": {"at_s": 990.0}}),
    case("disk_full", {"events": [DiskFull(at_s=990.0, error="no space left on device")]}),
    case("exchange.store_bytes", {"events": [DiskFull(at_s=990.0, error="over budget")]}),
    case(
        "disk_full",
        {"status": {"at_s": 900.0}, "warnings": (warned(STATUS_WITHOUT_ROOM, level="ERROR"),)},
    ),
    case("out_of_memory", {"events": DIED}, {"events": [*DIED, *RISING]}),
    case("learner.token_budget", {"config": LEARNER(token_budget=10**6), "events": DIED}),
    case("worker_dies", {"events": [WorkerDied(at_s=900.0, exit_code=-11)]}),
    case("ended_with_error", {"events": [LoopFailed(at_s=999.0, loop=NODE, error="ValueError: shape")], "runs": False}),
    case("does_not_run", {"runs": False}, {"runs": False, "status": {"was_stopped": True}}),
    case("loops_fail", {"status": {"num_failures": 2}}),
    case("own_recipe_harms", {"config": LEARNER(recipe="my.py:MINE"), "events": WORSE}),
    case(
        "file_too_large",
        {"events": [DiskFull(at_s=990.0, error="groups.sqlite: disk I/O error")]}
        | {"warnings": (warned("the best version was not kept", "I/O error: File too large (os error 27)", "ERROR"),)},
    ),
    case("logged_errors", {"warnings": (warned("no key", level="ERROR"),)}, {"warnings": (warned("peer away"),)}),
    case(
        "too_many_files",
        {"status": {"at_s": 900.0}, "events": [step(9, at_s=998.0)]}
        | {"warnings": (warned("status was not written", "OSError: [Errno 24] Too many open files", "ERROR"),)},
    ),
    case("learner.learning_rate", {"changed_keys": ("learner.learning_rate",)}),
    # scoring, records and rewards
    case(
        "cannot_be_scored",
        {"events": [GroupUnscored(at_s=990.0, env="own", error="the verifier raised KeyError") for _ in range(8)]},
        {"events": [GroupUnscored(at_s=990.0, env="own", error="x"), *(put(n, 0.5) for n in range(60))]},
    ),
    case("scoring_is_slow", {"status": {"scoring_s": 200.0}}, {"status": {"scoring_s": 20.0}}),
    case(
        "reward_is_upside_down",
        {"warnings": (warned(UPSIDE_DOWN, "worth 0"),)},
        {"warnings": (warned(UPSIDE_DOWN, at_s=100.0),)},
    ),
    case(
        "reference_worth_nothing",
        {**vain(), "warnings": (warned(DOUBT, "worth 0"),)},
        {"warnings": (warned(DOUBT, "worth 0"),)},
    ),
    case(
        "records_contradict",
        {"records": records(num_contradicting=40, first_contradiction=(0, 1))},
        {"records": records(num_contradicting=2)},
    ),
    case(
        "malformed_actions",
        {**vain(), "answers": groups((0.0, 0.0), is_malformed=(True, True, False))},
        {"answers": groups(is_malformed=(True, True, False))},
    ),
    case("records_broken", {"records": records(num_broken=1)}),
    case("answers_no_text", {"records": records(num_null=10)}, {"records": records(num_null=2, num_no_text=90)}),
    case("file_missing", {"missing_files": ("q.jsonl",)}),
    case(
        "records_repeat",
        {"records": records(num_records=320, num_questions=8)},
        {"records": records(num_records=20, num_questions=8)},
    ),
    case("one_right_answer", {"records": records(commonest=95)}, {"records": records(commonest=60)}),
    case(
        "answers_are_shifted",
        {"answers": groups((0.0, 0.3), **SHIFTED)},
        {"answers": groups((0.0, 0.3), **WRONG)},
    ),
    case("right_answers_unpaid", {"answers": groups((0.0, 0.8), **RIGHT)}, {"answers": groups((1.0, 0.2), **RIGHT)}),
    case(
        "right_but_for_the_form",
        {**vain(), "answers": groups((0.0, 0.0), **NEARLY)},
        {"answers": groups((0.0, 0.0), **NEARLY)},
    ),
    case(
        "right_answers_hold_more",
        {**vain(), "answers": groups((0.0, 0.0), **ENDS)},
        {"answers": groups((1.0, 0.0), **ENDS)},
    ),
    case(
        "reward_is_random",
        {"answers": tuple(group(n, rewards=(each, 0.1)) for n in range(8) for each in (0.8, 0.4))},
        {"answers": tuple(group(n, rewards=(0.8, 0.1)) for n in range(8) for _ in range(2))},
    ),
    case(
        "reward_is_of_length",
        {"answers": tuple(group(n, rewards=(0.2, 0.4, 0.6, 0.8), is_cut=(False,) * 4, num_tokens=(2, 4, 6, 8), texts=())
                          for n in range(8))},
        {"answers": tuple(group(n, rewards=(0.0, 1.0, 0.0, 1.0), is_cut=(False,) * 4, num_tokens=(2, 4, 6, 8), texts=())
                          for n in range(8))},
    ),
    case(
        "reward_ignores_question",
        {"answers": tuple(group(n, rewards=(1.0, 0.2), texts=(7, 100 + n)) for n in range(24))},
        {"answers": tuple(group(n, rewards=(float(n % 2), 0.2), texts=(7, 100 + n)) for n in range(24))},
    ),
    case("environments.reward_range", {"answers": groups((0.0, 0.01))}),
    case("one_question", {"answers": groups(prompt=1)}),
    case("one_answer", {"answers": groups((0.5, 0.5), texts=(1, 1))}),
    case("environments.reward_weights", {
        "status": own(), "events": [put(n, 1.0, reward_parts={"a": 0.1 * (n % 9)}) for n in range(120)],
    }),
    case("all_wrong", vain()),
    case("all_right", vain(1.0)),
    case("all_equal", vain(0.5)),
    case("cut_off", {**vain(), "answers": groups((0.0, 0.0), is_cut=(True, True))}),
    case("episodes_cut_off", {**vain(), "answers": groups((0.0, 0.0), has_room=(False, False))}),
    case("model_knows_nothing", {**vain(), "answers": groups((0.0, 0.0), nats=3.6)}),
    case("environment_in_vain", {
        "events": [put(n, 0.5 if n % 2 else 0.0, env="own" if n % 2 else "other") for n in range(60)]}),
    case(
        "generator.env_weights",
        {"config": {"environments": [OWN, {"name": "b", "kind": "char", "dataset": "sort"}]},
         "events": [put(n, 0.5) for n in range(60)]},
        {"config": {"environments": [OWN, {"name": "b", "kind": "char", "dataset": "sort"}]},
         "events": [*(put(n, 0.5) for n in range(60)), admitted(990.0, env="b")]},
    ),
    # steps
    case("learning_rate_too_high", {"config": LEARNER(learning_rate=0.03), "events": FALLING}),
    case("learning_rate_too_high", {"config": LEARNER(learning_rate=0.03), "events": FALLING[:14], "status": own(40)}),
    case(
        "learning_rate_too_low",
        {"config": LEARNER(learning_rate=1e-9), "events": STILL},
        {"config": LEARNER(), "events": RISING},
    ),
    case("steps_change_nothing", {"config": LEARNER(), "events": STILL}),
    case("learner.max_grad_norm", {"config": LEARNER(max_grad_norm=1e-12), "events": STILL}),
    case(
        "learner.warmup_steps",
        {"config": LEARNER(warmup_steps=20_000), "events": steps(0.0, moved=0.002)},
        {"config": LEARNER(warmup_steps=20_000), "events": RISING},
    ),
    case("learner.recipe_params", {"config": LEARNER(recipe_params={"kl_penalty": 9.0}), "events": STILL}),
    case("model.lora_alpha", {
        "config": LEARNER() | {"model": {"source": "tiny", "lora_rank": 4, "lora_alpha": 1e-4}},
        "events": steps(0.0, moved=0.001),
    }),
    case(
        "generator.temperature",
        {"config": {"generator": {"temperature": 5.0}}, "answers": groups(nats=3.6)},
        {"config": {"generator": {"temperature": 5.0}}, "answers": groups(nats=1.4)},
    ),
    case("generator.temperature", {**vain(), "config": {"generator": {"temperature": 0.01}}}),
    case("weights_decay", {"config": LEARNER(weight_decay=90.0), "events": RISING}),
    case("not_a_number", {"events": [step(n, grad_norm=math.nan, was_skipped=True) for n in range(1, 6)]},
         {"events": [step(n, grad_norm=0.0, was_skipped=True) for n in range(1, 6)]}),
    case("gets_worse", {"config": LEARNER(), "events": FALLING}),
    case("overfits", {"config": LEARNER(), "events": [*RISING, *HELD_OUT]}),
    case("held_out_falls", {"config": LEARNER(), "events": HELD_OUT}),
    case(
        "few_questions",
        {"answers": tuple(group(n, prompt=n % 4) for n in range(16)),
         "events": [*steps(0.025), evaluated(971.0, 1, 0.2), evaluated(999.0, 29, 0.2)]},
        {"answers": tuple(group(n, prompt=n % 4) for n in range(16)),
         "events": [*steps(0.025), evaluated(971.0, 1, 0.2), evaluated(999.0, 29, 0.8)]},
    ),
    case("slow_compute_dtype", {"warnings": (warned(SLOW_DTYPE, "dtype=bfloat16"),)}),
    # groups that wait
    case("replay.max_age_s", {"config": {"replay": {"max_age_s": 0.01}},
                              "status": {**own(40, 24), "last_step_at_s": 900.0}}),
    case("replay.max_age_s", {"config": {"replay": {"max_age_s": 20.0}}, "events": [
        *(stored(n, 900.0) for n in range(9)), drawn(1, too_old=tuple(map(str, range(9))))]}),
    case("replay.max_groups", {"config": {"replay": {"max_groups": 3}}}),
    case("replay.max_bytes", {"status": own(40, 20)}, {"status": {**own(40, 20), "replay_groups": 4}}),
    case("all_set_aside", {"status": {"last_step_at_s": 600.0, "guard": {"guard_idle_draws": 9.0}}}),
    case("replay.local_groups", {"config": {"replay": {"local_groups": 4000}}, "events": [put(1, 0.5)],
                                 "status": {**own(40, 24), "last_step_at_s": 900.0}}),
    case("replay.barrier", {"config": {"replay": {"barrier": True}},
                            "events": steps(0.02, seconds={"draw_wait": 0.95})}),
    case("step_needs_many", {"status": {**own(20, 1), "last_step_at_s": 700.0}, "events": [put(1, 0.5)]}),
    case("evaluations_take_time", {
        "events": [step(n, at_s=900.0 + n) for n in (1, 2, 3)] + [evaluated(990.0, 3, 0.5)]}),
    case("halted", {"events": steps(0.02, count=20), **LATER},
         {"events": [step(1, at_s=750.0), *steps(0.02, count=20)], **LATER}),
    case("no_steps", {"status": {"last_step_at_s": 600.0}}),
    # other nodes
    case("clock_is_wrong", {"status": {"clock": "the clock is 3600 s ahead"}}),
    case("coordinator_refuses", {"status": {"coordinator_refusal": "run demo denies node aa"}}),
    case("coordinator_away", {"config": SWARM | {"replay": {"external_groups": 0}},
                              "status": {"is_coordinator_reachable": False}}),
    case("differs_from_run", {"status": {"differs_from_run": [["generator.max_new_tokens", 12, 8]]}}),
    case("directory.kind", {"config": {"directory": {"kind": "none", "bootstrap": ["/ip4/1.2.3.4/tcp/5/p2p/x"]}}}),
    case("no_relay", {"config": SWARM, "status": {"peers": [PEER], "reach": {"kind": "outward", "relays": []}}}),
    case("exchange.listen", {
        "config": {"directory": {"kind": "dht", "bootstrap": ["/ip4/8.8.8.8/tcp/5/p2p/x"]}},
        "status": {"peers": [PEER], "endpoints": ["127.0.0.1:7700"]},
    }),
    case("cannot_dial", {"config": SWARM, "status": {"dials": {"failed": 5, "answered": 0}}}),
    case("entry.kind", {"config": SWARM, "status": {"num_entry_refused": 9}}),
    case("exchange.max_neighbours", {"config": SWARM | {"exchange": {"max_neighbours": 0}}}),
    case("alone", {"config": SWARM}, {"config": {"directory": {"kind": "dht"}}}),
    case("alone", {"config": SWARM, "events": [admitted(800.0)], "status": {"num_admitted": 5}}),
    case("settings_differ", refused("bad_sampling"), refused("bad_sampling", 3)),
    case("environments_differ", refused("other_environment")),
    case("tokens_differ", refused("wrong_prompt")),
    case("others_refused", refused("verifier_failed")),
    case("liar", refused("false_reward"), refused("false_reward", 2)),
    case("replay.max_age_steps", refused("too_old", num_admitted=5), refused("too_old", 20, num_admitted=200)),
    case("faults.latency_ms", refused("too_old") | {"config": SWARM | {"faults": {"latency_ms": 1500.0}}}),
    case(
        "no_external",
        {"config": SWARM, "status": {"peers": [PEER]}, "events": RISING},
        {"config": SWARM, "status": {"peers": [PEER], "followers": {PEER: {"delivered": 9}}}, "events": RISING},
    ),
    case("entry.established", {"config": SWARM, "status": {"peers": [PEER], "standing": {PEER: "newcomer"}}},
         {"config": SWARM, "status": {"peers": [PEER], "standing": {PEER: "member"}}}),
    # weights between nodes
    case("no_trainer", {"config": FOLLOWS, "status": followed(policy="")}),
    case("no_trainer", {"config": FOLLOWS, "status": followed(candidates=[PEER, TRAINER])}),
    case("no_trainer", {"config": FOLLOWS, "status": followed(policy="", trainers_without_weights=[TRAINER])}),
    case("trainer_away", {"config": FOLLOWS, "status": followed(is_trainer_connected=False)},
         {"config": FOLLOWS, "status": followed()}),
    case("versions_refused", {"config": FOLLOWS, "status": followed(served_step=None), "events": [
        ApplyFailed(at_s=960.0, policy_id=TRAINER, step=3, digest="d", error="published tensor: got float32")]}),
    case("no_weights_yet", {"config": FOLLOWS, "status": followed(served_step=None)}),
    case("no_credit", {"config": FOLLOWS, "status": followed(credit=0) | {"last_step_at_s": 800.0}},
         {"config": FOLLOWS, "status": followed(credit=0) | {"last_step_at_s": 990.0}}),
    case("equivocated", {"config": FOLLOWS, "status": followed(), "events": [
        OwnerEquivocated(at_s=990.0, policy_id=TRAINER, step=3, first="a", second="b")]}),
    case("weights.store_bytes", {"events": [VersionUnpublished(at_s=900.0, step=3, error="no room")]}),
    case("nobody_follows", {"config": {"roles": ["trainer"], "weights": {"publish": True}}}),
)  # fmt: skip


@pytest.mark.parametrize("known", CASES)
def test_a_known_ailment_is_named_first_and_its_healthy_neighbour_is_not_blamed(known: Case) -> None:
    found = said(**known.ill)
    assert found and known.expected in (found[0].name, found[0].key), [each.claim for each in found]
    assert len(found) <= 3 and found[0].fix and found[0].docs
    if known.well is not None:
        assert said(**known.well) == []


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("RuntimeError: can't start new thread", "too_many_processes"),
        ("OSError: [Errno 98] Address already in use", "port_taken"),
        ("OSError: [Errno 5] Input/output error", "disk_fails"),
        ("OperationalError: database is locked", "database_locked"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'letters.jsonl'", "file_gone"),
        ("LookupError: environment own: q.jsonl: record 2 is not JSON", "file_damaged"),
        ("LocalEntryNotFoundError: outgoing traffic has been disabled", "model_not_found"),
        ("ConfigError: device: cuda, and torch sees no GPU", "device_fails"),
    ],
)
@pytest.mark.parametrize("runs", [False, True], ids=["ended", "about to end"])
def test_words_of_the_system_name_the_cause(error: str, name: str, runs: bool) -> None:
    (found, *_) = said(events=[LoopFailed(at_s=999.0, loop=NODE, error=error)], runs=runs)
    assert found.name == name and error in found.claim


def test_a_node_that_restarts_every_minute_is_told_from_one_that_restarts_now_and_then() -> None:
    for every_s, is_named in ((60.0, True), (600.0, False)):
        events: list[Event] = [NodeRestored(at_s=0.0)]
        for number in range(5):
            at_s = 990.0 - every_s * (4 - number)
            events += [NodeStarted(at_s=at_s, node_id="a"), step(1 + number, at_s=at_s + 5)]
        assert ("restarts_often" in [each.name for each in said(events=events)]) is is_named


@pytest.mark.parametrize("dies", [True, False])
def test_a_server_that_a_generator_lacks_is_not_taken_for_its_trainer(dies: bool) -> None:
    error = "Unavailable: GET http://127.0.0.1:1/v1/models: ConnectionRefusedError: [Errno 111] Connection refused"
    failed = warned("worker failed", error, "ERROR", logger="node.worker")
    deaths = [WorkerDied(at_s=900.0 + 30 * n, exit_code=1) for n in range(3)] if dies else []
    away = followed(is_trainer_connected=False, served_step=None)
    (found, *_) = said(FOLLOWS, status=away, events=deaths, warnings=(failed,) if dies else ())
    assert found.name == ("nobody_answers" if dies else "trainer_away")


def test_a_training_that_gave_up_lacked_signal_and_its_error_is_only_the_effect() -> None:
    error = f"ConfigError: 64 groups of 8 answers, and in none did rewards differ: {NOTHING_TO_LEARN} (highest ...)"
    ended = LoopFailed(at_s=999.0, loop=NODE, error=error)
    assert said(status=own(64), events=[*(put(n, 0.0) for n in range(64)), ended], runs=False)[0].name == "all_wrong"
    assert said(events=[ended], runs=False)[0].name == "gave_up_learning"


FLAT: Final = [*steps(0.0, count=60), evaluated(700.0, 0, 0.2)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"events": [*FLAT, evaluated(999.0, 60, 0.22)]}, "it did not learn"),
        ({"events": [*FLAT, evaluated(999.0, 60, 0.05)]}, "it got worse"),
        ({"events": FLAT}, "the reward in training did not rise"),
        ({"events": [*steps(0.01, count=60), *FLAT[60:], evaluated(999.0, 60, 0.22)]}, "the reward in training rose"),
        ({"events": [*FLAT, evaluated(999.0, 60, 0.6)]}, ""),
        ({"events": [*steps(0.01, count=60), evaluated(700.0, 0, 0.93), evaluated(999.0, 60, 1.0)]}, ""),
        ({"events": [*steps(0.0, count=12), *FLAT[60:], evaluated(999.0, 12, 0.2)], "runs": True}, ""),
        ({"events": [*FLAT, evaluated(999.0, 60, 0.22)], "config": FOLLOWS, "status": followed()}, ""),
    ],
    ids=["same", "worse", "unknown", "by heart", "learned", "known before", "too early", "generator"],
)
def test_what_did_not_learn_is_never_healthy(changes: dict[str, Any], expected: str) -> None:
    found = [each for each in said(**{"config": LEARNER(), **changes}) if each.name == "did_not_learn"]
    assert [each.claim.startswith(expected) for each in found] == [True] * bool(expected)
    if found:
        assert "1) " in found[0].fix and "swarm samples" in found[0].fix


def test_health_is_claimed_by_evidence_alone(tmp_path: Path) -> None:
    learned = [*steps(0.005, count=60), evaluated(700.0, 0, 0.2), evaluated(999.0, 60, 0.6)]
    for events, words, is_known in ((learned, "nothing is wrong", True), (learned[:-1], "no fault is known", None)):
        directory = make_directory(tmp_path / str(is_known), *events, is_finished=True)
        output = CliRunner().invoke(cli.app, ["why", str(directory)]).output
        assert output.splitlines()[0].startswith("learned: held out 0.20 -> 0.60" if is_known else "not known whether")
        assert words in output and ("nothing is wrong" in output) is bool(is_known)
        assert ask(directory)["is_healthy"] is is_known


def test_an_environment_that_is_not_shown_to_learn_is_named() -> None:
    events = [evaluated(700.0, 0, 0.2), evaluated(999.0, 60, 0.7)]
    both = learning_evidence([*events, *(replace(each, env="sums", accuracy=0.2) for each in events)])
    assert both.is_shown and health_words(both) == "no fault is known; not shown to learn: sums"


def test_effects_are_left_out_where_a_cause_is_found() -> None:
    late = {**own(), "last_step_at_s": 600.0}
    assert [each.name for each in said(status=late)] == ["all_wrong"]
    assert [each.name for each in said(status={"last_step_at_s": 600.0})] == ["no_steps"]


def test_groups_that_the_guard_dropped_for_their_age_are_no_sign_of_a_small_buffer() -> None:
    guarded = replace(step(30), diagnostics={"guard_level": 2.0, "guard_max_age_steps": 1.0})
    for newest, is_named in ((step(30), True), (guarded, False)):
        found = diagnose(snapshot(events=[*steps(count=29), newest], status=own(40, 20)))
        assert ("buffer_too_small" in [each.name for each in found]) is is_named


def test_a_paused_node_is_blamed_for_its_process_and_disk_alone() -> None:
    paused = {"paused_since_s": 900.0, "last_step_at_s": 600.0}
    assert [each.name for each in diagnose(snapshot(status=paused))] == ["paused"]
    assert said(status={**paused, "is_store_full": True})[0].name == "disk_full"


def test_what_is_no_fault_is_a_note() -> None:
    def notes(config: dict[str, Any] | None = None, **changes: Any) -> list[str]:
        found = diagnose(snapshot(config, **changes))
        assert is_healthy(found)
        return [each.name for each in found]

    assert notes(status={"is_finished": True}) == ["finished"]
    assert notes({"roles": ["relay"]}, status={"last_step_at_s": 0.0}) == ["only_relays"]
    paid = groups((1.0, 0.7), 64, **WRONG)
    assert notes(answers=paid) == ["paid_though_wrong"]
    unlearned = [*steps(0.02, count=60), evaluated(700.0, 0, 0.0), evaluated(999.0, 60, 0.02)]
    assert said(answers=paid, events=unlearned)[0].name == "paid_though_wrong"
    assert notes({"generator": {"temperature": 5.0}}) == ["far_from_usual"]


def test_values_are_far_by_the_span_at_their_field_and_defaults_never_are() -> None:
    assert far_values(NodeConfig()) == []
    sections = {"generator": {"temperature": 1.5}, "learner": {"max_grad_norm": 1e-9, "recipe_params": {"a": 1}}}
    far = far_values(NodeConfig.model_validate(sections))
    assert [each.key for each in far] == ["learner.max_grad_norm", "learner.recipe_params", "generator.temperature"]
    assert far[0].words == "learner.max_grad_norm = 1e-09 (usual 1e-3..100)" and far[0].distance == pytest.approx(
        3.0
    ), "a cap"


def test_a_suggested_value_is_toml() -> None:
    assert as_toml((0.9, 0.99)) == "[0.9, 0.99]" and as_toml(()) == "[]" and as_toml(("a",)) == '["a"]'


def test_what_costs_little_hides_no_node_that_does_not_run() -> None:
    lied = refused("false_reward")
    assert [each.name for each in said(**lied)] == ["liar"]
    stopped: dict[str, Any] = {**lied, "runs": False, "now_s": 9000.0}
    assert [each.name for each in said(**stopped)] == ["liar", "does_not_run"]


def test_every_span_bears_on_something_that_a_rule_looks_for() -> None:
    def spans(section: type[BaseModel]) -> list[Usual]:
        fields = section.model_fields.values()
        below = [each.annotation for each in fields if isinstance(each.annotation, type)]
        found = [usual for each in fields for usual in each.metadata if isinstance(usual, Usual)]
        return found + [usual for each in below if issubclass(each, BaseModel) for usual in spans(each)]

    known = spans(NodeConfig)
    assert len(known) > 40 and {word for each in known for word in each.bears_on.split()} == set(SHORTFALLS)


def test_of_several_values_the_farthest_comes_first_and_at_most_three_are_listed() -> None:
    learner = LEARNER(max_grad_norm=1e-9, warmup_steps=20_000, updates_per_step=64, weight_decay=99.0)
    (found,) = said(learner, events=STILL)[:1]
    assert found.name == "weights_decay", "a rule that knows more comes first"
    (found, *_) = said(LEARNER(max_grad_norm=1e-9, warmup_steps=20_000, updates_per_step=64), events=STILL)
    assert found.claim.count("(usual ") == 3 and found.key == "learner.max_grad_norm"


def test_what_shapes_the_prompt_is_named_where_no_answer_is_right() -> None:
    (found, *_) = said({"environments": [{**OWN, "system": "answer in french"}]}, **vain())
    assert "environments.system of own = answer in french" in found.fix and found.fix.startswith("swarm check ")
    assert "bears on it" not in said(**vain())[0].fix


def test_no_rule_needs_more_than_a_clock() -> None:
    assert [found.name for found in diagnose(Snapshot(now_s=0.0))] == ["starts"]
    assert diagnose(Snapshot(now_s=0.0, runs=False)) == []


def test_every_row_has_a_name_of_its_own_and_a_section_of_the_page() -> None:
    names = [rule.name for rule in RULES if rule.name != "far_from_usual"]
    assert len(set(names)) == len(names)
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs/why.md").read_text(), re.M)
    anchors = {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}
    assert {rule.docs for rule in (*RULES, *STATUS_RULES)} <= anchors


def test_every_message_that_other_rules_tell_is_one_that_is_logged() -> None:
    written = "".join(path.read_text() for part in ("swarm", "node") for path in (ROOT / part).rglob("*.py"))
    assert [message for message in COVERED - {STATUS_WITHOUT_ROOM} if written.count(f'"{message}"') < 2] == []


def test_an_agent_that_starts_loads_no_diagnosis_no_pages_and_no_extras() -> None:
    code = """
import pkgutil, sys
import node.cli, node.daemon, node.train, node.build, swarm.loops
for module in pkgutil.iter_modules(swarm.loops.__path__, "swarm.loops."):
    __import__(module.name)
import node.ranks, node.worker
outside = "swarm.diagnosis", "swarm.report", "swarm.pages", "swarm.extras"
print([name for name in sys.modules if name.startswith(outside)])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ran.stdout.strip() == "[]"


# --- a real directory ------------------------------------------------------------------------------------


def make_directory(folder: Path, *events: Event, **status: Any) -> Path:
    write_toml(NodeConfig(dir=folder).model_dump(mode="json"), folder / "node.toml")
    log = EventLog(folder / "events.jsonl")
    for event in events:
        log.write(event)
    log.close()
    (folder / "status.json").write_text(json.dumps({**STATUS, "num_failures": 0, **status}))
    return folder


def ask(directory: Path) -> dict[str, Any]:
    return json.loads(CliRunner().invoke(cli.app, ["why", str(directory), "--json"]).output)


def test_text_of_others_is_spelled_out_and_bounded(tmp_path: Path) -> None:
    hostile = "the verifier raised \x1b[2J\u202e[red]" + "x" * 5000
    directory = make_directory(tmp_path, *[GroupUnscored(env="a", error=hostile) for _ in range(8)])
    result = CliRunner().invoke(cli.app, ["why", str(directory)])
    assert result.exit_code == 1 and "\x1b" not in result.output and "\u202e" not in result.output
    assert "\\x1b[2J" in result.output and "[red]" in result.output and len(result.output) < 4000
    plain = ask(directory)
    assert plain["findings"][0]["name"] == "cannot_be_scored" and plain["findings"][0]["gravity"] == "stops"
    assert plain["is_healthy"] is False and plain["findings"][0]["fix"]
    assert plain["findings"][0]["docs"] == "docs/why.md#scoring"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"at_s": "now"}'], ids=["empty", "list", "half", "text"])
def test_what_cannot_be_read_is_missing_and_no_crash(tmp_path: Path, content: str) -> None:
    directory = make_directory(tmp_path)
    (directory / "status.json").write_text(content)
    (directory / "groups.sqlite").write_text("rubbish")
    result = CliRunner().invoke(cli.app, ["why", str(directory)])
    assert result.exit_code == 1 and "did not come up" in result.output
    (directory / "node.toml").write_text("dir = 7\nunknown = 1\n")
    result = CliRunner().invoke(cli.app, ["why", str(directory)])
    assert result.exit_code == 1 and "configuration cannot be read" in result.output and "unknown" in result.output


def test_a_folder_of_something_else_is_said_to_be_none_of_a_node(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["why", str(tmp_path)])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit | ConfigError)


def test_it_reads_what_the_node_was_started_with_until_its_file_was_changed_again(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    started = NodeConfig.model_validate({"dir": tmp_path, "learner": {"learning_rate": 0.25}})
    write_toml(started.model_dump(mode="json"), directory / "worker.toml")

    def read_rate(worker_is_newer: bool) -> float:
        os.utime(directory / "node.toml", (1000.0, 1000.0))
        os.utime(directory / "worker.toml", (1001.0, 1001.0) if worker_is_newer else (999.0, 999.0))
        config = read_snapshot(directory, 2000.0, 300.0).config
        assert config is not None
        return config.learner.learning_rate

    assert read_rate(worker_is_newer=True) == 0.25
    assert read_rate(worker_is_newer=False) == NodeConfig().learner.learning_rate
    (directory / "worker.toml").write_text("broken")
    assert read_rate(worker_is_newer=True) == NodeConfig().learner.learning_rate


@pytest.mark.parametrize(
    ("rate", "node_at_s", "expected"), [(1e-6, 2000.0, True), (1e-6, 900.0, False), (1e-5, 2000.0, False)]
)
def test_a_file_that_was_changed_after_the_start_is_told_from_one_that_is_in_force(
    tmp_path: Path, rate: float, node_at_s: float, expected: bool
) -> None:
    running = NodeConfig.model_validate({"dir": tmp_path, "entry": {"work_bits": 20}})
    write_toml(running.model_dump(mode="json"), tmp_path / "worker.toml")
    (tmp_path / "node.toml").write_text(f'dir = "{tmp_path}"\n[learner]\nlearning_rate = {rate}\n')
    (tmp_path / "status.json").write_text('{"at_s": 1000.0, "started_at_s": 950.0, "last_step_at_s": 1000.0}')
    os.utime(tmp_path / "worker.toml", (1000.0, 1000.0))
    os.utime(tmp_path / "node.toml", (node_at_s, node_at_s))
    held = lock_directory(tmp_path)
    try:
        assert read_snapshot(tmp_path, 1001.0).changed_keys == ("learner.learning_rate",) * expected
    finally:
        os.close(held)


def test_a_process_that_a_signal_holds_is_seen(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("")
    with subprocess.Popen(["sleep", "60"]) as child:
        (tmp_path / "status.json").write_text(json.dumps({"at_s": 1000.0, "pid": 1}))  # of before a crash
        held = lock_directory(tmp_path)
        try:
            assert read_snapshot(tmp_path, 1001.0).stopped_pids == ()
            child.send_signal(signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)  # until it is held
            assert read_snapshot(tmp_path, 1001.0).stopped_pids == (child.pid,)
        finally:
            os.close(held)
            child.kill()


def test_a_pid_and_a_kill_are_named_only_for_a_process_that_is_proved_to_be_the_node() -> None:
    for pid in (None, 77):
        snapshot = Snapshot(now_s=2000.0, status={**STATUS, "at_s": 1000.0, "pid": 66}, pid=pid)
        (found,) = (rule(snapshot) for rule in RULES if rule.name == "hangs")
        assert found is not None
        said_words = f"{found.claim} {found.fix}"
        assert "66" not in said_words and ("77" in said_words) == ("kill" in said_words) == (pid is not None)


# --- the status, and words ---------------------------------------------------------------------------------


def test_what_status_says_are_rules_of_the_table() -> None:
    full = {**STATUS, **own(), "at_s": 1000.0, "is_store_full": True, "advice": "alarm", "num_failures": 2}
    claims = problems(full, 2000.0, 300.0)
    assert len(claims) == 5 and "hangs" in claims[0] and "no optimizer step" in claims[1]
    assert {rule.name for rule in STATUS_RULES} - {rule.name for rule in RULES} == {"nobody_agrees"}


def test_refusals_name_the_commonest_reason_with_its_keys_and_producers() -> None:
    events = [GroupRefused(at_s=990.0, reason="bad_sampling", producer=PEER, count=20)]
    (found, *_) = said(**refused("bad_sampling"), events=events)
    assert "generator.temperature or generator.max_new_tokens must be equal on all nodes" in found.claim
    assert any(f"{PEER[:8]} (20)" in line for line in found.evidence)
    joined = refused("bad_sampling", differs_from_run=[], newest_refusals={"bad_sampling": [PEER, "1, here 2"]})
    (found, *_) = said(**joined)
    assert found.claim.endswith(f"(the newest, of {PEER[:8]}: 1, here 2)") and "by joining again" in found.fix


def test_a_trainer_that_stands_still_is_named_within_a_minute() -> None:
    puts = [put(number, 0.5, 920.0 + number) for number in range(20)]
    versions = [VersionApplied(at_s=920.0 + 2 * n, policy_id=TRAINER, step=n, digest=str(n)) for n in range(10)]
    (found, *_) = said(FOLLOWS, status=followed(credit=0) | {"last_step_at_s": 940.0}, events=[*puts, *versions])
    assert found.name == "no_credit" and "paused" in found.claim and "no newer version for 62 s" in found.claim


@pytest.mark.parametrize(("was_stopped", "is_named"), [(True, False), (False, True)])
def test_the_time_between_two_processes_is_no_evaluation(was_stopped: bool, is_named: bool) -> None:
    again = [NodeStarted(at_s=900.0, node_id="a")] if was_stopped else []
    events = [*(step(n, at_s=10.0 * n) for n in (1, 2, 3)), *again, evaluated(930.0, 3, 0.5)]
    found = [each.name for each in diagnose(Snapshot(now_s=931.0, status=STATUS, events=tuple(events)))]
    assert ("evaluations_take_time" in found) is is_named


@pytest.mark.parametrize(
    ("ended", "is_named"), [((), True), ((0.0,), True), ((0.0,) * 15, True), ((0.0,) * 40, False), ((0.9,) * 40, True)]
)
def test_a_few_answers_that_end_in_time_do_not_acquit_the_limit(ended: tuple[float, ...], is_named: bool) -> None:
    """256 answers at the limit, worth .3; those that ended by themselves were worth this."""
    rewards, cut = (0.3,) * 256 + ended, (True,) * 256 + (False,) * len(ended)
    answers = (group(rewards=rewards, is_cut=cut, num_tokens=(2,) * len(rewards), texts=()),)
    assert [each.name for each in said(answers=answers)] == ["cut_off"] * is_named


def test_weights_of_rewards_are_named_where_a_right_answer_is_worth_less() -> None:
    doubt = (warned(UPSIDE_DOWN, "the reference 'ab' is worth 0.55, an empty answer 0.9"),)
    weighted = {"environments": [{**OWN, "reward_weights": {"right": 0.1, "short": 0.9}}]}
    fixes = [said(config, warnings=doubt)[0].fix for config in (None, weighted)]
    assert ["weight to 0" in fix for fix in fixes] == [False, True]


def test_a_training_that_has_ended_is_started_with_more_steps() -> None:
    """Without them the command says that every step was made."""
    config = NodeConfig.model_validate({"run_id": "train", "directory": {"kind": "none"}})
    ended = {**STATUS, "step": 40, "is_finished": True}
    assert Snapshot(now_s=0.0, status=ended, config=config).start.endswith(" --steps 80")
    assert "--steps" not in Snapshot(now_s=0.0, status=STATUS, config=config).start


def test_of_several_errors_that_end_a_node_each_is_noted_once() -> None:
    inner = ExceptionGroup("inner", [OSError("locked"), ValueError("3")])
    assert errors_in_words(ExceptionGroup("outer", [OSError("locked"), inner])) == "OSError: locked; ValueError: 3"
    assert errors_in_words(ConfigError("one")) == "ConfigError: one"
