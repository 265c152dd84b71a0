"""Report writer of a run: report.html (one file, no requests) and report.json.

Invariant: both show the same result; every text in the page is escaped, and control characters are replaced.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from swarm.events import finite
from swarm.pages import charts as svg
from swarm.pages.browser import templates
from swarm.report.contributions import contribution_views, names_of, refusal_views, sources_map, sources_view
from swarm.report.episode_views import environment_views
from swarm.report.figures import (
    LearnedRow,
    Points,
    advantage_over_rival,
    follow_rows,
    happenings,
    largest_gap_s,
    learned_rows,
    mean_change,
    node_rows,
    rows_against_rival,
    shared_step,
    step_curve,
    turns_rows,
)
from swarm.report.live import figure
from swarm.report.result import RIVALS, MadeRow, NodeResult, RunResult, SwarmResult
from swarm.report.terminal import arrow
from swarm.trained.intervals import Z_95, wilson_interval
from swarm.trained.learning_evidence import Learned
from swarm.types import SPLITS, JsonDict, short

MAX_MARKS = 50  # of a node, in a chart
MAX_SHOWN = 3000  # characters of a text
MAX_SAMPLES = 8  # answers of a group
MAX_ROWS = 64  # of the table that shows who learned
MAX_BANDS = 3  # nodes whose intervals a chart of success shows
SHARE = (-0.03, 1.05)  # axis of a share, with its ends in sight
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
_OLDEST_SHOWN = 1024  # steps: bars of a chart; the log of a stranger may name any age
_STEP_CHARTS: tuple[tuple[str, str, str, tuple[float, float] | None], ...] = (
    ("ess_share", "Effective sample size", "share, by token", SHARE),
    ("mismatch_kl", "Distance of policy and generators", "KL (k3), nats per token", None),
    ("age_mean_steps", "Mean age of what was learned from", "steps", None),
    ("entropy_nats", "Entropy", "nats per token", None),
    ("grad_norm", "Gradient norm before clipping", "", None),
    ("learning_rate", "Learning rate", "", None),
    ("response_tokens", "Response length", "mean tokens, of what was learned from", None),
    ("cut_off_share", "Responses cut off by the token limit", "share, of what was learned from", SHARE),
)


def write_report(result: RunResult, out_dir: Path) -> dict[str, Path]:
    """Writes report.html and report.json into a folder, made if missing; returns their paths as "html" and "json"."""
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = {"html": out_dir / "report.html", "json": out_dir / "report.json"}
    paths["html"].write_text(render_html(result), encoding="utf-8")
    paths["json"].write_text(json.dumps(finite(as_json(result)), indent=1, allow_nan=False), encoding="utf-8")
    return paths


def as_json(result: RunResult) -> JsonDict:
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


def report_templates() -> Environment:
    """Jinja environment with the templates of this package and their filters."""
    environment = templates("swarm.report")
    environment.filters.update(
        figure=figure, arrow=arrow, short=short, size=_size, thousands=lambda n: f"{n:,}", cut=_cut, at=_at
    )
    return environment


def render_html(result: RunResult, root: str = "", pages: Sequence[tuple[str, str]] = ()) -> str:
    """The report as one HTML page.

    Args:
        result: run to show.
        root: path at which style sheet and script are served; empty for a file that stands alone.
        pages: (words, link) of further pages.
    """
    swarm = result.swarm
    return (
        report_templates()
        .get_template("report.html")
        .render(
            root=root,
            pages=pages,
            map=sources_map(swarm),
            result=result,
            max_samples=MAX_SAMPLES,
            swarm=swarm,
            cards=_cards(result),
            rows=node_rows(swarm),
            learned=[(row, _interval(row)) for row in learned_rows(result)[:MAX_ROWS]],
            ahead=[(row, _interval(row)) for row in rows_against_rival(result)[:MAX_ROWS]],
            rival_rows=node_rows(result.rival) if result.rival else [],
            follow_rows=follow_rows(swarm),
            by_turns=turns_rows(swarm),
            rival_words=RIVALS[result.rival_kind],
            by_environment=[
                (env, ", ".join(node.name for node in swarm.nodes if env in node.curriculum), chart)
                for env in swarm.environments
                if (chart := _environment_chart(result, env)) is not None
            ],
            happened=[(node.name, happenings(node)[-MAX_MARKS:]) for node in swarm.nodes if happenings(node)],
            reward=_by_node(swarm, partial(step_curve, figure="reward"), marks=_marks(swarm)),
            step_charts=_step_charts(swarm),
            made_reward=_made_chart(swarm, lambda row: row.reward),
            made_tokens=_made_chart(swarm, lambda row: row.num_tokens / 60),
            sources=sources_view(swarm),
            contributions=[
                (node, contribution_views(node, names_of(swarm))) for node in swarm.nodes if node.contributions
            ],
            refusal_views=refusal_views(swarm),
            ages=_ages_chart({node.name: node.ages for node in swarm.nodes}, "steps old when used", "s"),
            age_parts=_ages_chart(
                {
                    "in flight": _total(node.ages_in_flight for node in swarm.nodes),
                    "in queue": _total(node.ages_in_queue for node in swarm.nodes),
                },
                "steps",
                "t",
            ),
            refusals=_refusals(swarm),
            time=_time_chart(swarm),
            gaps={node.name: largest_gap_s(node) for node in swarm.nodes},
            episodes=environment_views(result),
            legend=[(index, node) for index, node in enumerate(swarm.nodes)],
            time_names=[_PHASE_TITLES[name] for name in _time_names(swarm)],
        )
    )


# --- charts -----------------------------------------------------------------------------------------


def _interval(row: LearnedRow) -> Markup:
    """Gain of a row with its interval; green if it learned, red if it got worse."""
    change = row.change
    if not change.is_change and not row.is_difference:
        return Markup("")
    low, high = change.interval
    is_good = change.verdict is Learned.YES or row.is_difference
    return svg.interval_bar(
        low, change.after - change.before, high, f"{row.node}, {change.env}: {change.gain}", is_good
    )


def _environment_chart(result: RunResult, env: str) -> Markup | None:
    """Chart of held-out success on one environment, dashed for a rival, with the interval of each share for few nodes.

    None if it was never evaluated.
    """
    series: list[svg.Series] = []
    levels: list[float] = []
    for name, swarm in _swarms(result):
        for index, node in enumerate(swarm.nodes):
            rows = [row for row in node.evaluations if row.env == env and row.split == "held_out"]
            label = node.name if name == "swarm" else f"{node.name} ({result.rival_kind})"
            spans = [(row.step, *wilson_interval(row.accuracy, row.num_problems, Z_95)) for row in rows]
            series.append(
                svg.Series(
                    name=f"{label}{'' if env in node.curriculum else ', which does not train on it'}",
                    points=[(row.step, row.accuracy) for row in rows],
                    color=index,
                    is_dashed=name == "rival",
                    spans=spans if len(swarm.nodes) <= MAX_BANDS and name == "swarm" else (),
                )
            )
            levels += [row.majority_baseline for row in rows[-1:]]
    if not levels:
        return None
    return svg.line_chart(
        series,
        x_label="steps",
        y_range=SHARE,
        level=levels[0],
        level_name="commonest answer",
        marks=_marks(result.swarm),
    )


def _by_node(
    swarm: SwarmResult,
    points_of: Callable[[NodeResult], Points],
    x_label: str = "steps",
    y_range: tuple[float, float] | None = None,
    marks: Sequence[svg.Mark] = (),
) -> Markup:
    """Chart with a line for each node."""
    series = [svg.Series(name=node.name, points=points_of(node), color=index) for index, node in enumerate(swarm.nodes)]
    return svg.line_chart(series, x_label=x_label, y_range=y_range, marks=marks)


def _marks(swarm: SwarmResult) -> list[svg.Mark]:
    """A line at each step at which something happened to a node."""
    found: list[svg.Mark] = []
    for index, node in enumerate(swarm.nodes):
        at = dict[int, list[str]]()
        for step, words in happenings(node)[-MAX_MARKS:]:
            at.setdefault(step, []).append(words)
        found += [
            svg.Mark(x=step, text=f"{node.name}, step {step}: {'; '.join(words)}", color=index)
            for step, words in at.items()
        ]
    return found


def _made_chart(swarm: SwarmResult, figure_of: Callable[[MadeRow], float]) -> Markup:
    """Chart over the minutes since each node's own beginning, so that nodes of several runs can be compared."""
    return _by_node(
        swarm, lambda node: [(row.minute - node.began_at_s // 60, figure_of(row)) for row in node.made], "minutes"
    )


def _step_charts(swarm: SwarmResult) -> list[tuple[str, str, Markup]]:
    """(title, remark, chart) of every figure of the steps that any node has and that ever changes, or is measured."""
    charts: list[tuple[str, str, Markup]] = []
    for name, title, remark, y_range in _STEP_CHARTS:
        values = {getattr(row, name) for node in swarm.nodes for row in node.steps} - {None}
        if values and (name != "learning_rate" or len(values) > 1):
            chart = _by_node(swarm, partial(step_curve, figure=name), y_range=y_range, marks=_marks(swarm))
            charts.append((title, remark, chart))
    return charts


def _ages_chart(histograms: Mapping[str, Mapping[int, int]], x_label: str, tone: str) -> Markup:
    """Chart of groups by age, as stacked bars with a part for each histogram."""
    oldest = min(max((age for ages in histograms.values() for age in ages), default=0), _OLDEST_SHOWN)
    groups = [
        (str(age), [(name, float(ages.get(age, 0))) for name, ages in histograms.items()]) for age in range(oldest + 1)
    ]
    return svg.bar_chart(groups, x_label=x_label, names=list(histograms), tone=tone)


def _total(histograms: Iterable[Mapping[int, int]]) -> Mapping[int, int]:
    total = Counter[int]()
    for each in histograms:
        total.update(each)
    return total


def _time_names(swarm: SwarmResult) -> list[str]:
    used = {name for node in swarm.nodes for row in _lanes(node) for name, _ in row[1]}
    return [name for name in _PHASE_TITLES if name in used]


def _lanes(node: NodeResult) -> list[tuple[str, list[tuple[str, float]]]]:
    """Lanes of a node: learning, and generating if it took time; both run at the same time."""
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


def _at(at_s: float) -> str:
    """Time of day in UTC, with tenths of a second; a dash for 0."""
    return time.strftime("%H:%M:%S", time.gmtime(at_s)) + f".{int(at_s % 1 * 10)}" if at_s else "-"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ... {len(text) - MAX_SHOWN:,} more characters"


def _refusals(swarm: SwarmResult) -> list[tuple[str, list[int], int]]:
    reasons = sorted({reason for node in swarm.nodes for reason in node.refusals})
    counted = [(reason, [node.refusals.get(reason, 0) for node in swarm.nodes]) for reason in reasons]
    return sorted(((reason, row, sum(row)) for reason, row in counted), key=lambda entry: -entry[2])


def _cards(result: RunResult) -> list[tuple[str, str, str]]:
    """(value, title, remark) of the figures that matter most."""
    swarm, cards = result.swarm, list[tuple[str, str, str]]()
    received = sum(node.bytes_received for node in swarm.nodes)
    useful = sum(node.bytes_useful for node in swarm.nodes)
    groups = sum(node.num_external + node.num_from_followers for node in swarm.nodes)
    own = sum(node.num_local - node.num_from_followers for node in swarm.nodes)
    aside = sum(node.num_set_aside for node in swarm.nodes)
    remark = f"{own:,} own, {aside:,} set aside" if aside else f"{own:,} own"
    alone = (f"{own:,}", "own groups learned from", f"{aside:,} set aside" if aside else "none of others")
    cards.append((f"{groups:,}", "groups learned from others", remark) if groups else alone)
    remark = f"{result.rival_kind} {result.rival.tokens_generated:,}" if result.rival else "all nodes"
    cards.append((f"{swarm.tokens_generated:,}", "tokens generated", remark))
    if useful:
        # what was received is counted since a process started last, what was useful in the whole log
        remark = f"{received / useful:.2f} x what was useful" if received >= useful else "since it started last"
        cards.append((_size(received), "received from peers", remark))
    return cards


def _size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def _swarms(result: RunResult) -> Sequence[tuple[str, Any]]:
    return [("swarm", result.swarm)] + ([("rival", result.rival)] if result.rival is not None else [])
