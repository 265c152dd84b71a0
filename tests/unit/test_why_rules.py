"""Rules of `swarm why` on snapshots, each with a healthy neighbour of which it says nothing."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from swarm.causes import Diagnosed, Gravity, Snapshot, diagnose
from swarm.causes.disk_rules import STATUS_WITHOUT_ROOM
from swarm.causes.read_snapshot import read_snapshot
from swarm.causes.reward_rules import reward_is_of_length
from swarm.causes.snapshot import AnsweredGroup
from swarm.config import NodeConfig
from swarm.events import GroupAdmitted, GroupPut, NodeStarted, PolicyEvaluated, StepMade, WorkerDied
from swarm.process import lock_directory
from swarm.telemetry import LoggedWarning
from swarm.wire.run_manifest import write_toml

STATUS: dict[str, Any] = {"at_s": 1000.0, "last_step_at_s": 1000.0, "started_at_s": 700.0, "pid": 7, "num_put": 40}
START = NodeStarted(at_s=700.0, node_id="a")


def said(config: dict[str, Any] | None = None, **changes: Any) -> list[Diagnosed]:
    """What is found, notes left out."""
    status = {**STATUS, **changes.pop("status", {})}
    events = (START, *changes.pop("events", ()))
    sections = NodeConfig.model_validate(config or {})
    found = diagnose(Snapshot(now_s=1000.0, status=status, events=events, config=sections, **changes))
    return [each for each in found if each.gravity is not Gravity.NOTE]


def names(found: list[Diagnosed]) -> list[str]:
    return [each.name for each in found]


@pytest.mark.parametrize(
    ("scoring_s", "num_put", "is_named"), [(200.0, 40, True), (20.0, 40, False), (200.0, 4000, False)]
)
def test_a_reward_that_takes_most_of_the_time_is_told_from_a_quick_one(
    scoring_s: float, num_put: int, is_named: bool
) -> None:
    assert names(said(status={"scoring_s": scoring_s, "num_put": num_put})) == ["scoring_is_slow"] * is_named


def group(task_id: int, rewards: tuple[float, ...], lengths: tuple[int, ...]) -> AnsweredGroup:
    return AnsweredGroup(
        env="own", rewards=rewards, is_cut=(False,) * len(rewards), num_tokens=lengths, task_id=task_id, prompt=task_id
    )


def test_a_reward_of_the_length_alone_is_told_from_one_that_looks_at_answers() -> None:
    lengths = (2, 4, 6, 8)
    of_length = tuple(group(n, tuple(each / 10 for each in lengths), lengths) for n in range(8))
    found = reward_is_of_length(Snapshot(now_s=0.0, answers=of_length))
    assert found is not None and "4 lengths of 32 answers" in found.evidence[0]
    one_else = (*of_length, group(9, (0.9, 0.4), (2, 4)))
    assert reward_is_of_length(Snapshot(now_s=0.0, answers=one_else)) is None
    right_or_wrong = tuple(group(n, (0.0, 1.0, 0.0, 1.0), lengths) for n in range(8))
    assert reward_is_of_length(Snapshot(now_s=0.0, answers=right_or_wrong)) is None, "two rewards are no slope"
    assert reward_is_of_length(Snapshot(now_s=0.0, answers=of_length[:7])) is None, "of too few"


@pytest.mark.parametrize(("num_questions", "after", "is_named"), [(4, 0.2, True), (4, 0.8, False), (16, 0.2, False)])
def test_few_questions_are_named_where_what_is_learned_of_them_helps_no_other(
    num_questions: int, after: float, is_named: bool
) -> None:
    steps = [
        StepMade(
            at_s=700.0 + n,
            step=n,
            draw_step=n,
            digest=str(n),
            loss=0.0,
            grad_norm=1.0,
            num_tokens=5,
            diagnostics={"reward_mean": 0.2 + 0.02 * n},
        )
        for n in range(1, 31)
    ]
    held_out = [
        PolicyEvaluated(
            at_s=at_s, step=step, env="own", split="held_out", accuracy=accuracy, num_problems=64, majority_baseline=0.1
        )
        for at_s, step, accuracy in ((701.0, 0, 0.2), (731.0, 30, after))
    ]
    answers = tuple(
        AnsweredGroup(
            env="own",
            rewards=(0.0, 1.0),
            is_cut=(False, False),
            num_tokens=(3, 4),
            task_id=n % num_questions,
            prompt=n % num_questions,
            texts=(n, -n - 1),
        )
        for n in range(16)
    )
    found = said(events=(*steps, *held_out), answers=answers)
    assert names(found) == ["few_questions"] * is_named  # of what is said as a note otherwise


def test_a_node_that_runs_alone_though_others_are_named_is_told_from_one_that_wants_to() -> None:
    assert names(said({"directory": {"kind": "none", "bootstrap": ["/ip4/1.2.3.4/tcp/5/p2p/x"]}})) == [
        "directory_is_off"
    ]
    assert said({"directory": {"kind": "none"}}) == []


@pytest.mark.parametrize(("sent", "is_named"), [(29_000_000, True), (9_000_000, False)])
def test_an_upload_limit_that_is_filled_is_told_from_one_that_is_not(sent: int, is_named: bool) -> None:
    limited = {"directory": {"kind": "none"}, "exchange": {"max_upload_bytes_per_s": 100_000, "relay_reservations": 0}}
    assert names(said(limited, status={"bytes_sent": sent})) == ["upload_is_short"] * is_named


def test_a_relay_learns_nothing_and_is_not_ill() -> None:
    config = NodeConfig.model_validate({"roles": ["relay"]})
    status = {**STATUS, "last_step_at_s": 0.0, "peers": ["bb"]}
    (found,) = diagnose(Snapshot(now_s=1000.0, status=status, events=(START,), config=config))
    assert found.name == "only_relays" and found.gravity is Gravity.NOTE and found.key == "roles"


def test_answers_that_cannot_be_scored_here_make_nobody_a_liar() -> None:
    peers = {"peers": ["bb" * 32], "num_admitted": 0}
    assert names(said(status={**peers, "refusals": {"verifier_failed": 20}}))[0] == "others_refused"
    assert names(said(status={**peers, "refusals": {"false_reward": 20, "verifier_failed": 2}}))[0] == "liar"


def test_groups_that_repeat_what_is_known_are_no_groups_that_do_not_come() -> None:
    steps = [
        StepMade(at_s=701.0 + n, step=n, draw_step=n, digest=str(n), loss=0.0, grad_norm=1.0, num_tokens=5)
        for n in range(30)
    ]
    (found, *_) = said(status={"peers": ["bb" * 32], "refusals": {"copied": 40}}, events=steps)
    assert found.name == "no_external" and "all 40 were known" in found.claim and "one key" in found.fix


def test_a_signal_that_ended_the_worker_has_its_name() -> None:
    (found, *_) = said(events=[WorkerDied(at_s=960.0, exit_code=-11)])
    assert found.name == "worker_dies" and "1 x SIGSEGV" in found.evidence[0]


@pytest.mark.parametrize("dies", [True, False])
def test_a_server_that_a_generator_lacks_is_not_taken_for_its_trainer(dies: bool) -> None:
    """Without its worker it follows nobody; without deaths it is the trainer."""
    following = {
        "policy": "bb" * 32, "candidates": [], "trainers_without_weights": [], "served_step": None, "head_step": 653,
        "is_trainer_connected": False, "credit": 0, "num_applied": 0, "state": "watching", "last_error": "",
    }  # fmt: skip
    refused = LoggedWarning(
        at_s=990.0, level="ERROR", message="worker failed", fields="Unavailable: GET http://127.0.0.1:1/v1/models: "
        "ConnectionRefusedError: [Errno 111] Connection refused", logger="node.worker", count=3,
    )  # fmt: skip
    generator = {"roles": ["generator"], "directory": {"kind": "dht"}}
    deaths = [WorkerDied(at_s=900.0 + 30 * n, exit_code=1) for n in range(3)]
    found = diagnose(
        Snapshot(
            now_s=1000.0,
            status={**STATUS, "following": following},
            events=(START, *deaths) if dies else (START,),
            config=NodeConfig.model_validate(generator),
            warnings=(refused,) if dies else (),
        )
    )
    assert found[0].name == ("nobody_answers" if dies else "trainer_away")
    assert not dies or "http://127.0.0.1:1/v1/models" in found[0].claim


def test_an_address_that_cannot_be_dialled_is_named_with_the_reason() -> None:
    away = {"dials": {"failed": 5, "answered": 0}, "newest_dial_error": "10.0.0.7:7700: nobody answered"}
    (found, *_) = said(status=away)
    assert found.name == "cannot_dial" and found.claim.endswith("10.0.0.7:7700: nobody answered")


@pytest.mark.parametrize("step_at_s", [998.0, 850.0], ids=["steps go on", "nothing is written"])
def test_a_node_that_cannot_open_files_is_told_from_one_that_hangs(step_at_s: float) -> None:
    step = StepMade(step=9, draw_step=9, digest="d", loss=0.0, grad_norm=1.0, num_tokens=8, at_s=step_at_s)
    errno = LoggedWarning(
        at_s=990.0, level="ERROR", message="status was not written", fields="OSError: [Errno 24] Too many open files",
        logger="node.status", count=4,
    )  # fmt: skip
    found = names(said(runs=True, status={"at_s": 900.0}, events=(step,), warnings=(errno,)))
    assert found[0] == ("too_many_files" if step_at_s > 900.0 else "hangs"), found


@pytest.mark.parametrize(
    ("logged_s", "expected"), [(901.0, "disk_full"), (800.0, "hangs")], ids=["since", "before the newest status"]
)
def test_a_node_whose_status_finds_no_room_is_told_from_one_that_hangs(logged_s: float, expected: str) -> None:
    full = LoggedWarning(
        at_s=logged_s, level="ERROR", message=STATUS_WITHOUT_ROOM, fields="[Errno 28] No space left on device",
        logger="node.daemon_loops",
    )  # fmt: skip
    (found, *others) = said(runs=True, status={"at_s": 900.0}, warnings=(full,))
    assert found.name == expected and (expected == "hangs" or "hangs" not in names(others))


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
        found = [each for each in diagnose(read_snapshot(tmp_path, 1001.0)) if each.name == "change_waits"]
    finally:
        os.close(held)
    assert [each.key for each in found] == ["learner.learning_rate"] * expected


@pytest.mark.parametrize("is_shared", [True, False], ids=["others ask it", "nobody asks it"])
def test_an_environment_that_others_ask_is_left_to_them(is_shared: bool) -> None:
    both = [{"name": name, "kind": "char", "dataset": name} for name in ("sort", "reverse")]
    puts = [
        GroupPut(
            at_s=701.0 + n, digest=str(n), producer="a", policy_id="a", oldest_step=0, env="sort", reward_mean=0.5,
            num_tokens=8, size_bytes=1,
        )
        for n in range(60)
    ]  # fmt: skip
    came = GroupAdmitted(
        at_s=990.0, digest="b", producer="bb", policy_id="bb", env="reverse", oldest_step=0, size_bytes=1,
        reward_mean=0.5, via="bb", age_s=0.1,
    )  # fmt: skip
    found = names(said({"environments": both}, events=(*puts, *[came] * is_shared), status={"peers": ["bb"]}))
    assert ("environment_not_asked" in found) is not is_shared


def test_a_node_that_was_stopped_while_it_was_paused_did_not_halt() -> None:
    made = [
        StepMade(at_s=701.0 + n, step=n, draw_step=n, digest=str(n), loss=0.0, grad_norm=1.0, num_tokens=5)
        for n in range(20)
    ]
    for paused_since_s, expected in ((725.0, []), (None, ["halted"])):
        status = {"paused_since_s": paused_since_s, "was_stopped": True, "last_step_at_s": 721.0}
        found = said({"directory": {"kind": "none"}}, events=made, status=status, runs=False)
        assert names(found) == expected


def test_a_process_that_a_signal_holds_is_seen(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("")
    with subprocess.Popen(["sleep", "60"]) as child:
        (tmp_path / "status.json").write_text(json.dumps({"at_s": 1000.0, "pid": child.pid}))
        held = lock_directory(tmp_path)
        try:
            assert read_snapshot(tmp_path, 1001.0).stopped_pids == ()
            child.send_signal(signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)  # until it is held
            assert read_snapshot(tmp_path, 1001.0).stopped_pids == (child.pid,)
        finally:
            os.close(held)
            child.kill()
