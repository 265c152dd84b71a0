"""The figures of `benchmarks.weights` as Markdown.

Invariant: every cell is a mean over the steps that its column names, except where its row says otherwise.
"""

from typing import Any

import numpy as np

from benchmarks._weights_rivals import RIVALS


def row(name: str, cells: list[str]) -> str:
    """Of a table."""
    return f"| {name} | " + " | ".join(cells) + " |"


class Column:
    """One window of one run."""

    def __init__(self, run: dict[str, Any], window: dict[str, Any]) -> None:
        first, last = window["steps"]
        self.head = f"lr {run['learning_rate']:.0e}, steps {first} to {last}"
        self.steps: list[dict[str, Any]] = [run["by_step"][step] for step in range(first, last + 1)]
        self.window = window
        self.full_bytes: int = self.steps[0]["full_bytes"]

    def mean(self, key: str) -> float:
        """Over the steps."""
        return float(np.mean([step[key] for step in self.steps]))

    def ratio(self, size: float) -> str:
        """Of the full size, and the size itself."""
        return f"{self.full_bytes / size:,.1f} x ({size / 1e6:.3f} MB)"

    def span(self) -> str:
        """Ratios of the worst and the best step."""
        ratios = [self.full_bytes / step["ours_bytes"] for step in self.steps]
        return f"{min(ratios):.0f} - {max(ratios):.0f} x"

    def catch_up(self) -> tuple[str, str]:
        """All steps one by one, and as one patch."""
        return catch_up(self.steps, self.window["direct"])

    def transfer(self, key: str) -> str:
        """GB/s by the clock, and by CPU seconds."""
        clock, cpu = self.window["transfer"][key]
        return f"{clock:.2f} (CPU {cpu:.2f})"


def catch_up(steps: list[dict[str, Any]], direct: dict[str, Any]) -> tuple[str, str]:
    """Bytes of all steps, and of one patch from end to end."""
    each, one = sum(step["ours_bytes"] for step in steps), direct["ours_bytes"]
    return f"{each / 1e6:.3f} MB", f"{one / 1e6:.3f} MB ({each / one:.1f} x fewer)"


def run_tables(runs: list[dict[str, Any]]) -> str:
    """The windows of all runs side by side, then each run step by step."""
    columns = [Column(run, window) for run in runs for window in run["windows"]]
    lines = [row("", [one.head for one in columns]), "|---" * (len(columns) + 1) + "|"]
    densities = [" ".join(f"{100 * step['density']:.2f}" for step in one.steps) for one in columns]
    lines.append(row("changed weights, %, step by step", densities))
    for name in RIVALS:
        sizes = [float(np.mean([step["rivals"][name] for step in one.steps])) for one in columns]
        lines.append(row(name, [one.ratio(size) for one, size in zip(columns, sizes, strict=True)]))
    lines.append(row("iid entropy floor", [one.ratio(one.mean("floor_bytes")) for one in columns]))
    lines.append(row("**ours**", [one.ratio(one.mean("ours_bytes")) for one in columns]))
    lines.append(row("ours, worst to best step", [one.span() for one in columns]))
    sync = [one.steps[-1]["ours_bytes"] + one.window["transfer"]["manifest_bytes"] for one in columns]
    lines.append(row("last step with its manifest", [one.ratio(size) for one, size in zip(columns, sync, strict=True)]))
    for key, name in (("encode_gb_s", "encode, GB/s of weights"), ("decode_gb_s", "decode, GB/s of weights")):
        lines.append(row(name, [f"{one.mean(key):.2f}" for one in columns]))
    for key, name in (("publish_gb_s", "publish: encode and hash"), ("stage_gb_s", "stage: decode and check")):
        lines.append(row(f"{name}, GB/s, last step", [one.transfer(key) for one in columns]))
    each, direct = zip(*(one.catch_up() for one in columns), strict=True)
    lines += [row("all steps, one patch each", list(each)), row("all steps, one patch from end to end", list(direct))]
    return "\n".join([*lines, "", *(by_step(run) for run in runs)])


def by_step(run: dict[str, Any]) -> str:
    """Ratios of every measured step; for the whole run where all were."""
    steps: dict[int, dict[str, Any]] = run["by_step"]
    ratios = " ".join(f"{step['full_bytes'] / step['ours_bytes']:.0f}" for step in steps.values())
    text = f"lr {run['learning_rate']:.0e}: ratios {ratios}"
    if len(steps) == max(steps):
        each, direct = catch_up(list(steps.values()), run["direct"])
        text += f"; all {len(steps)} steps {each}, as one patch {direct}"
    return text


def made_table(results: list[dict[str, Any]]) -> str:
    """One column for each learning rate."""
    lines = [row("", [f"lr {one['learning_rate']:.0e}" for one in results]), "|---" * (len(results) + 1) + "|"]
    lines.append(row("device", [one["device"] for one in results]))
    lines.append(row("parameters", [f"{one['parameters'] / 1e9:.3f} billion" for one in results]))
    ours = [one["ours"] for one in results]
    lines.append(row("ratio", [f"{one['full_bytes'] / one['ours_bytes']:.1f} x" for one in ours]))
    for key, name in (("encode_gb_s", "encode, GB/s"), ("decode_gb_s", "decode, GB/s")):
        lines.append(row(name, [f"{one[key]:.2f}" for one in ours]))
    for key, name in (("publish_gb_s", "publish, GB/s"), ("stage_gb_s", "stage, GB/s")):
        lines.append(row(name, [f"{one['transfer'][key][0]:.2f}" for one in results]))
    return "\n".join(lines)
