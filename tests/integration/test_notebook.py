"""The notebook runs from its first cell to its last, as in a kernel: in one namespace, inside a running event loop."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"

# A kernel's event loop runs while a cell does, and `inspect` finds the source of a cell, as IPython sees to.
KERNEL = """
import asyncio, json, linecache, sys

async def run(cells):
    names = {"__name__": "__main__"}
    for number, source in enumerate(cells):
        place = f"<cell {number}>"
        linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
        exec(compile(source, place, "exec"), names)

asyncio.run(run(json.load(sys.stdin)))
"""


def cells() -> list[dict[str, Any]]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_it_has_the_form_that_notebooks_have_and_holds_no_output() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert len({cell["id"] for cell in cells()}) == len(cells())
    for cell in cells():
        of_code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set[str]()
        assert cell.keys() == {"cell_type", "id", "metadata", "source"} | of_code
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


async def test_every_cell_runs(tmp_path: Path) -> None:
    sources = ["".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code"]
    quick = [source.replace("steps=30", "steps=4").replace("num_problems=32", "num_problems=4") for source in sources]
    assert quick != sources
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KERNEL),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "agg"},
    )
    try:
        out, err = await process.communicate(json.dumps(quick).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()[-3000:]
    assert "step 4" in out.decode() and "right: " in out.decode()
    assert (tmp_path / "first-steps-model" / "model.safetensors").exists()
