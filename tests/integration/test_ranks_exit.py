"""What the launcher of a worker's ranks tells the agent."""

import subprocess
import sys

import pytest

from node.ranks import EXIT_CONFIG

RANK = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    sys.exit(2)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
time.sleep(60)
"""


@pytest.mark.timeout(120)  # imports torch
def test_a_rank_that_cannot_work_outweighs_one_that_was_ended_for_it() -> None:
    program = f"import sys; from node.ranks import launch; sys.exit(launch(2, ['-c', {RANK!r}]))"
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == EXIT_CONFIG
