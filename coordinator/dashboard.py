"""Status page of the coordinator: /, /status.json, /healthz and /metrics over plain HTTP.

Invariant: read-only; names that peers chose are escaped; the state is read on the event loop, and HTML and JSON are
made of it in the server's thread.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from markupsafe import Markup
from prometheus_client import generate_latest

from coordinator.core import CoordinatorCore
from coordinator.history import History, Moment
from swarm.addresses import split_relayed
from swarm.config import EnvironmentConfig
from swarm.errors import ConfigError
from swarm.pages.browser import SECURITY, asset, html_page, templates
from swarm.pages.charts import Series, line_chart
from swarm.pages.swarm_map import MapLink, MapNode, swarm_map
from swarm.telemetry import Telemetry
from swarm.telemetry.page_server import Page, PageServer
from swarm.types import EdgeReport, JsonDict, short

MAX_SHOWN_MEMBERS = 1000
MAX_SHOWN_ENVIRONMENTS = 32  # of those that members report
UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))  # of the charts: the longest that has three of it
BUSY_S = 3.0  # a page that takes longer is given up


class Dashboard:
    """The pages of one coordinator.

    Example:
        dashboard = Dashboard(core, "demo", link, telemetry)
        address = await dashboard.start("127.0.0.1:0")
    """

    def __init__(
        self,
        core: CoordinatorCore,
        run_id: str,
        link: Callable[[], str],
        telemetry: Telemetry,
        environments: Sequence[EnvironmentConfig] = (),
        relayed: Callable[[], JsonDict] | None = None,
    ) -> None:
        """Prepares the page; `start` serves it.

        Args:
            core: state of the coordinator.
            run_id: name of the run.
            link: returns the join link.
            telemetry: metrics of the process.
            environments: environments that the manifest of the run names.
            relayed: `RelayServicer.status` of the coordinator; None: no figures of a relay.
        """
        self._core = core
        self._run_id = run_id
        self._link = link
        self._telemetry = telemetry
        self._environments = {each.name: each.exchange for each in environments}
        self._server = PageServer(self._page_of)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._template = templates("coordinator").get_template("status.html")
        self._history = History()
        self._relayed = relayed
        self._noting: asyncio.Task[None] | None = None

    async def start(self, listen: str) -> str:
        """Starts the server; returns its host:port. Raises ConfigError if it cannot listen there."""
        host, _, port = listen.rpartition(":")
        try:
            self._loop = asyncio.get_running_loop()
            bound = await asyncio.to_thread(self._server.start, host, int(port))
            self._noting = asyncio.create_task(self._note(), name="history of the status page")
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"http_listen {listen!r}: cannot listen there: {error}") from None
        return f"{host}:{bound}"

    async def stop(self) -> None:
        """Stops the server: closes the listening socket and every connection."""
        if self._noting is not None:
            self._noting.cancel()
        await asyncio.to_thread(self._server.stop)

    def status(self) -> JsonDict:
        """Figures of the status page as JSON values, without those of the charts."""
        core, now_s = self._core, self._core.clock.now_s()
        names = {member.node_id: member.report.name for member in core.membership.all()}
        return {
            "run_id": self._run_id,
            "link": self._link(),
            "advice_state": core.advisor.state,
            "max_age_steps": core.advisor.max_age_steps,
            "num_versions": core.num_versions,
            "environments": self._environments,
            "evaluated": sorted(
                {
                    name.rpartition("/")[0]
                    for member in core.membership.all()
                    for name in member.report.evaluations
                    if name.endswith("/held_out")
                }
            )[:MAX_SHOWN_ENVIRONMENTS],
            "members": [
                {
                    "node_id": member.node_id,
                    "name": member.report.name,
                    "standing": core.parties.standing_of(member.node_id),
                    "is_live": member.is_live(now_s),
                    "last_seen_s": member.last_seen_s,
                    "reached": _reached(member.report.endpoints, names),
                    "step": member.report.head.step,
                    "reward_mean": member.report.reward_mean,
                    "tokens_per_s": member.report.tokens_per_s,
                    "num_local": member.report.num_local,
                    "num_external": member.report.num_external,
                    "num_refused": member.report.num_refused,
                    "evaluations": dict(member.report.evaluations),
                }
                for member in core.shown_members(MAX_SHOWN_MEMBERS)
            ],
            "edges": [asdict(figures) for figures in core.advisor.figures(now_s)],
            "advice": [
                {
                    "at": datetime.fromtimestamp(change.at_s, UTC).strftime("%H:%M:%S"),
                    "text": change.sentence(),
                }
                for change in list(core.advice_log)[-20:]
            ],
            "lineages": self._lineages(),
            "learners": self._learners(now_s),
        }

    def _lineages(self) -> list[JsonDict]:
        """Heads of up to `MAX_SHOWN_MEMBERS` lineages, the highest step first."""
        lineages = sorted(self._core.ledger.lineages.items(), key=lambda item: -item[1].head_step)
        return [
            {
                "policy_id": policy_id,
                "step": lineage.head_step,
                "digest": "" if lineage.versions.head is None else lineage.versions.head.digest.hex(),
                "branch": lineage.branch,
                "num_rewinds": lineage.num_rewinds,
            }
            for policy_id, lineage in lineages[:MAX_SHOWN_MEMBERS]
        ]

    def _learners(self, now_s: float) -> list[JsonDict]:
        """A row for each learner that reported edges: its name, its sources, and the mean age of their groups."""
        names = {member.node_id: member.report.name for member in self._core.membership.all()}
        rows: dict[str, list[EdgeReport]] = {}
        for reporter, _, edge in self._core.advisor.edges(now_s):
            rows.setdefault(reporter, []).append(edge)
        return [
            {
                "node_id": reporter,
                "name": names.get(reporter, reporter[:8]),
                "age_mean_steps": sum(edge.age_mean_steps * edge.num_groups for edge in edges)
                / sum(edge.num_groups for edge in edges),
                "sources": [
                    {
                        "source": edge.source,
                        "name": names.get(edge.source, edge.source[:8]),
                        "num_groups": edge.num_groups,
                        "ess_share": edge.ess_share,
                    }
                    for edge in sorted(edges, key=lambda edge: -edge.num_groups)
                ],
            }
            for reporter, edges in sorted(rows.items())[:MAX_SHOWN_MEMBERS]
        ]

    def _measure(self) -> bytes:
        core, now_s = self._core, self._core.clock.now_s()
        self._telemetry.gauge("coordinator/live_nodes", len(core.live_members()))
        self._telemetry.total("coordinator/heartbeats_total", core.num_heartbeats)
        self._telemetry.total("coordinator/refused_versions_total", core.num_refused_versions)
        self._telemetry.total("coordinator/versions_total", core.num_versions)
        if self._relayed is not None:
            relayed = self._relayed()
            self._telemetry.gauge("coordinator/relayed_nodes", relayed["reservations"])
            self._telemetry.total("coordinator/relayed_bytes_total", relayed["bytes"])
        for figures in core.advisor.figures(now_s):
            self._telemetry.gauge("coordinator/edge_ess_share", figures.ess_share, source=short(figures.source))
        return generate_latest(self._telemetry.registry)

    async def _note(self) -> None:
        while True:
            self._history.note(self._core)
            await asyncio.sleep(self._history.every_s)

    def _page_of(self, path: str) -> Page | None:
        if path == "/healthz":
            return Page(body=b"ok\n")
        if (found := asset(path[1:])) is not None:
            return found
        if path not in ("/", "/status.json", "/metrics"):
            return Page(body=b"there is /, /status.json, /healthz and /metrics\n", status=404)
        assert self._loop is not None
        taken = asyncio.run_coroutine_threadsafe(self._take(path), self._loop)
        try:
            state = taken.result(BUSY_S)
        except TimeoutError:
            taken.cancel()
            return Page(body=b"the coordinator is busy\n", status=503)
        if isinstance(state, bytes):
            return Page(body=state, kind="text/plain; version=0.0.4", headers=SECURITY)
        status, moments = state
        # text is made here, in the server's thread: 1,000 members take 0.1 s, which no heartbeat should wait for
        if path == "/status.json":
            return Page(body=json.dumps(status).encode(), kind="application/json", headers=SECURITY)
        return html_page(self._render(status, moments))

    async def _take(self, path: str) -> bytes | tuple[JsonDict, Sequence[Moment]]:
        """Reads the figures of a page on the event loop: metrics as text, else the status and the moments."""
        return self._measure() if path == "/metrics" else (self.status(), tuple(self._history.moments))

    def _render(self, status: JsonDict, moments: Sequence[Moment]) -> str:
        charts = [
            (title, remark, _course(moments, name, y_range))
            for name, title, remark, y_range in (
                (
                    "held_out",
                    "Success on held-out problems",
                    "median of the live nodes that are established",
                    (0.0, 1.0),
                ),
                ("reward", "Reward", "median of the live nodes that are established", None),
                ("num_live", "Live nodes", "", None),
                ("age_steps", "Age of what is learned from", "steps, median of the sources", None),
                ("ess_share", "Effective sample size", "median of the sources", (0.0, 1.05)),
            )
        ]
        return self._template.render(root="/", map=_map(status), charts=charts, **status)


def _reached(endpoints: Sequence[str], names: Mapping[str, str]) -> str:
    """Route to a node in words, without addresses, as the page is public; empty if the node reports none."""
    relays = [relay_id for _, relay_id in map(split_relayed, endpoints)]
    if "" in relays:
        return "dialled"
    through = [names.get(relay_id) or short(relay_id) for relay_id in dict.fromkeys(relays)]
    return f"through {', '.join(through)}" if through else ""


def _map(status: JsonDict) -> Markup:
    """Map of the members as dots, with an arrow from each source to each learner."""
    nodes = [
        MapNode(
            key=member["node_id"],
            name=member["name"] or short(member["node_id"]),
            is_live=member["is_live"],
            tip=f"{member['name']}: step {member['step']}, reward {member['reward_mean']:.2f}",
        )
        for member in status["members"]
    ]
    links = [
        MapLink(
            source=source["source"],
            learner=learner["node_id"],
            weight=float(source["num_groups"]),
            tip=f"{learner['name']} learned from {source['num_groups']:,} groups of {source['name']}, effective sample "
            f"size {source['ess_share']:.2f}",
        )
        for learner in status["learners"]
        for source in learner["sources"]
    ]
    return swarm_map(nodes, links)


def _course(moments: Sequence[Moment], name: str, y_range: tuple[float, float] | None) -> Markup:
    """Chart of one figure of the moments, over the seconds, minutes or hours of all moments."""
    span_s = moments[-1].at_s - moments[0].at_s if moments else 0.0
    unit, unit_s = next((name, s) for name, s in UNITS if span_s >= 3 * s or s == 1)
    points = [
        ((each.at_s - moments[0].at_s) / unit_s, value)
        for each in moments
        if (value := getattr(each, name)) is not None
    ]
    line = Series(name=name, points=points, color=0)
    return line_chart([line], x_label=unit, x_range=(0.0, span_s / unit_s), y_range=y_range)
