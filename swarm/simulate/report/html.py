"""Report writer of a simulation: report.html (one file, no requests), report.json, report.png.

Invariant: the three show the same result; every name in the page is escaped.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from swarm.events import finite
from swarm.simulate.report import charts as svg
from swarm.simulate.report.episode_views import environment_views
from swarm.simulate.report.figures import (
    SPLITS,
    accuracy_curve,
    advantage_over_rival,
    environments_of,
    follow_rows,
    largest_gap_s,
    mean_change,
    node_rows,
    shared_step,
    smooth,
    step_curve,
    turns_rows,
)
from swarm.simulate.report.live import figure
from swarm.simulate.report.result import RIVALS, NodeResult, SimulationResult, SwarmResult
from swarm.simulate.report.terminal import arrow
from swarm.types import JsonDict, short

LEARN_PHASES = ("draw_wait", "score", "backward", "optimizer", "publish", "evaluate")
_PHASE_TITLES = {
    "draw_wait": "waiting for groups",
    "score": "scoring",
    "backward": "backward",
    "optimizer": "optimizer",
    "publish": "publishing",
    "evaluate": "evaluating",
    "other": "other",
    "generate": "generating",
}


def write_report(result: SimulationResult, out_dir: Path) -> dict[str, Path]:
    """Writes the report files into `out_dir` (made if missing).

    Returns:
        "html", "json" and, where matplotlib is installed, "png" -> path.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = {"html": out_dir / "report.html", "json": out_dir / "report.json"}
    paths["html"].write_text(render_html(result), encoding="utf-8")
    paths["json"].write_text(json.dumps(finite(as_json(result)), indent=1, allow_nan=False), encoding="utf-8")
    try:
        from swarm.simulate.report.png import write_png
    except ImportError:
        return paths
    paths["png"] = out_dir / "report.png"
    write_png(result, paths["png"])
    return paths


def as_json(result: SimulationResult) -> JsonDict:
    """Every figure of a report: the result itself and what is derived from it."""
    derived: JsonDict = {"holds": result.holds, "shared_step": shared_step(result)}
    for name, swarm in _swarms(result):
        derived[name] = {
            "minutes": swarm.minutes,
            "tokens_generated": swarm.tokens_generated,
            "nodes": [asdict(row) for row in node_rows(swarm)],
            "mean_change": {
                f"{'own' if own else 'other'}/{split}": asdict(found)
                for own in (True, False)
                for split in SPLITS
                if (found := mean_change(swarm, split, own)) is not None
            },
            "following": [asdict(row) for row in follow_rows(swarm)],
            "by_turns": [{"node": name, **asdict(row)} for name, row in turns_rows(swarm)],
            "largest_gap_s": {node.name: largest_gap_s(node) for node in swarm.nodes},
        }
    derived["advantage_over_rival"] = {
        f"{'own' if own else 'other'}/{split}": advantage_over_rival(result, split, own)
        for own in (True, False)
        for split in SPLITS
    }
    return {"derived": derived, "result": asdict(result)}


def render_html(result: SimulationResult) -> str:
    """The report as one HTML page."""
    environment = Environment(
        loader=PackageLoader("swarm.simulate.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(figure=figure, arrow=arrow, short=short, size=_size, thousands=lambda n: f"{n:,}")
    swarm = result.swarm
    return environment.get_template("report.html").render(
        result=result,
        swarm=swarm,
        cards=_cards(result),
        rows=node_rows(swarm),
        rival_rows=node_rows(result.rival) if result.rival else [],
        follow_rows=follow_rows(swarm),
        by_turns=turns_rows(swarm),
        rival_words=RIVALS[result.rival_kind],
        accuracy=[
            (title, split.replace("_", " "), accuracy_chart(result, split, own))
            for own, title in ((False, "Tasks not in its curriculum"), (True, "Tasks in its curriculum"))
            for split in ("all", "held_out")
        ],
        by_environment=[(env, _environment_chart(result, env)) for env in swarm.environments],
        reward=_reward_chart(swarm),
        ess=_step_chart(swarm, "ess_share", (0.0, 1.05)),
        mismatch=_step_chart(swarm, "mismatch_kl", None),
        sources=_sources_chart(swarm),
        ages=_ages_chart(swarm),
        age_parts=_age_parts_chart(swarm),
        refusals=_refusals(swarm),
        time=_time_chart(swarm),
        gaps={node.name: largest_gap_s(node) for node in swarm.nodes},
        problems=_problems(swarm),
        episodes=environment_views(result),
        legend=[(index, node) for index, node in enumerate(swarm.nodes)],
        time_names=[_PHASE_TITLES[name] for name in _time_names(swarm)],
    )


# --- charts -----------------------------------------------------------------------------------------


def accuracy_chart(result: SimulationResult, split: str, own: bool) -> Markup:
    """One line per node: mean accuracy over the tasks in its curriculum (`own`) or not in it; the rival dashed."""
    series: list[svg.Series] = []
    levels: list[float] = []
    for name, swarm in _swarms(result):
        for index, node in enumerate(swarm.nodes):
            label = node.name if name == "swarm" else f"{node.name} ({result.rival_kind})"
            points = accuracy_curve(node, environments_of(swarm, node, own), split)
            series.append(svg.Series(name=label, points=points, color=index, is_dashed=name == "rival"))
        found = mean_change(swarm, split, own)
        levels += [found.majority_baseline] if found is not None and name == "swarm" else []
    return svg.line_chart(
        series, x_label="steps", y_range=(0.0, 1.0), level=levels[0] if levels else None, level_name="commonest answer"
    )


def _environment_chart(result: SimulationResult, env: str) -> Markup:
    series = [
        svg.Series(
            name=f"{node.name}{'' if env in node.curriculum else ', not in its curriculum'}",
            points=accuracy_curve(node, (env,), "held_out"),
            color=index,
            is_dashed=env not in node.curriculum,
        )
        for index, node in enumerate(result.swarm.nodes)
    ]
    return svg.line_chart(series, x_label="steps", y_range=(0.0, 1.0))


def _reward_chart(swarm: SwarmResult) -> Markup:
    series = [
        svg.Series(name=node.name, points=smooth(step_curve(node, "reward", swarm)), color=index)
        for index, node in enumerate(swarm.nodes)
    ]
    marks = [
        svg.Mark(x=(at_s - swarm.first_step_at_s) / 60, text=f"{node.name}: {kind.replace('_', ' ')}", color=index)
        for index, node in enumerate(swarm.nodes)
        for at_s, kind in node.marks
        if at_s >= swarm.first_step_at_s
    ]
    return svg.line_chart(series, x_label="minutes", marks=marks)


def _step_chart(swarm: SwarmResult, name: str, y_range: tuple[float, float] | None) -> Markup:
    series = [
        svg.Series(name=node.name, points=step_curve(node, name), color=index) for index, node in enumerate(swarm.nodes)
    ]
    return svg.line_chart(series, x_label="steps", y_range=y_range)


def _sources_chart(swarm: SwarmResult) -> Markup:
    producers = list(swarm.nodes)
    known = {node.node_id for node in producers}
    names = [node.name for node in producers]
    outsiders = sorted({source for node in producers for source in node.sources} - known)
    values = [
        [float(node.sources.get(source, 0)) for source in [*(p.node_id for p in producers), *outsiders]]
        for node in producers
    ]
    return svg.matrix(names, [*names, *(short(source) for source in outsiders)], values, what="groups")


def _ages_chart(swarm: SwarmResult) -> Markup:
    names = [node.name for node in swarm.nodes]
    oldest = max((age for node in swarm.nodes for age in node.ages), default=0)
    groups = [
        (str(age), [(node.name, float(node.ages.get(age, 0))) for node in swarm.nodes]) for age in range(oldest + 1)
    ]
    return svg.bar_chart(groups, x_label="steps old when used", names=names)


def _age_parts_chart(swarm: SwarmResult) -> Markup:
    """Groups of all nodes by each part of their age."""
    parts = {"in flight": [n.ages_in_flight for n in swarm.nodes], "in queue": [n.ages_in_queue for n in swarm.nodes]}
    longest = max((age for nodes in parts.values() for ages in nodes for age in ages), default=0)
    groups = [
        (str(age), [(name, float(sum(ages.get(age, 0) for ages in nodes))) for name, nodes in parts.items()])
        for age in range(longest + 1)
    ]
    return svg.bar_chart(groups, x_label="steps", names=list(parts))


def _time_names(swarm: SwarmResult) -> list[str]:
    used = {name for node in swarm.nodes for row in _lanes(node) for name, _ in row[1]}
    return [name for name in _PHASE_TITLES if name in used]


def _lanes(node: NodeResult) -> list[tuple[str, list[tuple[str, float]]]]:
    """Two lanes per node, learning and generating: they run at the same time."""
    seconds = node.seconds
    learning = [(phase, seconds[phase]) for phase in LEARN_PHASES if seconds.get(phase, 0.0) > 0.005]
    inside = sum(value for phase, value in learning if phase in ("score", "backward", "optimizer"))
    other = seconds.get("learn", inside) - inside
    if other > 0.005:
        learning.append(("other", other))
    lanes = [(f"{node.name} learns", learning)]
    if seconds.get("generate", 0.0) > 0.005:
        lanes.append((f"{node.name} generates", [("generate", seconds["generate"])]))
    return lanes


def _time_chart(swarm: SwarmResult) -> Markup:
    titles = [_PHASE_TITLES[name] for name in _time_names(swarm)]
    rows = [
        (label, [(_PHASE_TITLES[name], value) for name, value in parts])
        for node in swarm.nodes
        for label, parts in _lanes(node)
    ]
    return svg.stacked_rows(rows, names=titles, unit="seconds")


# --- words and numbers -----------------------------------------------------------------------------


def _problems(swarm: SwarmResult) -> list[tuple[str, str, int, float]]:
    """(environment, split, n, majority baseline) of everything that was evaluated."""
    rows = {(row.env, row.split.replace("_", " ")): row for node in swarm.nodes for row in node.evaluations}
    return [(*key, row.num_problems, row.majority_baseline) for key, row in sorted(rows.items())]


def _refusals(swarm: SwarmResult) -> list[tuple[str, list[int], int]]:
    reasons = sorted({reason for node in swarm.nodes for reason in node.refusals})
    counted = [(reason, [node.refusals.get(reason, 0) for node in swarm.nodes]) for reason in reasons]
    return sorted(((reason, row, sum(row)) for reason, row in counted), key=lambda entry: -entry[2])


def _cards(result: SimulationResult) -> list[tuple[str, str, str]]:
    """(value, what it is, remark) of the figures that matter most."""
    swarm, cards = result.swarm, list[tuple[str, str, str]]()
    for own, words in ((False, "tasks not in its curriculum"), (True, "tasks in its curriculum")):
        every, held_out = (mean_change(swarm, split, own) for split in ("all", "held_out"))
        if every is not None:
            remark = f"held out {arrow(held_out)}" if held_out is not None else "mean over nodes"
            cards.append((arrow(every), words, remark))
        ahead = advantage_over_rival(result, "all", own)
        if ahead is not None:
            cards.append((f"{ahead:+.2f}", f"over {result.rival_kind}, {words}", f"at step {shared_step(result)}"))
    received = sum(node.bytes_received for node in swarm.nodes)
    useful = sum(node.bytes_useful for node in swarm.nodes)
    groups = sum(node.num_external + node.num_from_followers for node in swarm.nodes)
    own = sum(node.num_local - node.num_from_followers for node in swarm.nodes)
    aside = sum(node.num_set_aside for node in swarm.nodes)
    remark = f"{own:,} own, {aside:,} set aside" if aside else f"{own:,} own"
    cards.append((f"{groups:,}", "groups learned from others", remark))
    remark = f"{result.rival_kind} {result.rival.tokens_generated:,}" if result.rival else "all nodes"
    cards.append((f"{swarm.tokens_generated:,}", "tokens generated", remark))
    if useful:
        cards.append((_size(received), "received from peers", f"{received / useful:.2f} x what was useful"))
    return cards


def _size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def _swarms(result: SimulationResult) -> Sequence[tuple[str, Any]]:
    return [("swarm", result.swarm)] + ([("rival", result.rival)] if result.rival is not None else [])
