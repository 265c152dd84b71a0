"""The examples run as they are, as their users would run them."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
async def test_one_node_learns_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    for first in (1, 4):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ROOT / "examples" / "one_node.py"), "3", str(tmp_path)),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0
        steps = [int(step) for step in re.findall(r"^step (\d+): reward", out.decode(), re.MULTILINE)]
        assert steps == [first, first + 1, first + 2]
        assert re.search(r"held out reverse: 0\.\d+ -> 0\.\d+ in 3 steps", out.decode())
