"""A simulation that is ended early ends its processes, says so, and reports what was reached."""

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from waits import has_ended, until

COMMAND = ("-m", "swarm.cli.main", "simulate", "--preset", "tiny", "--nodes", "2")
ENDED = "stopped by a signal: the coordinator and every node have ended; what they wrote is in"


def has_step(out: Path) -> bool:
    """True if a node made an optimizer step."""
    path = out / "swarm" / "ada" / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return any(json.loads(line)["kind"] == "step" for line in lines if line.endswith("\n"))


async def stopped(out: Path, when: Path | None, numbers: Sequence[signal.Signals]) -> tuple[int, str]:
    """Sends the signals once a file is there, or a step was made; exit code and output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *COMMAND,
        "--out",
        str(out),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background begins without it
    )
    await until(when.exists if when else lambda: has_step(out), "its beginning")
    started = psutil.Process(process.pid).children(recursive=True)
    assert started
    for number in numbers:
        process.send_signal(number)
        await asyncio.sleep(0.2)
    text, _ = await process.communicate()
    assert all(map(has_ended, started)), "it outlived the simulation"
    assert process.returncode is not None
    return process.returncode, text.decode()


async def test_ctrl_c_reports_what_was_reached_also_when_it_comes_twice(tmp_path: Path) -> None:
    places = {tmp_path / "once": [signal.SIGINT], tmp_path / "twice": [signal.SIGINT, signal.SIGINT]}
    ends = await asyncio.gather(*(stopped(out, None, numbers) for out, numbers in places.items()))
    for out, (code, text) in zip(places, ends, strict=True):
        assert code == 130, text
        assert f"{ENDED} {out}" in text
        assert "FAIL" not in text
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        assert report["result"]["swarm"]["nodes"][0]["steps"]


async def test_before_there_is_anything_to_report_one_line_says_so(tmp_path: Path) -> None:
    code, text = await stopped(tmp_path, tmp_path / "swarm" / "coordinator" / "log.txt", [signal.SIGTERM])
    assert code == 130, text
    assert f"{ENDED} {tmp_path}" in text
    assert not (tmp_path / "report.html").exists()
