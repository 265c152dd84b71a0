"""Alerts of ailments: what `swarm why` says of the directory, in a process of its own, once while it is there."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from node.ailment_alerts import AilmentAlerts
from swarm.config import NODE_FILE, NodeConfig, TelemetryConfig
from swarm.errors import ConfigError
from swarm.telemetry import Telemetry, make_sinks
from swarm.wire.run_manifest import write_toml


async def test_what_why_finds_is_said_once(tmp_path: Path) -> None:
    config = NodeConfig(dir=tmp_path / "node")
    config.dir.mkdir()
    write_toml(config.model_dump(mode="json"), config.dir / NODE_FILE)
    said: list[tuple[str, str, bool]] = []
    came = asyncio.Event()

    def alert(title: str, text: str, *, is_grave: bool) -> None:
        said.append((title, text, is_grave))
        came.set()

    alerts = AilmentAlerts(config=config, alert=alert, every_s=0.01)
    looking = asyncio.create_task(alerts.keep())
    await came.wait()
    looking.cancel()
    await asyncio.wait([looking])
    ((title, text, is_grave),) = said
    assert title.startswith("never_ran: the node did not come up") and is_grave
    assert f"fix: swarm doctor {config.dir}" in text


async def test_an_ailment_is_not_said_again_because_a_diagnosis_between_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    looks = iter([True, False, True])
    all_taken = asyncio.Event()

    async def diagnose(_: AilmentAlerts) -> list[dict[str, Any]] | None:
        works = next(looks, None)
        if works is None:
            all_taken.set()
        ailment = {"name": "alone", "claim": "no node", "gravity": "harms", "evidence": [], "fix": ""}
        return [ailment] if works else None

    monkeypatch.setattr(AilmentAlerts, "_diagnose", diagnose)
    alerts = AilmentAlerts(
        config=NodeConfig(dir=tmp_path), alert=lambda title, text, *, is_grave: said.append(title), every_s=0.0
    )
    looking = asyncio.create_task(alerts.keep())
    await all_taken.wait()
    looking.cancel()
    await asyncio.wait([looking])
    assert said == ["alone: no node"]


def test_a_missing_trackio_is_told_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=r"trackio_project is set.*pip install 'swarm-trainer\[trackio\]'"):
        make_sinks(TelemetryConfig(trackio_project="sums"), tmp_path, "ada")
    assert not Telemetry("ada").takes_alerts
