"""Contributions of each producer to a node, and refusals over time, for a page.

Invariant: rows, columns and bars are bounded however many producers there were; one row or column sums up the rest.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from swarm.pages.charts import bar_chart
from swarm.pages.swarm_map import MapLink, MapNode, swarm_map
from swarm.report.result import ContributionRow, NodeResult, SwarmResult
from swarm.types import NodeId, short

MAX_ROWS: Final = 24  # producers of a table
MAX_OUTSIDERS: Final = 8  # producers outside the report with a column of their own
MAX_REASONS: Final = 7  # with a colour of their own
NUM_BARS: Final = 24
FEWEST_OF_MAP: Final = 4  # nodes; a table says as much of fewer
OTHERS: Final = "others"


@dataclass(frozen=True, kw_only=True)
class ContributionView:
    """One row of a node's table of contributions."""

    who: str
    row: ContributionRow
    share: float  # of all that the node learned from
    reasons: str  # of refusals, commonest first


@dataclass(frozen=True, kw_only=True)
class RefusalView:
    """Refusals of a node over time."""

    name: str
    chart: Markup
    reasons: tuple[str, ...]  # in order of their colours


def names_of(swarm: SwarmResult) -> dict[NodeId, str]:
    """Names of the nodes in the report, by id; nodes without an id are left out."""
    return {node.node_id: node.name for node in swarm.nodes if node.node_id}


def contribution_views(node: NodeResult, names: Mapping[NodeId, str]) -> list[ContributionView]:
    """Rows of the first `MAX_ROWS` producers, and, if there are more, one row that sums up the others."""
    total = sum(row.num_learned_from for row in node.contributions)
    shown = list(node.contributions[:MAX_ROWS])
    views = [_view(_who(row.producer, node, names), row, total) for row in shown]
    if further := node.contributions[MAX_ROWS:]:
        views.append(_view(f"{len(further)} {OTHERS}", _sum(further), total))
    return views


def _view(who: str, row: ContributionRow, total: int) -> ContributionView:
    reasons = ", ".join(f"{reason} {count}" for reason, count in list(row.refused.items())[:3])
    return ContributionView(who=who, row=row, share=row.num_learned_from / total if total else 0.0, reasons=reasons)


def _who(producer: NodeId, node: NodeResult, names: Mapping[NodeId, str]) -> str:
    if not producer:
        return "not named"
    return f"{node.name} itself" if producer == node.node_id else names.get(producer, short(producer))


def _sum(rows: Sequence[ContributionRow]) -> ContributionRow:
    refused = Counter[str]()
    for row in rows:
        refused.update(row.refused)
    return ContributionRow(
        producer="",
        num_brought=sum(row.num_brought for row in rows),
        num_bytes=sum(row.num_bytes for row in rows),
        free_text_share=sum(row.free_text_share * row.num_brought for row in rows)
        / max(1, sum(r.num_brought for r in rows)),
        num_learned_from=sum(row.num_learned_from for row in rows),
        num_set_aside=sum(row.num_set_aside for row in rows),
        num_without_signal=sum(row.num_without_signal for row in rows),
        num_too_old=sum(row.num_too_old for row in rows),
        refused=dict(refused.most_common()),
    )


@dataclass(frozen=True, kw_only=True)
class SourcesView:
    """Table of the groups that each learner learned from."""

    producers: tuple[str, ...]  # columns
    rows: tuple[tuple[str, tuple[int, ...]], ...]  # (learner, groups by producer)


def sources_view(swarm: SwarmResult) -> SourcesView:
    """Groups that each node learned from, by producer; of producers outside of the report those with most."""
    names = names_of(swarm)
    totals = Counter[NodeId]()
    for node in swarm.nodes:
        totals.update({source: count for source, count in node.sources.items() if source not in names})
    outsiders = [source for source, _ in totals.most_common(MAX_OUTSIDERS)]
    rows = {node.name: [node.sources.get(source, 0) for source in (*names, *outsiders)] for node in swarm.nodes}
    rest = [OTHERS] if len(totals) > len(outsiders) else []
    for node in swarm.nodes if rest else ():
        rows[node.name].append(sum(node.sources.values()) - sum(rows[node.name]))
    return SourcesView(
        producers=(*names.values(), *map(short, outsiders), *rest),
        rows=tuple((name, tuple(counts)) for name, counts in rows.items()),
    )


def sources_map(swarm: SwarmResult) -> Markup:
    """Map with an arrow from each producer to each other node that learned from it; empty for few nodes, or no link."""
    names = names_of(swarm)
    if len(swarm.nodes) < FEWEST_OF_MAP:
        return Markup("")
    links = [
        MapLink(
            source=source,
            learner=node.node_id,
            weight=float(count),
            tip=f"{node.name} learned from {count:,} groups of {names.get(source) or short(source)}",
        )
        for node in swarm.nodes
        for source, count in node.sources.items()
        if source != node.node_id
    ]
    if not links:
        return Markup("")
    outsiders = dict.fromkeys(link.source for link in links if link.source not in names)
    nodes = [MapNode(key=key, name=name, is_live=True, tip=name) for key, name in names.items()]
    nodes += [
        MapNode(key=key, name=short(key), is_live=False, tip=f"{short(key)}, not shown here") for key in outsiders
    ]
    return swarm_map(nodes, links)


def refusal_views(swarm: SwarmResult) -> list[RefusalView]:
    """Refusals over time, for each node that refused a group."""
    return [_refusal_view(node) for node in swarm.nodes if node.refused_at]


def _refusal_view(node: NodeResult) -> RefusalView:
    totals = Counter({reason: sum(minutes.values()) for reason, minutes in node.refused_at.items()})
    reasons = [reason for reason, _ in totals.most_common(MAX_REASONS)]
    names = [*reasons, OTHERS] if len(totals) > len(reasons) else reasons
    begin = int(node.began_at_s // 60)
    end = max(begin, int(node.ended_at_s // 60))
    width = max(1, -(-(end - begin + 1) // NUM_BARS))  # minutes of a bar
    unit, scale = ("hours", 60) if width >= 60 else ("minutes", 1)
    bars: list[Counter[str]] = [Counter() for _ in range((end - begin) // width + 1)]
    for reason, minutes in node.refused_at.items():
        for minute, count in minutes.items():
            bar = min(max(0, (minute - begin) // width), len(bars) - 1)
            bars[bar][reason if reason in reasons else OTHERS] += count
    chart = bar_chart(
        [
            (f"{index * width / scale:.3g}", [(name, float(bar[name])) for name in names])
            for index, bar in enumerate(bars)
        ],
        x_label=f"{unit} since its first event",
        names=names,
    )
    return RefusalView(name=node.name, chart=chart, reasons=tuple(names))
