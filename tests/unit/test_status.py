"""`swarm status` of a node that runs, starts, is finished, or is no node."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from node.daemon import Daemon
from node.status import node_name, problems, read_status, status_rows
from swarm.cli import main as cli
from swarm.config import NodeConfig
from swarm.errors import ConfigError, Unavailable
from swarm.process import lock_directory
from swarm.telemetry.warning_log import STATUS_WITHOUT_ROOM

OWN, TRAINER, OTHER = "aa" * 32, "bb" * 32, "cc" * 32


def status_of(**changes: Any) -> dict[str, Any]:
    return {
        "node_id": OWN,
        "name": "ada",
        "run_id": "demo",
        "pid": 7,
        "at_s": 1000.0,
        "step": 12,
        "last_step_at_s": 1000.0,
        "peers": [OTHER],
        "num_local_used": 3,
        "num_external_used": 4,
        "refusals": {},
        "evaluations": {},
        "num_failures": 0,
        "advice": "ok",
        **changes,
    }


def following(**changes: Any) -> dict[str, Any]:
    return {
        "policy": TRAINER,
        "candidates": [],
        "trainers_without_weights": [],
        "is_trainer_connected": True,
        "served_step": 5,
        "head_step": 7,
        "last_error": "",
        **changes,
    }


def test_a_node_that_made_all_of_its_steps_is_not_stuck() -> None:
    status = status_of(at_s=2000.0)
    assert "no optimizer step" in problems(status, 2000.0, 300.0)[0]
    assert problems(status | {"is_finished": True}, 2000.0, 300.0) == []
    assert problems(status | {"is_finished": True}, 9000.0, 300.0, runs=False) == []  # it ended, as it should
    assert "finished" in dict(status_rows(status | {"is_finished": True}))["step"]


@pytest.mark.parametrize(
    ("what", "silent_s", "changes", "is_stuck"),
    [
        ("learning", 200.0, {}, False),
        ("learning", 400.0, {}, True),
        ("learning", -1000.0, {}, True),  # a clock that was set
        ("waiting for groups", 10.0, {}, True),
        ("learning", 10.0, {"last_step_at_s": -2000.0}, True),  # work that leads to nothing for so long
        ("learning", 10.0, {"guard": {"guard_idle_draws": 9.0, "guard_held_sources": 2.0}}, True),
    ],
)
def test_a_slow_node_is_not_stuck_while_its_worker_advances(
    what: str, silent_s: float, changes: dict[str, Any], is_stuck: bool
) -> None:
    sign = {"what": what, "done": 1, "total": 3, "num_tokens": 0, "at_s": 2000.0 - silent_s}
    found = problems(status_of(at_s=2000.0, worker=sign, **changes), 2000.0, 300.0)
    assert any("no optimizer step" in each for each in found) is is_stuck


@pytest.mark.parametrize("worker", ["x", 5, {"what": 5}, {"what": "a"}, [], {"what": "learning", "done": "much"}])
def test_an_activity_of_another_release_is_passed_by(worker: Any) -> None:
    status = status_of(at_s=2000.0, worker=worker)
    assert "worker" not in dict(status_rows(status)) and "no optimizer step" in problems(status, 2000.0, 300.0)[0]
    later = {"what": "learning", "done": 1, "total": 3, "num_tokens": 0, "at_s": 1999.0, "new_in_a_later_release": 1}
    assert problems(status_of(at_s=2000.0, worker=later), 2000.0, 300.0) == []


def test_what_a_node_wrote_moves_no_cursor(tmp_path: Path) -> None:
    sign = {"what": "\x1b[2J\nnode_id FORGED", "done": 1, "total": 3, "num_tokens": 0, "at_s": 999.0}
    (tmp_path / "status.json").write_text(json.dumps(status_of(worker=sign, name="a\x1b[1A\nb")))
    (tmp_path / "compute_dtype.txt").write_bytes(b"\xff\xfe\x1b[2K\nproblem: FORGED" + bytes(10**6))
    shown = CliRunner().invoke(cli.app, ["status", str(tmp_path)]).output
    assert "\x1b" not in shown and "FORGED" in shown
    assert not [line for line in shown.splitlines() if line.startswith(("node_id FORGED", "problem: FORGED"))]


def test_that_the_guard_set_every_source_aside_is_said_with_the_reason() -> None:
    figures = {"guard_idle_draws": 1.0, "mismatch_kl_k3": 0.1129, "ess_share": 0.4, "guard_groups_spared": 0.0}
    status = status_of(at_s=2000.0, guard=figures)
    note = "all sources of the newest draws (1 in a row) set aside: mismatch KL 0.113, ESS share 0.4"
    assert dict(status_rows(status))["guard"] == note
    assert problems(status, 2000.0, 300.0)[0].endswith(note)
    used = dict(status_rows(status_of(guard=figures | {"guard_groups_spared": 2.0})))["guard"]
    assert used == f"{note}; 2 groups that deviate least are used, with capped ratios"
    assert "guard" not in dict(status_rows(status_of(guard={})))


def own(num_put: int, num_with_signal: int = 0, num_unscored: int = 0, error: str = "") -> dict[str, Any]:
    counts = {"num_put": num_put, "num_with_signal": num_with_signal, "num_unscored": num_unscored, "error": error}
    return status_of(own_since_step=counts)


def test_a_node_without_signal_says_so_before_the_time_is_up() -> None:
    words = "own groups: 648 generated, 0 with differing rewards"
    assert dict(status_rows(own(648)))["waits for"] == words
    assert problems(own(648), 1000.0, 300.0) == [f"waits for {words}"]
    assert problems(own(20), 1000.0, 300.0) == [] == problems(own(648, num_with_signal=1), 1000.0, 300.0)
    (late,) = problems(own(20) | {"at_s": 2000.0}, 2000.0, 300.0)
    assert "no optimizer step" in late and "20 generated, 0 with differing rewards" in late
    assert problems(own(648) | {"is_finished": True}, 1000.0, 300.0) == []


def test_a_node_whose_groups_cannot_be_scored_or_are_all_refused_says_so() -> None:
    (cause,) = problems(own(0, num_unscored=120, error="the verifier died"), 1000.0, 300.0)
    assert "120 generated" in cause and "120 not scored (the verifier died)" in cause
    others = status_of(learns_from_others=True, num_admitted=0)
    assert dict(status_rows(others))["waits for"] == "groups of others: none came"
    refused = others | {"refusals": {"too_old": 3, "copy": 1}}
    assert dict(status_rows(refused))["waits for"] == "groups of others: 0 admitted, 4 refused (mostly too_old)"
    assert "waits for" not in dict(status_rows(others | {"num_admitted": 1}))


def test_whether_the_coordinator_answers_and_whether_the_node_is_alone_is_shown() -> None:
    assert dict(status_rows(status_of()))["coordinator"] == "none"
    assert dict(status_rows(status_of(is_coordinator_reachable=True)))["coordinator"] == "answers"
    assert "does not answer" in dict(status_rows(status_of(is_coordinator_reachable=False)))["coordinator"]
    assert dict(status_rows(status_of()))["peers"] == OTHER
    assert "alone" in dict(status_rows(status_of(peers=[])))["peers"]
    assert "alone" not in dict(status_rows(status_of(peers=[], following=following())))["peers"]


def test_how_each_peer_counts_and_why_the_coordinator_refuses_is_shown() -> None:
    rows = dict(status_rows(status_of(standing={OTHER: "newcomer"}, who_counts="members", num_entry_refused=2)))
    assert rows["peers"] == f"{OTHER} (newcomer)" and rows["counts in full"] == "members"
    assert rows["num_entry_refused"] == "2"
    refused = status_of(is_coordinator_reachable=False, coordinator_refusal="run demo denies node aaaaaaaa")
    assert dict(status_rows(refused))["coordinator"] == "run demo denies node aaaaaaaa"


def test_a_full_disk_is_a_problem_while_groups_are_dropped() -> None:
    assert problems(status_of(is_store_full=False), 1000.0, 300.0) == []
    assert "make room" in problems(status_of(is_store_full=True), 1000.0, 300.0)[0]


def test_whom_a_node_follows_and_who_follows_it_is_shown_with_whole_ids() -> None:
    follows = dict(status_rows(status_of(following=following())))["follows"]
    assert follows == f"{TRAINER} (connected; step 5 is served, 7 is the newest)"
    waits = following(is_trainer_connected=False, served_step=None)
    assert (
        dict(status_rows(status_of(following=waits)))["follows"]
        == f"{TRAINER} (not connected; no version was taken yet)"
    )
    torn = dict(status_rows(status_of(following=following(policy="", candidates=[TRAINER, OTHER]))))["follows"]
    assert "nobody" in torn and TRAINER in torn and OTHER in torn
    published = dict(
        status_rows(status_of(published_step=9, followers={OTHER: {"granted": 1, "delivered": 0, "expired": 0}}))
    )["published"]
    assert published == f"step 9, to {OTHER}"


def test_ids_are_printed_whole_in_a_narrow_terminal_and_in_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = lock_directory(tmp_path)
    status = status_of(at_s=4e9, last_step_at_s=4e9, peers=[OTHER, TRAINER], refusals={"[red]": 1})
    (tmp_path / "status.json").write_text(json.dumps(status))
    out = io.StringIO()
    monkeypatch.setattr(cli, "console", Console(file=out, width=40))
    assert CliRunner().invoke(cli.app, ["status", "--dir", str(tmp_path)]).exit_code == 0
    os.close(held)
    assert OWN in out.getvalue() and f"{OTHER}, {TRAINER}" in out.getvalue() and "[red]" in out.getvalue()


def test_a_node_that_starts_is_said_to_start(tmp_path: Path) -> None:
    held = lock_directory(tmp_path)
    with pytest.raises(Unavailable, match="is starting"):
        read_status(tmp_path)
    os.close(held)
    with pytest.raises(ConfigError, match="no status"):
        read_status(tmp_path)


async def test_the_status_of_the_process_before_is_gone_once_its_node_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trying the environments takes a while, in which the old one would look like a node that hangs."""
    (tmp_path / "status.json").write_text(json.dumps(status_of()))

    async def start(self: Daemon) -> None:
        read_status(self.config.dir)

    monkeypatch.setattr(Daemon, "_start_parts", start)
    with pytest.raises(Unavailable, match=rf"is starting \(pid {os.getpid()}\)"):
        await Daemon(NodeConfig(dir=tmp_path)).__aenter__()


def test_a_paused_node_names_who_reads_from_it() -> None:
    rows = dict(status_rows(status_of(peers=[TRAINER], readers=[OTHER, TRAINER], paused_since_s=1.0)))
    assert rows["peers"] == f"{TRAINER}, {OTHER} (reads from this node)"


@pytest.mark.parametrize("content", ["", "{}", "[]", "3", '"at_s"', "\x00", '{"at_s": 1.0}'])
def test_a_damaged_status_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "status.json").write_text(content)
    with pytest.raises(ConfigError, match="damaged"):
        read_status(tmp_path)


def test_a_file_is_no_directory_of_a_node(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        read_status(tmp_path / "node.toml")


def test_the_command_that_mends_it_names_the_directory_that_was_asked_for(tmp_path: Path) -> None:
    stopped = status_of(was_stopped=True)
    (said,) = problems(stopped, 1005.0, 300.0, runs=False, directory=tmp_path / "my ada")
    assert f"swarm-node start '{tmp_path / 'my ada'}'" in said, "with a space: one word of a shell"


def test_figures_are_said_in_words() -> None:
    started = status_of(started_at_s=880.0, reward_mean=0.25, tokens_generated=2400, refusals={"too_old": 3})
    rows = dict(status_rows(started | {"evaluations": {"sort/held_out": 0.5}}))
    assert rows["reward"].startswith("0.250") and rows["runs for"] == "0:02:00, 20 tokens/s generated"
    assert rows["success"] == "sort held out 0.50" and rows["refused"] == "too_old 3"
    assert dict(status_rows(status_of()))["success"] == "not yet known"
    loading = dict(status_rows(status_of(step=0, is_loading=True)))
    assert loading["step"].startswith("not known yet: the model is being loaded"), "no step was lost"


def test_a_training_that_was_stopped_goes_on_with_the_command_that_began_it() -> None:
    (said,) = problems(status_of(run_id="train", was_stopped=True), 1005.0, 300.0, runs=False, directory=Path("mine"))
    assert said.endswith("swarm train mine goes on")


@pytest.mark.parametrize(
    ("reach", "words"),
    [
        ({"kind": "dialable", "host": "1.2.3.4"}, "dialled by others"),
        ({"kind": "dialable", "host": ""}, "dialled by others, as configured and not tried"),
        (
            {"kind": "dialable", "host": "1.2.3.4", "detail": "1.2.3.4:7700: no answer"},
            "dialled by others, but not by each that tried (1.2.3.4:7700: no answer)",
        ),
        ({"kind": "local", "host": ""}, "from this machine alone: it listens on a loopback address (exchange.listen)"),
        ({"kind": "unknown", "host": ""}, "not tried: nobody was there to ask"),
    ],
)
def test_who_can_dial_a_node_is_said_as_it_was_found(reach: dict[str, Any], words: str) -> None:
    assert dict(status_rows(status_of(reach=reach)))["reached"] == words


def test_a_node_without_a_name_is_called_as_its_directory(tmp_path: Path) -> None:
    assert node_name(tmp_path / "mine", status_of()) == "ada"
    for name in ("", OWN[:8]):  # an older release wrote the id
        assert node_name(tmp_path / "mine", status_of(name=name)) == "mine"
    assert node_name(tmp_path / "mine", {}) == "mine"


@pytest.mark.parametrize("logged_s", [901.0, 800.0], ids=["since", "before the newest status"])
def test_a_status_that_finds_no_room_is_no_node_that_hangs(tmp_path: Path, logged_s: float) -> None:
    logged = {"at_s": logged_s, "level": "ERROR", "message": STATUS_WITHOUT_ROOM, "fields": "[Errno 28] No space left"}
    (tmp_path / "warnings.jsonl").write_text(f"{json.dumps(logged)}\n")
    said = problems(status_of(at_s=900.0, last_step_at_s=900.0), 1000.0, 300.0, runs=True, directory=tmp_path)
    assert ("it hangs" in said[0]) is (logged_s < 900.0), said
    assert ("make room" in said[0]) is (logged_s > 900.0), said


@pytest.mark.parametrize(
    ("connections", "sockets", "is_told"), [(2, 0, True), (2, 1, False), (0, 0, False)], ids=["none", "some", "nobody"]
)
def test_a_relay_whose_port_nobody_reaches_is_told(connections: int, sockets: int, is_told: bool) -> None:
    relayed = {"reservations": 3, "connections": connections, "bytes": 99, "sockets": sockets}
    row = dict(status_rows(status_of(reach={"kind": "dialable", "host": "1.2.3.4"}, relayed=relayed)))["reached"]
    assert "passes on for 3 nodes" in row and ("nobody reached exchange.relay_port" in row) is is_told
