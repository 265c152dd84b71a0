"""The sink against the real trackio, offline: figures, episodes as traces, ailments as alerts, and a restart."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from node.ailment_alerts import AilmentAlerts
from swarm.config import NodeConfig, TelemetryConfig
from swarm.episode import EpisodeOutcome, Message, Transition
from swarm.telemetry.recorder import Telemetry, make_sinks
from swarm.telemetry.shown_episodes import ShownEpisode, write_episodes

REASON = "needs pip install 'swarm-trainer[trackio]'; make nightly has an environment with it"
trackio: Any = pytest.importorskip("trackio", reason=REASON, exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the user's own dashboard looks."""
    for module in ("trackio", "trackio.utils", "trackio.sqlite_storage"):
        with contextlib.suppress(AttributeError):
            monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def episode(step: int, *actions: str) -> ShownEpisode:
    turns = [Transition(messages=(Message(role="user", content="higher"),)) for _ in actions[1:]]
    outcome = EpisodeOutcome(reward=0.5, transitions=(*turns, Transition(is_end=True, rewards={"outcome": 0.5})))
    opening = (Message(role="user", content="guess 1 to 9"),)
    return ShownEpisode(
        step=step, env="guess", task_id=7, opening=opening, actions=actions, outcome=outcome, reference="5"
    )


def telemetry(directory: Path) -> Telemetry:
    settings = {"learner": {"recipe": "dapo"}}
    return Telemetry("ada", make_sinks(TelemetryConfig(trackio_project="sums"), directory, "ada", settings))


def stored() -> Any:
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage


def test_figures_traces_and_alerts_arrive_and_a_restart_goes_on(tmp_path: Path) -> None:
    sink: Any
    first = telemetry(tmp_path)
    (sink,) = first._sinks
    sink.write(1, {"learn/reward_mean": 0.25, "learn/loss": float("nan")})
    write_episodes(tmp_path, [episode(1, "3", "5")])
    assert first.takes_alerts
    ailment = {"name": "alone", "claim": "no node", "gravity": "harms", "evidence": ["0 peers"], "fix": "open a port"}
    note = ailment | {"name": "finished", "gravity": "note"}
    alerts = AilmentAlerts(config=NodeConfig(dir=tmp_path), alert=first.alert)
    for findings in ([ailment, note], [ailment], [], [ailment]):
        alerts.take(findings)
    first.close()

    second = telemetry(tmp_path)
    (sink,) = second._sinks
    sink.write(2, {"learn/reward_mean": 0.5})
    second.close()

    logs = stored().get_logs("sums", "ada")
    rewards = {each["step"]: each["learn/reward_mean"] for each in logs if "learn/reward_mean" in each}
    assert rewards == {1: 0.25, 2: 0.5} and stored().get_runs("sums") == ["ada"]
    assert not any("learn/loss" in each for each in logs), "it was not finite"
    assert stored().get_run_config("sums", "ada")["learner"] == {"recipe": "dapo"}
    shown = stored().get_alerts("sums")
    assert [each["title"] for each in shown] == ["alone: no node"] * 2, "again where it had gone"
    assert shown[0]["level"] == "error" and shown[0]["text"] == "0 peers\nfix: open a port"
    (trace,) = stored().get_traces("sums", "ada")
    said = [(each["role"], each["content"]) for each in trace["messages"]]
    assert said == [("user", "guess 1 to 9"), ("assistant", "3"), ("user", "higher"), ("assistant", "5")]
    assert trace["metadata"]["reward"] == 0.5 and trace["metadata"]["reference"] == "5"
