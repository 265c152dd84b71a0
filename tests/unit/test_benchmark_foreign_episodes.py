"""The table of what is learned of environments that a node never generates, from reports as simulations write them."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.foreign_episodes import read, rows_of, table


def node(curriculum: str, accuracies: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Evaluated at steps 0 and 20, on both splits: only the held-out one counts."""
    rows = [
        {"env": env, "split": split, "step": step, "accuracy": value if split == "held_out" else 0.99}
        for env, values in accuracies.items()
        for step, value in zip((0, 20), values, strict=True)
        for split in ("held_out", "all")
    ]
    return {"curriculum": [curriculum], "evaluations": rows}


def report(seed: int, shared: float, silo: float) -> dict[str, Any]:
    """Two nodes; `shared` and `silo` are what the first one ends with on what it never generates."""

    def nodes(foreign: float) -> list[dict[str, Any]]:
        return [
            node("sums", {"sums": (0.2, 0.8), "walks": (0.3, foreign)}),
            node("walks", {"sums": (0.2, 0.5), "walks": (0.3, 0.7)}),
        ]

    options = {"seed": seed} if seed else {}  # the first seed is not among what was asked for
    return {
        "derived": {"shared_step": 20},
        "result": {"swarm": {"nodes": nodes(shared)}, "rival": {"nodes": nodes(silo)}, "options": options},
    }


def test_success_is_that_of_the_nodes_that_never_generate_it():
    foreign_sums, foreign_walks, own_sums, own_walks = rows_of(report(0, 0.6, 0.25))
    assert (foreign_walks.before, foreign_walks.shared, foreign_walks.silo) == (0.3, 0.6, 0.25)
    assert foreign_walks.gain == pytest.approx(0.35) and not foreign_walks.is_own
    assert (foreign_sums.env, foreign_sums.gain) == ("sums", 0.0)
    assert (own_sums.shared, own_walks.shared) == (0.8, 0.7)


def test_gains_over_seeds_have_an_interval(tmp_path: Path):
    reports = [report(seed, 0.5 + 0.1 * seed, 0.3) for seed in range(3)]
    (tmp_path / "report.json").write_text(json.dumps(reports[1]))
    assert read(tmp_path) == reports[1]
    lines = table(reports).splitlines()
    assert lines[3] == "| 0 | walks | never generate it | 0.300 | 0.500 | 0.300 | +0.200 |"
    assert "| all | walks | never generate it | | | | **+0.300 ± 0.248** |" in lines
    assert len(lines) == 2 + 3 * 4 + 4
