"""Exit codes by which the launcher of a worker's ranks informs the agent."""

import os
import subprocess
import sys
from pathlib import Path

from node.ranks import EXIT_CONFIG

RANK = """
import os, signal, sys
if os.environ["RANK"] == "1":
    open({ready!r}).read()
    sys.exit(2)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
open({ready!r}, "w").close()
signal.pause()
"""


def test_a_rank_that_cannot_work_outweighs_one_that_was_ended_for_it(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    rank = RANK.format(ready=str(ready))
    program = f"import sys; from node.ranks import launch; sys.exit(launch(2, ['-c', {rank!r}]))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == EXIT_CONFIG
