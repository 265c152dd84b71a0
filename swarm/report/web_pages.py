"""Pages about nodes in a browser, while they run and afterwards: the report live, samples, causes, single tokens.

    /KEY/                        the report of all nodes
    /KEY/node/0/                 one node: findings of `swarm why`, its newest groups, its newest steps
    /KEY/node/0/group/DIGEST/    one group: through every node that saw it, and token by token

Invariant: only reads, and only from the directories that were named; a path without the key shows none of it.
"""

import hmac
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from swarm.diagnosis import diagnose, health_words, is_healthy, read_snapshot
from swarm.errors import SwarmError
from swarm.flow import BoundedTable
from swarm.pages.browser import asset, html_page
from swarm.report.group_trace import trace_group
from swarm.report.html import render_html, report_templates
from swarm.report.node_directory import MAX_IDLE_S, NodeReports
from swarm.report.result import RunResult
from swarm.report.token_view import groups_of, tokens_as_sampled, tokens_in_update
from swarm.telemetry.page_server import Page
from swarm.telemetry.shown_updates import ShownUpdate, kept_updates, read_update
from swarm.trained.samples import SampledGroup, SampleReader

NUM_GROUPS: Final = 12  # of a node's page
NUM_ANSWERS: Final = 4  # of a group on it
NUM_STEPS: Final = 12
MAX_MADE: Final = 1024  # values that are kept for a while: mostly steps, 100 KB each at most
LEAST_S: Final = 1.0  # between two readings of the same files, and ten times as long as the reading took
_NODE = re.compile(r"node/(\d{1,4})/(?:group/([0-9a-f]{64})/)?")
_Made = TypeVar("_Made")


class WebPages:
    """Pages about some nodes.

    Example:
        pages = WebPages([Path("swarm-train")], key)
        server = PageServer(pages.page_of)
    """

    def __init__(
        self,
        paths: Sequence[Path],
        key: str,
        clock_s: Callable[[], float] = time.monotonic,
        is_trusted: bool = False,
    ) -> None:
        """Prepares the pages.

        Args:
            paths: directories of the nodes.
            key: secret that is the first part of every path.
            clock_s: monotonic clock.
            is_trusted: True: for samples, code that the directories name is loaded, whoever made them.
        """
        assert key, "nobody reads what a model wrote without a key"
        self._paths, self._is_trusted = paths, is_trusted
        self._root = f"/{key}/"
        self._clock_s = clock_s
        self._templates = report_templates()
        self._reports: NodeReports | None = None
        self._made = BoundedTable[object, tuple[float, Any]](MAX_MADE)  # key -> until when it is shown again, value

    def page_of(self, path: str) -> Page | None:
        """Renders the page of a path (blocking); without the key a page that asks for it, None for an unknown path."""
        if not hmac.compare_digest(path[: len(self._root)].encode(), self._root.encode()):
            return Page(body=b"this address lacks the key: open the one that `swarm watch --web` printed\n", status=404)
        rest = path[len(self._root) :]
        if (found := asset(rest)) is not None:
            return found
        try:
            if not rest:
                return html_page(self._overview())
            named = _NODE.fullmatch(rest)
            if named is None or int(named[1]) >= len(self._paths):
                return None
            return html_page(self._group(int(named[1]), named[2]) if named[2] else self._node(int(named[1])))
        except SwarmError as error:  # no node yet, a group that is gone, problems that are gone
            return html_page(self._render("said.html", title="not there", said=str(error)))

    def _overview(self) -> str:
        result = self._report()
        pages = [
            (f"{node.name}: what holds it up, samples, tokens", f"{self._root}node/{number}/")
            for number, node in enumerate(result.swarm.nodes)
        ]
        return render_html(result, self._root, pages)

    def _node(self, number: int) -> str:
        path, node = self._paths[number], self._report().swarm.nodes[number]
        found = self._recent(
            ("causes", number), lambda: diagnose(read_snapshot(path, time.time(), MAX_IDLE_S)), least_s=10.0
        )
        health = health_words(node.learning) if node.trains else "nothing is wrong"
        groups, remark = list[SampledGroup](), ""
        try:
            groups = self._recent(("samples", number), lambda: self._samples(number).newest(NUM_GROUPS))
        except SwarmError as error:
            remark = str(error)
        updates = [update for step in kept_updates(path)[:NUM_STEPS] if (update := self._update(number, step))]
        return self._render(
            "node.html",
            title=node.name,
            state=node.state,
            here=f"{self._root}node/{number}/",
            findings=found,
            node=node,
            is_healthy=is_healthy(found),
            health=health,
            groups=groups,
            remark=remark,
            num_answers=NUM_ANSWERS,
            updates=[(update, groups_of(update)) for update in updates],
        )

    def _group(self, number: int, digest: str) -> str:
        self._report()
        assert self._reports is not None
        path, directories = self._paths[number], self._reports.directories
        trace = self._recent(("trace", number, digest), lambda: trace_group(directories, digest), least_s=5.0)
        reader, sampled, remark = None, None, ""
        try:
            reader = self._samples(number)
            sampled = reader.group(digest)
        except SwarmError as error:
            remark = str(error)
        updates = [
            (update, () if reader is None else tokens_in_update(update, digest, reader.tokenizer))
            for step in kept_updates(path)
            if (update := self._update(number, step)) and any(each.digest == digest for each in update.rollouts)
        ]
        return self._render(
            "group.html",
            title=digest[:16],
            node=(directories[number].name, f"{self._root}node/{number}/"),
            trace=trace,
            sampled=sampled,
            remark=remark,
            views=tokens_as_sampled(sampled) if sampled is not None else (),
            updates=updates,
        )

    # --- what is read ---------------------------------------------------------------------------------

    def _report(self) -> RunResult:
        if self._reports is None:
            self._reports = NodeReports(self._paths, self._is_trusted)
        return self._recent("report", self._reports.read)

    def _samples(self, number: int) -> SampleReader:
        path = self._paths[number]
        return self._recent(("reader", number), lambda: SampleReader(path, self._is_trusted), least_s=60.0)

    def _update(self, number: int, step: int) -> ShownUpdate | None:
        # a restart may make a step again, and then another one
        return self._recent(("update", number, step), lambda: read_update(self._paths[number], step), least_s=60.0)

    def _recent(self, what: object, make: Callable[[], _Made], least_s: float = LEAST_S) -> _Made:
        """Returns the value of `what` that was made a moment ago, or makes a new one."""
        began_s = self._clock_s()
        until_s, made = self._made.get(what, (0.0, None))
        if began_s < until_s:
            return made
        made = make()
        ended_s = self._clock_s()
        self._made[what] = (ended_s + max(least_s, 10 * (ended_s - began_s)), made)
        return made

    def _render(self, template: str, **values: object) -> str:
        return self._templates.get_template(template).render(root=self._root, **values)
