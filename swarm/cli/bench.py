"""`swarm bench`: the benchmarks of the source checkout.

Invariant: benchmarks are not part of the installed package, and the error without a checkout says so; a command is
the same as `python -m benchmarks.NAME`.
"""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument

from swarm.errors import ConfigError


def bench(
    context: typer.Context,
    name: Annotated[str, Argument(help="Name of the benchmark. Default: lists them.")] = "",
) -> None:
    """Run a benchmark of the source checkout; it gets the options after its name (`swarm bench staleness --quick`)."""
    root = _checkout()
    known = _known(root)
    if not name:
        table = Table(box=None, show_header=False)
        for each, question in known.items():
            table.add_row(each, question)
        Console().print(table)
        return
    if name not in known:
        raise ConfigError(f"bench {name}: no such benchmark; known: {', '.join(known)}")
    command = [sys.executable, "-m", f"benchmarks.{name}", *context.args]
    raise typer.Exit(subprocess.run(command, cwd=root, check=False).returncode)


def _checkout() -> Path:
    """The folder that holds `benchmarks/`: this package's checkout, or the working directory. Raises ConfigError."""
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (root / "benchmarks" / "staleness.py").is_file():
            return root
    raise ConfigError("bench: the benchmarks are not installed with the package; run this in a clone of the repository")


def _known(root: Path) -> dict[str, str]:
    """Name of each benchmark -> the first line of its docstring."""
    questions: dict[str, str] = {}
    for path in sorted((root / "benchmarks").glob("[!_]*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        questions[path.stem] = text.partition("\n")[0]
    return questions
