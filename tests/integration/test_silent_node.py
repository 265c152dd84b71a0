"""A node whose process makes no progress any more ends the simulation by name, with its last sign of life."""

import os
import signal
from pathlib import Path

import pytest

from swarm.events import Event, NodeStarted, StepMade
from swarm.simulate.local import run
from swarm.simulate.local.processes import SilenceWatch, SimulationFailed
from swarm.simulate.presets import SimulationOptions

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

BOUND_S = 20.0  # a step of two tiny nodes takes under 1 s


@pytest.mark.usefixtures("shared_forks")
async def test_a_stopped_node_is_named_with_its_last_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SilenceWatch", lambda monotonic_s: SilenceWatch(monotonic_s, BOUND_S))
    pids: dict[str, int] = {}
    shown: dict[str, str] = {}

    def watch(name: str, event: Event) -> None:
        if isinstance(event, NodeStarted):
            pids[name] = event.pid
        elif isinstance(event, StepMade) and event.step == 3 and name == "ada":
            os.kill(pids["ada"], signal.SIGSTOP)  # its status stays as it is, and the process lives

    # Where ada's last sign is that it waits for groups, it is to blame once bell has made its steps.
    options = SimulationOptions(preset="tiny", nodes=2, rounds=60, overrides=("evaluation.num_problems=2",))
    with pytest.raises(SimulationFailed, match=r"ada showed no sign of life for \d\d s; its last one: \w+") as failed:
        await run.run_swarm(options, tmp_path, watch, shown.update)
    assert "bell" not in str(failed.value), "it went on"
    assert shown["ada"] in str(failed.value)
