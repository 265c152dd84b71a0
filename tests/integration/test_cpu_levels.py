"""Nodes on lesser machines than this one: a lower level of processor, one core, 6 GB of memory.

Emulation of a level shows that it works and what is chosen, no speed.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from node.status_figures import COMPUTE_FILE
from swarm.simulate.local import processes
from swarm.simulate.local.run import run_swarm
from swarm.simulate.presets import SimulationOptions

pytestmark = pytest.mark.sweep

LEVELS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "lowest": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
SETTINGS = ("model.dtype=bfloat16", "worker=process", "evaluation.num_problems=8")
COMMAND = [sys.executable, "-m", "swarm.cli.main", "simulate", "--preset", "tiny", "--nodes", "2", "--rounds", "2"]


async def simulated(directory: Path, environment: dict[str, str], before: Sequence[str] = ()) -> tuple[int, str]:
    """Exit code and output of a small simulation that publishes bfloat16."""
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    process = await asyncio.create_subprocess_exec(
        *before,
        *COMMAND,
        *settings,
        "--out",
        str(directory),
        env={**os.environ, "SWARM_CACHE": str(directory / "cache"), **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    text, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, text.decode()


@pytest.mark.parametrize("level", LEVELS)
async def test_a_level_without_bfloat16_computes_in_float32(level: str, tmp_path: Path) -> None:
    code, text = await simulated(tmp_path, LEVELS[level])
    assert code == 0, text
    for name in ("ada", "bell"):
        words = (tmp_path / "swarm" / name / COMPUTE_FILE).read_text(encoding="utf-8")
        assert words.startswith("float32 (measured"), words


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to a core")
async def test_a_swarm_fits_on_one_core(tmp_path: Path) -> None:
    code, text = await simulated(tmp_path, {}, before=("taskset", "-c", "0"))
    assert code == 0, text


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="this system does not tell shared memory apart"
)
async def test_the_smallest_preset_fits_in_6_gb(tmp_path: Path) -> None:
    command = [*COMMAND[:-4], "--rounds", "3", "--out", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    ending, most_bytes = asyncio.ensure_future(process.wait()), 0
    while not ending.done():
        await asyncio.wait({ending}, timeout=0.5)
        most_bytes = max(most_bytes, await asyncio.to_thread(pss_bytes, process.pid))
    assert process.returncode == 0
    assert 10**8 < most_bytes < 6 * 10**9


def pss_bytes(pid: int) -> int:
    """Of a process and all below it: memory that several share counts once."""
    total = 0
    with suppress(psutil.Error):
        own = psutil.Process(pid)
        for each in (own, *own.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_full_info().pss
    return total


async def test_nodes_of_two_levels_and_two_dtypes_learn_from_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, started = processes.environment(), list[str]()

    def environment() -> dict[str, str]:
        started.append(["coordinator", "ada", "bell"][len(started)])
        levels = {"ada": LEVELS["avx2"], "bell": LEVELS["lowest"]}
        return {**plain, **levels.get(started[-1], {})}

    @asynccontextmanager
    async def unforked(modules: Sequence[str], log: Path) -> AsyncGenerator[None]:
        yield None  # each process imports torch itself, and then sees its level

    monkeypatch.setattr(processes, "environment", environment)
    monkeypatch.setattr("swarm.simulate.local.run.fork_server", unforked)
    overrides = (*SETTINGS, "ada:compute_dtype=float32", "bell:compute_dtype=bfloat16", "replay.barrier=true")
    options = SimulationOptions(preset="tiny", nodes=2, rounds=3, overrides=overrides)
    run = await run_swarm(options, tmp_path, lambda name, event: None, lambda last_signs: None)
    for node in run.nodes:
        kinds = [json.loads(line) for line in (tmp_path / node.name / "events.jsonl").read_text().splitlines()]
        assert not [event for event in kinds if event["kind"] == "refused"], "honest groups"
        brought = {event["compute_dtype"] for event in kinds if event["kind"] == "admitted"}
        assert brought == {"bfloat16" if node.name == "ada" else "float32"}
        assert node.status["num_external_used"] > 0
