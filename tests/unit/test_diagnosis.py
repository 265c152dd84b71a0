"""Order and words of a diagnosis; what rules say of real nodes is in tests/integration/test_why.py."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from node.status import problems
from node.worker import errors_in_words
from swarm.causes import RULES, STATUS_RULES, Certainty, Diagnosed, Gravity, Snapshot, diagnose, is_healthy
from swarm.causes.finding import by_cause
from swarm.causes.following_rules import no_credit
from swarm.causes.optimizer_rules import not_a_number
from swarm.causes.read_snapshot import read_snapshot
from swarm.causes.signal_rules import NOTHING_TO_LEARN, cut_off, episodes_cut_off
from swarm.causes.snapshot import AnsweredGroup
from swarm.causes.step_rules import evaluations_take_time
from swarm.cli import main as cli
from swarm.config import NodeConfig
from swarm.errors import ConfigError
from swarm.events import (
    NODE,
    DiskFull,
    Event,
    GroupPut,
    GroupUnscored,
    LoopFailed,
    NodeStarted,
    PolicyEvaluated,
    StepMade,
)
from swarm.telemetry import EventLog
from swarm.wire.run_manifest import write_toml

STATUS: dict[str, Any] = {"at_s": 1000.0, "last_step_at_s": 1000.0, "pid": 7, "step": 3, "num_failures": 0}


def finding(name: str, gravity: Gravity, certainty: Certainty = Certainty.SURE, *causes: str) -> Diagnosed:
    return Diagnosed(name=name, claim=name, gravity=gravity, certainty=certainty, follows_from=frozenset(causes))


def test_causes_come_before_what_follows_and_surer_and_graver_ones_before_others() -> None:
    found = [
        finding("note", Gravity.NOTE),
        finding("effect", Gravity.STOPS, Certainty.SURE, "cause"),
        finding("guess", Gravity.STOPS, Certainty.POSSIBLE),
        finding("loss", Gravity.WASTES),
        finding("cause", Gravity.HARMS, Certainty.LIKELY),
    ]
    assert [each.name for each in by_cause(found)] == ["cause", "guess", "loss", "effect", "note"]
    alone = [each for each in found if each.name != "cause"]
    assert by_cause(alone)[0].name == "effect", "without its cause it is one itself"


def test_a_note_explains_nothing_and_leaves_a_node_healthy() -> None:
    note, effect = finding("note", Gravity.NOTE), finding("effect", Gravity.HARMS, Certainty.SURE, "note")
    loss = finding("loss", Gravity.WASTES)
    assert [each.name for each in by_cause([note, loss, effect])] == ["effect", "loss", "note"]
    assert is_healthy([note]) and is_healthy([]) and not is_healthy([note, loss])


@pytest.mark.parametrize(
    ("ended", "is_named"), [((), True), ((0.0,), True), ((0.0,) * 15, True), ((0.0,) * 40, False), ((0.9,) * 40, True)]
)
def test_a_few_answers_that_end_in_time_do_not_acquit_the_limit(ended: tuple[float, ...], is_named: bool) -> None:
    """256 answers at the limit, worth .3; how many ended by themselves, and what those were worth."""
    rewards = (0.3,) * 256 + ended
    group = AnsweredGroup(
        env="own", rewards=rewards, is_cut=(True,) * 256 + (False,) * len(ended), num_tokens=(2,) * len(rewards)
    )
    found = cut_off(Snapshot(now_s=0.0, config=NodeConfig(), answers=(group,)))
    assert (found is not None) is is_named


def test_no_rule_needs_more_than_a_clock() -> None:
    assert [found.name for found in diagnose(Snapshot(now_s=0.0))] == ["starts"]
    assert [found.name for found in diagnose(Snapshot(now_s=0.0, runs=False))] == []
    assert len({rule.__name__ for rule in RULES}) == len(RULES)


def test_what_status_says_is_what_why_says() -> None:
    status = {**STATUS, "own_since_step": {"num_put": 120, "num_with_signal": 0, "num_unscored": 0, "error": ""}}
    full = {**status, "is_store_full": True, "advice": "alarm", "num_failures": 2}
    said = problems(full, 2000.0, 300.0)
    known = {found.claim for found in diagnose(Snapshot(now_s=2000.0, status=full))}
    assert len(said) == 5 and set(said) <= known and set(STATUS_RULES) <= set(RULES)


def step(number: int, norm: float = 1.0, **changes: Any) -> StepMade:
    figures: dict[str, Any] = {"loss": 0.0, "num_tokens": 1, "digest": str(number), **changes}
    return StepMade(step=number, draw_step=number, grad_norm=norm, **figures)


def test_steps_without_a_trained_token_are_not_called_infinite() -> None:
    steps = [step(number, norm=0.0, was_skipped=True) for number in range(1, 6)]
    assert not_a_number(Snapshot(now_s=0.0, status=STATUS, events=tuple(steps))) is None
    bad = [step(number, norm=math.nan, was_skipped=True) for number in range(6, 9)]
    found = not_a_number(Snapshot(now_s=0.0, status=STATUS, events=(*steps, *bad)))
    assert found is not None and found.gravity is Gravity.STOPS and "3 of the newest 8" in found.claim
    healed = (*steps, *bad, *[step(number) for number in range(9, 12)])
    found = not_a_number(Snapshot(now_s=0.0, status=STATUS, events=healed))
    assert found is not None and found.gravity is Gravity.WASTES


def test_credit_that_is_used_up_for_a_moment_is_no_starvation() -> None:
    following = {"policy": "aa" * 32, "candidates": [], "trainers_without_weights": [], "is_trainer_connected": True}
    following |= {"served_step": 5, "head_step": 5, "last_error": "", "credit": 0}
    status = {**STATUS, "following": following}
    assert no_credit(Snapshot(now_s=1010.0, status=status)) is None
    starved = no_credit(Snapshot(now_s=1200.0, status=status))
    assert starved is not None and "grants no credit" in starved.claim
    assert no_credit(Snapshot(now_s=1200.0, status={**status, "following": following | {"credit": 2}})) is None


def make_directory(folder: Path, *events: Event, **status: Any) -> Path:
    write_toml(NodeConfig(dir=folder).model_dump(mode="json"), folder / "node.toml")
    log = EventLog(folder / "events.jsonl")
    for event in events:
        log.write(event)
    log.close()
    (folder / "status.json").write_text(json.dumps({**STATUS, **status}))
    return folder


def test_text_of_others_is_spelled_out_and_bounded(tmp_path: Path) -> None:
    hostile = "the verifier raised \x1b[2J\u202e[red]" + "x" * 5000
    directory = make_directory(tmp_path, *[GroupUnscored(env="a", error=hostile) for _ in range(8)])
    result = CliRunner().invoke(cli.app, ["why", str(directory)])
    assert result.exit_code == 1 and "\x1b" not in result.output and "\u202e" not in result.output
    assert "\\x1b[2J" in result.output and "[red]" in result.output and len(result.output) < 4000
    plain = json.loads(CliRunner().invoke(cli.app, ["why", str(directory), "--json"]).output)
    assert plain["findings"][0]["name"] == "cannot_be_scored" and plain["findings"][0]["gravity"] == "stops"
    assert plain["is_healthy"] is False and plain["findings"][0]["fix"]


def test_a_full_disk_is_said_of_a_node_that_ended(tmp_path: Path) -> None:
    directory = make_directory(tmp_path, DiskFull(error="no space left on device"), is_finished=True)
    assert CliRunner().invoke(cli.app, ["why", str(directory)]).exit_code == 1
    plain = json.loads(CliRunner().invoke(cli.app, ["why", str(directory), "--json"]).output)
    assert [each["name"] for each in plain["findings"]] == ["disk_full", "finished"]


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


def moving(config: NodeConfig, std: float, **changes: Any) -> list[str]:
    """What is said of 30 steps that change log-probs by so much."""
    figures = {"log_ratio_std": std, "age_mean_steps": 1.0, "reward_mean": 0.2}
    steps = tuple(step(number, diagnostics=figures, **changes) for number in range(1, 31))
    found = diagnose(Snapshot(now_s=1000.0, status=STATUS, events=steps, config=config))
    return [each.name for each in found if each.gravity is not Gravity.NOTE]


@pytest.mark.parametrize(
    ("learner", "expected"),
    [
        ({}, "steps_change_nothing"),
        ({"warmup_steps": 10**6}, "warmup_steps_too_high"),
        ({"max_grad_norm": 1e-9}, "max_grad_norm_too_low"),
        ({"learning_rate": 1e-8}, "learning_rate_too_low"),
    ],
)
def test_steps_that_change_nothing_are_told_from_steps_that_do(learner: dict[str, Any], expected: str) -> None:
    config = NodeConfig.model_validate({"learner": learner, "directory": {"kind": "none"}})
    assert moving(config, 1e-6)[0] == expected
    assert expected not in moving(config, 0.03)


def test_a_decay_that_eats_the_model_is_told_from_a_usual_one() -> None:
    greedy = {"learning_rate": 1e-5, "weight_decay": 500.0}
    usual = {"learning_rate": 1e-5, "weight_decay": 0.1}
    names = [
        moving(NodeConfig.model_validate({"learner": each, "directory": {"kind": "none"}}), 0.03)
        for each in (greedy, usual)
    ]
    assert names == [["weights_decay"], []]


def test_a_buffer_below_one_step_is_told_from_one_that_fills() -> None:
    own = {"num_put": 40, "num_with_signal": 20, "num_unscored": 0, "error": ""}

    def said(held: int, **replay: Any) -> list[str]:
        config = NodeConfig.model_validate({"replay": replay, "directory": {"kind": "none"}})
        status = {**STATUS, "own_since_step": own, "replay_groups": held}
        return [each.name for each in diagnose(Snapshot(now_s=1100.0, status=status, config=config))]

    assert "buffer_too_small" in said(0) and "buffer_too_small" not in said(4)
    assert "buffer_too_small" in said(4, max_groups=3)


def test_own_groups_that_pile_up_behind_skipped_steps_are_no_small_buffer() -> None:
    own = {"num_put": 40, "num_with_signal": 20, "num_unscored": 0, "error": ""}
    config = NodeConfig.model_validate({"directory": {"kind": "none"}})
    skipped = step(1, norm=math.nan, was_skipped=True)
    status = {**STATUS, "own_since_step": own, "replay_groups": 0}
    found = diagnose(Snapshot(now_s=1100.0, status=status, config=config, events=(skipped,)))
    names = [each.name for each in found]
    assert names[0] == "not_a_number" and "buffer_too_small" not in names


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


def test_a_training_that_gave_up_lacked_signal_and_its_error_follows_from_that(tmp_path: Path) -> None:
    error = f"ConfigError: 64 groups of 8 answers, and in none did rewards differ: {NOTHING_TO_LEARN} (highest ...)"
    puts = [
        GroupPut(
            digest=str(n),
            producer="a",
            policy_id="a",
            oldest_step=0,
            env="a",
            reward_mean=0.0,
            num_tokens=8,
            size_bytes=1,
        )
        for n in range(64)
    ]
    own = {"num_put": 64, "num_with_signal": 0, "num_unscored": 0, "error": ""}
    directory = make_directory(tmp_path, *puts, LoopFailed(loop=NODE, error=error), own_since_step=own, step=0)
    plain = json.loads(CliRunner().invoke(cli.app, ["why", str(directory), "--json"]).output)
    assert [each["name"] for each in plain["findings"][:2]] == ["all_wrong", "ended_with_error"]
    said = CliRunner().invoke(cli.app, ["why", str(directory)]).output
    assert "ended_with_error: stops, sure; follows from 1" in " ".join(said.split())


def evaluated(at_s: float) -> PolicyEvaluated:
    figures: dict[str, Any] = {"accuracy": 0.5, "num_problems": 8, "majority_baseline": 0.1}
    return PolicyEvaluated(at_s=at_s, step=3, env="a", split="held_out", **figures)


@pytest.mark.parametrize(("was_stopped", "is_named"), [(True, False), (False, True)])
def test_the_time_between_two_processes_is_no_evaluation(was_stopped: bool, is_named: bool) -> None:
    """Fifteen minutes lie before an evaluation: of a node that did not run, or of one that evaluates for so long."""
    steps = [step(number, at_s=10.0 * number) for number in range(1, 4)]
    again = [NodeStarted(at_s=900.0, node_id="a")] if was_stopped else []
    found = evaluations_take_time(Snapshot(now_s=931.0, status=STATUS, events=(*steps, *again, evaluated(930.0))))
    assert (found is not None) is is_named


@pytest.mark.parametrize(("num_full", "reward", "is_named"), [(64, 0.0, True), (64, 0.4, False), (8, 0.0, False)])
def test_episodes_without_room_for_another_turn_are_cut_off_where_nothing_is_won(
    num_full: int, reward: float, is_named: bool
) -> None:
    own = {"num_put": 120, "num_with_signal": 0 if reward == 0.0 else 60, "num_unscored": 0, "error": ""}
    group = AnsweredGroup(
        env="own",
        rewards=(reward,) * 64,
        is_cut=(False,) * 64,
        num_tokens=(9,) * 64,
        has_room=(False,) * num_full + (True,) * (64 - num_full),
    )
    status = {**STATUS, "own_since_step": own}
    found = episodes_cut_off(Snapshot(now_s=1000.0, status=status, config=NodeConfig(), answers=(group,)))
    assert (found is not None and found.key == "generator.max_episode_tokens") is is_named


@pytest.mark.parametrize(("kind", "is_own"), [("function", True), ("char", False)])
def test_without_any_reward_a_reward_of_ones_own_is_suspected_first(kind: str, is_own: bool) -> None:
    own = {"num_put": 120, "num_with_signal": 0, "num_unscored": 0, "error": ""}
    config = NodeConfig.model_validate(
        {"environments": [{"name": "own", "kind": kind, "dataset": "sort"}], "directory": {"kind": "none"}}
    )
    found = diagnose(Snapshot(now_s=1000.0, status={**STATUS, "own_since_step": own}, config=config))
    assert found[0].name == "all_wrong" and found[0].fix.startswith("swarm check --config") is is_own


def test_a_reward_without_memory_is_told_from_one_that_fails() -> None:
    error = "environment own, task 1: the verifier raised MemoryError: more than sandbox.memory_bytes allows"
    events = tuple(GroupUnscored(at_s=1000.0, env="own", error=error) for _ in range(8))
    (found, *_) = diagnose(Snapshot(now_s=1001.0, status=STATUS, events=events, config=NodeConfig()))
    assert found.name == "cannot_be_scored" and "out of memory" in found.claim and "sandbox" in found.fix


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
