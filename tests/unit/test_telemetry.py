"""Metrics, logs and events of a node."""

import json
import logging
import math
import sys
import threading
import types
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from waits import HANG_S

from swarm.clock import ManualClock
from swarm.config import TelemetryConfig
from swarm.episode import EpisodeOutcome, Transition
from swarm.errors import ConfigError
from swarm.events import (
    ApplyFailed,
    GroupAdmitted,
    GroupPut,
    GroupRefused,
    GroupsDrawn,
    GroupUse,
    LoopFailed,
    NodeFinished,
    PolicyEvaluated,
    StepMade,
    UnknownEvent,
    VersionApplied,
    events_of,
    kind_of,
)
from swarm.telemetry import METRICS, EventLog, Telemetry, make_sinks, read_events, setup_logging, sinks
from swarm.telemetry.logs import ConsoleFormatter, JsonFormatter
from swarm.telemetry.metrics import markdown
from swarm.telemetry.recorder import MAX_SERIES, overlap_share
from swarm.telemetry.shown_episodes import ShownEpisode, read_episodes, write_episodes
from swarm.types import EdgeReport

STEP = StepMade(
    step=3,
    draw_step=3,
    digest="d3",
    loss=0.25,
    grad_norm=1.5,
    num_tokens=40,
    diagnostics={"reward_mean": 0.5, "ess_share": 0.9, "figure_of_a_plugin": 7.0},
    seconds={"score": 0.1, "draw_wait": 0.2, "generate": 2.0, "learn": 1.0, "both": 0.75},
    ages_steps=(0, 1, 5),
    num_local=2,
    num_external=1,
    edges=(
        EdgeReport(
            source="ab" * 32, num_groups=1, age_mean_steps=1.0, ess_share=0.8, mismatch_kl=0.01, reward_mean=0.5
        ),
    ),
)
STORED: dict[str, Any] = {
    "digest": "d",
    "producer": "x",
    "policy_id": "x",
    "env": "sums",
    "oldest_step": 0,
    "size_bytes": 9,
    "reward_mean": 0.5,
}


def scrape(telemetry: Telemetry) -> dict[str, float]:
    lines = generate_latest(telemetry.registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_every_metric_has_meaning_range_and_a_name_with_its_stage():
    for name, metric in METRICS.items():
        assert name.count("/") == 1 and name == name.lower()
        assert metric.meaning and metric.expected and metric.unit
        assert (metric.kind == "counter") == name.endswith("_total")
        assert (metric.kind == "histogram") == bool(metric.buckets)


def test_unknown_name_wrong_kind_and_wrong_labels_are_errors():
    telemetry = Telemetry()
    with pytest.raises(KeyError):
        telemetry.gauge("learn/lost", 1.0)
    with pytest.raises(TypeError, match="is a histogram, not a gauge"):
        telemetry.gauge("learn/age_steps", 1.0)
    with pytest.raises(TypeError, match="labels"):
        telemetry.count("exchange/refused_total", cause="too_old")


def test_a_step_event_updates_every_figure_that_follows_from_it():
    telemetry = Telemetry(clock=ManualClock(start_s=500.0))
    telemetry.record(STEP)
    figures = scrape(telemetry)
    assert figures["swarm_learn_step"] == 3
    assert figures["swarm_learn_loss"] == 0.25
    assert figures["swarm_learn_ess_share"] == pytest.approx(0.9)
    assert figures["swarm_learn_overlap_share"] == 0.75
    assert figures['swarm_learn_age_steps_bucket{le="1.0"}'] == 2
    assert figures["swarm_learn_age_steps_count"] == 3
    assert figures['swarm_learn_seconds_total{phase="score"}'] == pytest.approx(0.1)
    assert figures['swarm_learn_source_ess_share{source="abababab"}'] == pytest.approx(0.8)
    assert figures["swarm_node_last_step_timestamp_s"] == 500.0
    assert not any("plugin" in name for name in figures)


def test_events_of_the_exchange_are_counted_by_reason_origin_and_environment():
    telemetry = Telemetry()
    telemetry.record(GroupRefused(reason="too_old", producer="x", count=2))
    finishes = {"stop": 3, "length": 1}
    telemetry.record(GroupPut(**STORED, num_tokens=12, reward_parts={"found": 0.5, "outcome": 0.25}, finishes=finishes))
    telemetry.record(GroupAdmitted(**STORED, via="x", age_s=-3.0))  # the producer's clock is ahead
    groups = (
        GroupUse(digest="a", producer="us", policy_id="us", is_own_policy=True, age_steps=0),
        GroupUse(digest="b", producer="them", policy_id="us", is_own_policy=True, age_steps=3, in_flight_steps=1),
        GroupUse(digest="c", producer="them", policy_id="them", is_own_policy=False, age_steps=1, use=2),
    )
    telemetry.record(GroupsDrawn(draw_step=1, groups=groups, num_zero_variance=2, max_age_steps=4, max_reuse=2))
    telemetry.record(LoopFailed(loop="follow 3fa1bc00", error="KeyError: 1"))
    telemetry.record(UnknownEvent(kind="an event without metrics", fields={}))
    telemetry.record(
        PolicyEvaluated(step=1, env="sums", split="all", accuracy=0.75, num_problems=4, majority_baseline=0.1)
    )
    figures = scrape(telemetry)
    assert figures['swarm_exchange_refused_total{reason="too_old"}'] == 2
    assert figures['swarm_exchange_source_refused_total{source="x"}'] == 2
    assert figures['swarm_exchange_source_admitted_total{source="x"}'] == 1
    assert figures['swarm_learn_source_groups_total{source="them"}'] == 2
    assert figures['swarm_rollout_responses_total{env="sums",finish="length"}'] == 1
    assert figures['swarm_rollout_response_tokens_mean{env="sums"}'] == 3
    assert figures['swarm_rollout_groups_total{env="sums"}'] == 1
    assert figures['swarm_rollout_reward_part_mean{env="sums",reward="found"}'] == 0.5
    assert figures["swarm_exchange_arrival_s_sum"] == 0.0
    for origin in ("local", "follower", "external"):
        assert figures[f'swarm_learn_groups_total{{origin="{origin}"}}'] == 1
    assert figures["swarm_learn_age_in_flight_steps_sum"] == 1
    assert figures["swarm_learn_age_in_queue_steps_sum"] == 3
    assert figures["swarm_learn_zero_variance_groups_total"] == 2
    assert figures['swarm_node_failures_total{loop="follow"}'] == 1
    assert figures['swarm_evaluation_accuracy{env="sums",split="all"}'] == 0.75


def test_a_snapshot_sets_levels_and_never_lowers_a_counter():
    telemetry = Telemetry()
    status = {
        "bytes_received": 100,
        "bytes_sent": 50,
        "peers": ["a", "b"],
        "known_peers": 3,
        "dials": {"answered": 4, "failed": 1},
        "replay_groups": 4,
        "replay_bytes": 999,
        "advice": "alarm",
        "tokens_generated": 0,
        "at_s": 0.0,
        "restarts": {"worker": 1, "p2pd": 2},
        "is_coordinator_reachable": True,
    }
    telemetry.snapshot(status)
    later = {"restarts": {"worker": 3, "p2pd": 1}, "is_coordinator_reachable": False}
    telemetry.snapshot({**status, **later, "bytes_received": 70, "tokens_generated": 3000, "at_s": 300.0})
    figures = scrape(telemetry)
    assert figures["swarm_exchange_received_bytes_total"] == 100
    assert figures["swarm_exchange_peers"] == 2
    assert figures["swarm_node_advice"] == 2
    assert figures['swarm_node_restarts_total{process="worker"}'] == 3
    assert figures['swarm_node_restarts_total{process="p2pd"}'] == 2
    assert figures["swarm_node_coordinator_reachable"] == 0
    assert figures["swarm_rollout_tokens_per_s"] == pytest.approx(10.0, rel=1e-3)


def test_names_that_peers_choose_cannot_grow_the_registry_without_bound():
    telemetry = Telemetry()
    for index in range(3 * MAX_SERIES):
        telemetry.gauge("learn/source_ess_share", 1.0, source=f"{index:08x}")
    sources = [name for name in scrape(telemetry) if name.startswith("swarm_learn_source_ess_share{")]
    assert len(sources) == MAX_SERIES
    assert 'swarm_learn_source_ess_share{source="000000bf"}' in sources  # the newest stays


def test_metrics_are_served_until_stopped():
    telemetry = Telemetry(node="ada")
    stop = telemetry.serve("127.0.0.1:0")
    try:
        with urllib.request.urlopen(f"http://{telemetry.metrics_address}/metrics", timeout=HANG_S) as answer:
            body = answer.read().decode()
    finally:
        stop()
    assert 'swarm_node_info{node="ada"} 1.0' in body
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{telemetry.metrics_address}/metrics", timeout=1)


def test_a_taken_or_malformed_address_is_a_configuration_error_that_names_the_key():
    first = Telemetry()
    stop = first.serve("127.0.0.1:0")
    try:
        with pytest.raises(ConfigError, match=r"telemetry\.metrics_listen"):
            Telemetry().serve(first.metrics_address)
    finally:
        stop()
    with pytest.raises(ConfigError, match="not host:port"):
        Telemetry().serve("nine thousand")


def test_tensorboard_files_hold_the_curves(tmp_path: Path):
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    telemetry = Telemetry(sinks=make_sinks(TelemetryConfig(tensorboard=True), tmp_path, "ada"))
    telemetry.record(STEP)
    telemetry.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    points = {v.tag: v.simple_value for event in LegacyEventFileLoader(str(path)).Load() for v in event.summary.value}
    assert points["learn/loss"] == 0.25
    assert points["learn/source_ess_share/abababab"] == pytest.approx(0.8)


def test_wandb_gets_the_figures_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, Any]] = []
    run = types.SimpleNamespace(
        log=lambda figures, step: calls.append((f"step {step}", figures)), finish=lambda: calls.append(("finish", None))
    )
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: calls.append(("init", options)) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    telemetry = Telemetry(sinks=make_sinks(TelemetryConfig(wandb_project="p"), tmp_path, "ada"))
    telemetry.record(replace(STEP, loss=float("nan")))
    telemetry.close()
    assert [name for name, _ in calls] == ["init", "step 3", "finish"]
    assert calls[0][1]["project"] == "p" and calls[0][1]["name"] == "ada"
    assert calls[1][1]["learn/grad_norm"] == 1.5 and "learn/loss" not in calls[1][1]


@pytest.mark.parametrize(
    ("module", "config"), [("wandb", {"wandb_project": "p"}), ("tensorboard", {"tensorboard": True})]
)
def test_a_missing_package_is_a_configuration_error_with_its_fix(
    module: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install 'swarm-trainer\[{module}\]'"):
        make_sinks(TelemetryConfig(**config), tmp_path, "ada")


class PackageError(Exception):
    """An error of a package that is not ours, as `wandb.Error`."""


@pytest.mark.parametrize("fails_at", ["write", "alert", "close"])
def test_a_sink_that_fails_is_dropped_and_the_node_goes_on(fails_at: str, caplog: pytest.LogCaptureFixture):
    class Failing:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def write(self, step: int, figures: dict[str, float]) -> None:
            self.note("write")

        def alert(self, title: str, text: str, *, is_grave: bool) -> None:
            self.note("alert")

        def close(self) -> None:
            self.note("close")

        def note(self, name: str) -> None:
            self.calls.append(name)
            if name == fails_at:
                raise PackageError("the other side is away")

    failing = Failing()
    telemetry = Telemetry(sinks=(failing,))
    telemetry.record(STEP)
    telemetry.alert("alone", "0 peers", is_grave=True)
    telemetry.close()
    assert failing.calls == ["write", "alert", "close"][: ["write", "alert", "close"].index(fails_at) + 1]
    assert "curves are not written any more" in caplog.text


def test_overlap_is_unknown_without_its_three_phases_and_zero_when_one_never_ran():
    assert overlap_share({"learn": 1.0}) is None
    assert overlap_share({"generate": 0.0, "learn": 1.0, "both": 0.0}) == 0.0


def test_the_page_of_metrics_is_current():
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == markdown(), "run `make docs`"


# --- events ------------------------------------------------------------------------------------------


def test_events_are_read_back_in_order_with_their_times(tmp_path: Path):
    clock = ManualClock(start_s=10.0)
    events = EventLog(tmp_path / "events.jsonl", clock)
    events.write(replace(STEP, loss=float("nan"), diagnostics={"ess_share": float("inf"), "x": 1.0}))
    clock.advance(2.0)
    events.write(NodeFinished(step=3))
    events.close()
    events.write(NodeFinished(step=4))
    step, finished = read_events(tmp_path / "events.jsonl")
    assert isinstance(step, StepMade) and math.isnan(step.loss) and math.isnan(step.diagnostics["ess_share"])
    assert replace(step, loss=0.25, diagnostics=STEP.diagnostics) == replace(STEP, at_s=10.0)
    assert finished == NodeFinished(at_s=12.0, step=3)
    assert b'{"kind":"step","at_s":10.0' in (tmp_path / "events.jsonl").read_bytes()
    assert read_events(tmp_path / "missing.jsonl") == []


def test_half_a_line_left_by_a_crash_is_dropped_and_the_rest_kept(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"a"}\n{"kind":"b' + b"x" * 100_000)
    assert [kind_of(event) for event in read_events(path)] == ["a"]
    events = EventLog(path)
    events.write(NodeFinished(step=3))
    events.close()
    assert [kind_of(event) for event in read_events(path)] == ["a", "finished"]


def test_lines_of_many_threads_never_mix(tmp_path: Path):
    events = EventLog(tmp_path / "events.jsonl")
    threads = [
        threading.Thread(
            target=lambda n=n: [events.write(LoopFailed(loop=f"{n}", error="y" * 3000)) for _ in range(50)]
        )
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events.close()
    failures = events_of(LoopFailed, read_events(tmp_path / "events.jsonl"))
    assert sorted(int(failure.loop) for failure in failures) == sorted(list(range(8)) * 50)


def test_a_full_disk_loses_events_and_not_the_node(caplog: pytest.LogCaptureFixture):
    events = EventLog(Path("/dev/full"))
    events.write(NodeFinished(step=3))
    events.write(NodeFinished(step=3))
    events.close()
    assert events.num_lost == 2
    assert caplog.text.count("events are being lost") == 1


# --- logs --------------------------------------------------------------------------------------------


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "swarm.x", "levelname": "INFO", "msg": message, "created": 0.5})
    made.__dict__.update(extra)
    return made


def test_a_json_record_has_message_fields_and_node():
    line = JsonFormatter("ada").format(record("group refused", reason="too_old", value=float("nan")))
    entry = json.loads(line)
    assert entry["at"] == "1970-01-01T00:00:00.500Z"
    assert entry["message"] == "group refused"
    assert (entry["node"], entry["reason"], entry["value"]) == ("ada", "too_old", None)


def test_a_field_from_a_peer_cannot_forge_a_line_or_steer_the_terminal():
    line = ConsoleFormatter().format(record("refused", detail="x\nINFO all is well \x1b[2J"))
    assert "\n" not in line and "\x1b" not in line


def test_tracebacks_are_kept():
    try:
        raise KeyError("lost")
    except KeyError:
        made = record("loop failed", exc_info=sys.exc_info())
    assert "KeyError: 'lost'" in json.loads(JsonFormatter().format(made))["traceback"]
    assert "KeyError: 'lost'" in ConsoleFormatter().format(made)


def test_logging_is_set_up_once_and_names_the_node(capsys: pytest.CaptureFixture[str]):
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        setup_logging("INFO", "json", "ada")
        setup_logging("INFO", "json", "ada")
        logging.getLogger("swarm.test").info("started", extra={"port": 1})
        logging.getLogger("third.party").info("chatter")
        lines = capsys.readouterr().err.splitlines()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        for package in ("swarm", "node", "coordinator"):
            logging.getLogger(package).setLevel(logging.NOTSET)
    assert [json.loads(line)["message"] for line in lines] == ["started"]
    assert json.loads(lines[0])["node"] == "ada"


def test_a_version_that_was_not_taken_is_counted_and_what_is_followed_is_shown() -> None:
    telemetry = Telemetry(node="gen")
    seconds = {"stage": 0.5, "load": 0.2, "pause": 0.1}
    telemetry.record(VersionApplied(policy_id="p", step=3, digest="d", num_bytes=700, seconds=seconds))
    telemetry.record(ApplyFailed(policy_id="p", step=3, digest="d", error="canary differs"))
    value = telemetry.registry.get_sample_value
    assert value("swarm_weights_applied_total") == 1 and value("swarm_weights_apply_failed_total") == 1
    assert value("swarm_weights_applied_bytes_total") == 700 and value("swarm_weights_pause_s_sum") == 0.1


def test_episodes_are_read_for_trackio_only_after_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, traced, num_read = types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None), list[int](), 0

    def trace(messages: object, metadata: dict[str, int]) -> None:
        traced.append(metadata["task"])

    def read(directory: Path) -> tuple[ShownEpisode, ...]:
        nonlocal num_read
        num_read += 1
        return read_episodes(directory)

    def evaluated(step: int) -> None:
        outcome = EpisodeOutcome(reward=1.0, transitions=(Transition(is_end=True, rewards={"outcome": 1.0}),))
        episode = ShownEpisode(
            step=step, env="e", task_id=step, opening=(), actions=("a",), outcome=outcome, reference=""
        )
        write_episodes(tmp_path, [episode])

    monkeypatch.setitem(sys.modules, "trackio", types.SimpleNamespace(init=lambda **_: run, Trace=trace))
    monkeypatch.setattr(sinks, "read_episodes", read)
    evaluated(1)
    sink = sinks.TrackioSink("p", "ada", tmp_path, {})
    for step in (1, 2, 3):
        sink.write(step, {})
    assert (num_read, traced) == (1, []), "those of before the start are known"
    evaluated(4)
    for step in (4, 5):
        sink.write(step, {})
    sink.close()
    assert (num_read, traced) == (2, [4])
