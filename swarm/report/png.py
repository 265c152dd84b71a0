"""Overview of a simulation as one PNG: accuracy on tasks in and not in the curriculum, and the reward.

Invariant: draws on a canvas of its own; matplotlib's global state and any display stay untouched.
"""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from swarm.report.figures import accuracy_curve, environments_of, mean_change, smooth, step_curve
from swarm.report.result import RIVALS, RunResult

COLORS = ("#3b6fd4", "#d9622b", "#2f9e6e", "#a04fc4", "#c79a1e", "#d6457f", "#3aa6b9", "#7a7f87")


def write_png(result: RunResult, path: Path) -> None:
    """Draws three panels side by side, 1650 x 540 pixels: other tasks, own tasks (all problems), reward."""
    figure = Figure(figsize=(11, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: list[Any] = list(figure.subplots(1, 3))
    for axis, own, title in (
        (axes[0], False, "tasks not in its curriculum"),
        (axes[1], True, "tasks in its curriculum"),
    ):
        _accuracy(axis, result, own)
        axis.set(title=title, xlabel="steps", ylim=(0, 1))
    axes[0].set_ylabel(f"accuracy, {result.tries_words}")
    for index, node in enumerate(result.swarm.nodes):
        points = smooth(step_curve(node, "reward"))
        axes[2].plot(*_columns(points), color=COLORS[index % len(COLORS)], label=_plain(node.name))
    axes[2].set(title="reward of what was learned from", xlabel="steps")
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    if result.swarm.nodes:
        axes[2].legend(frameon=False, fontsize=8)
    figure.suptitle(_plain(result.title), fontsize=11)
    figure.savefig(path)


def _accuracy(axis: Any, result: RunResult, own: bool) -> None:
    for swarm, style in ((result.swarm, "-"), (result.rival, "--")):
        for index, node in enumerate(swarm.nodes if swarm is not None else ()):
            assert swarm is not None
            points = accuracy_curve(node, environments_of(swarm, node, own), "all")
            width = 1.8 if style == "-" else 1.2
            axis.plot(*_columns(points), style, color=COLORS[index % len(COLORS)], linewidth=width, marker=".")
    baseline = mean_change(result.swarm, "all", own)
    if baseline is not None:
        axis.axhline(baseline.majority_baseline, color="#888888", linestyle=":", linewidth=1)
    if result.rival is not None:
        axis.text(
            0.02, 0.95, f"dashed: {RIVALS[result.rival_kind]}", transform=axis.transAxes, fontsize=8, color="#666666"
        )


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _plain(text: str) -> str:
    """Text without matplotlib's math mode: names come from other machines."""
    return text.replace("$", r"\$")
