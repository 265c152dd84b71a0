"""The figures of `benchmarks.weights` as Markdown.

Invariant: every cell is a mean over the steps that its column names, except where its row says otherwise.
"""

from statistics import fmean
from typing import Any


def row(name: str, cells: list[str]) -> str:
    """Row of a table."""
    return f"| {name} | " + " | ".join(cells) + " |"


def run_tables(runs: list[dict[str, Any]]) -> str:
    """The windows of all runs side by side, then each run step by step."""
    windows = [(run, window) for run in runs for window in run["windows"]]
    steps = [[run["by_step"][step] for step in range(w["steps"][0], w["steps"][1] + 1)] for run, w in windows]
    full_bytes: int = steps[0][0]["full_bytes"]

    def means(key: str) -> list[float]:
        return [fmean(step[key] for step in of) for of in steps]

    def ratios(sizes: list[float]) -> list[str]:
        return [f"{full_bytes / size:,.1f} x ({size / 1e6:.3f} MB)" for size in sizes]

    heads = [f"lr {run['learning_rate']:.0e}, steps {w['steps'][0]} to {w['steps'][1]}" for run, w in windows]
    lines = [row("", heads), "|---" * (len(windows) + 1) + "|"]
    densities = [" ".join(f"{100 * step['density']:.2f}" for step in of) for of in steps]
    lines.append(row("changed weights, %, step by step", densities))
    for name in steps[0][0]["rivals"]:
        lines.append(row(name, ratios([fmean(step["rivals"][name] for step in of) for of in steps])))
    lines.append(row("iid entropy floor", ratios(means("floor_bytes"))))
    lines.append(row("**ours**", ratios(means("ours_bytes"))))
    spans = [sorted(full_bytes / step["ours_bytes"] for step in of) for of in steps]
    lines.append(row("ours, worst to best step", [f"{span[0]:.0f} - {span[-1]:.0f} x" for span in spans]))
    transfers = [window["transfer"] for _, window in windows]
    sync = [of[-1]["ours_bytes"] + each["manifest_bytes"] for of, each in zip(steps, transfers, strict=True)]
    lines.append(row("last step with its manifest", ratios(sync)))
    for key, name in (("encode_gb_s", "encode, GB/s of weights"), ("decode_gb_s", "decode, GB/s of weights")):
        lines.append(row(name, [f"{mean:.2f}" for mean in means(key)]))
    for key, name in (("publish_gb_s", "publish: encode and hash"), ("stage_gb_s", "stage: decode and check")):
        speeds = [f"{each[key][0]:.2f} (CPU {each[key][1]:.2f})" for each in transfers]
        lines.append(row(f"{name}, GB/s, last step", speeds))
    patches = [_catch_up(of, window["direct"]) for of, (_, window) in zip(steps, windows, strict=True)]
    lines.append(row("all steps, one patch each", [each for each, _ in patches]))
    lines.append(row("all steps, one patch from end to end", [direct for _, direct in patches]))
    return "\n".join([*lines, "", *map(_by_step, runs)])


def _catch_up(steps: list[dict[str, Any]], direct: dict[str, Any]) -> tuple[str, str]:
    """Bytes of all steps, and of one patch from end to end."""
    each, one = sum(step["ours_bytes"] for step in steps), direct["ours_bytes"]
    return f"{each / 1e6:.3f} MB", f"{one / 1e6:.3f} MB ({each / one:.1f} x fewer)"


def _by_step(run: dict[str, Any]) -> str:
    """Ratios of every measured step; for the whole run where all were."""
    steps: dict[int, dict[str, Any]] = run["by_step"]
    ratios = " ".join(f"{step['full_bytes'] / step['ours_bytes']:.0f}" for step in steps.values())
    text = f"lr {run['learning_rate']:.0e}: ratios {ratios}"
    if len(steps) == max(steps):
        each, direct = _catch_up(list(steps.values()), run["direct"])
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
