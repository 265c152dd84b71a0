"""Telemetry recorder: turns events and statuses into metrics on /metrics, and into curves by step for sinks.

Invariant: a metric name that is not in `METRICS`, or wrong labels, is a bug and raises; a sink that fails is dropped,
with one error in the log.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from swarm.clock import Clock, SystemClock
from swarm.config import TelemetryConfig
from swarm.errors import ConfigError
from swarm.events import (
    ApplyFailed,
    Event,
    GroupAdmitted,
    GroupPut,
    GroupRefused,
    GroupsDrawn,
    LoopFailed,
    PolicyEvaluated,
    StepMade,
    VersionApplied,
)
from swarm.telemetry.metrics import METRICS, Kind, Metric
from swarm.telemetry.page_server import Page, PageServer
from swarm.types import EdgeReport, JsonDict, short

logger = logging.getLogger(__name__)

MAX_SERIES = 64  # kept per metric with label `source` or `reward`: names that others choose are bounded
_ADVICE = {"ok": 0, "tightened": 1, "alarm": 2}
_BY_AGE = {
    "ess_share": "learn/age_ess_share",
    "mismatch_kl_k3": "learn/age_mismatch_kl",
    "log_ratio_m2": "learn/age_log_ratio_m2",
}
_PHASES_OF_OVERLAP = ("generate", "learn", "both")


class Sink(Protocol):
    """A writer of curves by optimizer step. If a method raises, the sink is dropped without being closed."""

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Adds the figures of one step, by metric name; called several times for a step, with NaN possible."""
        ...

    def close(self) -> None:
        """Writes pending figures and closes the sink."""
        ...


@runtime_checkable
class AlertSink(Protocol):
    """A sink that also shows alerts; a `Sink` with this method receives them."""

    def alert(self, title: str, text: str, *, is_grave: bool) -> None:
        """Shows an alert at the newest step."""
        ...


class Telemetry:
    """The metrics of one node or coordinator.

    Example:
        telemetry = Telemetry(node="ada")
        stop = telemetry.serve("127.0.0.1:9100")
        telemetry.count("exchange/refused_total", reason="too_old")
    """

    def __init__(self, node: str = "", sinks: tuple[Sink, ...] = (), clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.registry = CollectorRegistry()
        self.metrics_address = ""  # host:port once served
        self._sinks = list(sinks)
        self._series: dict[str, list[tuple[str, ...]]] = defaultdict(list)
        self._totals: dict[tuple[object, ...], float] = {}
        self._generated: tuple[float, float] | None = None  # tokens, at_s
        self._tokens_per_s = 0.0
        self._families = {name: _family(metric, self.registry) for name, metric in METRICS.items()}
        if node:
            info = Gauge("swarm_node_info", "Name of this process, always 1", ["node"], registry=self.registry)
            info.labels(node).set(1)

    # --- one figure ------------------------------------------------------------------------------

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge. Raises KeyError for an unknown name, TypeError for another kind or wrong labels."""
        self._child(name, "gauge", labels).set(value)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Adds to a counter. Raises as `gauge`; ValueError for a negative amount."""
        self._child(name, "counter", labels).inc(amount)

    def total(self, name: str, value: float, **labels: str) -> None:
        """Adds the growth of a total kept elsewhere to a counter; a lower total adds nothing. Raises as `gauge`."""
        key = (name, *sorted(labels.items()))
        grown = value - self._totals.get(key, 0.0)
        self._totals[key] = value
        self.count(name, max(0.0, grown), **labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Adds one observation to a histogram. Raises as `gauge`."""
        self._child(name, "histogram", labels).observe(value)

    def _child(self, name: str, kind: Kind, labels: dict[str, str]) -> Any:
        metric = METRICS[name]
        if metric.kind != kind:
            raise TypeError(f"{name} is a {metric.kind}, not a {kind}")
        if set(labels) != set(metric.labels):
            raise TypeError(f"{name}: labels {sorted(labels)} given, {sorted(metric.labels)} declared")
        family = self._families[name]
        if not labels:
            return family
        if "source" in labels or "reward" in labels:  # peers and plugins may name ever new ones
            self._bound(name, family, tuple(labels[each] for each in metric.labels))
        return family.labels(**labels)

    def _bound(self, name: str, family: Any, values: tuple[str, ...]) -> None:
        known = self._series[name]
        if values in known:
            known.remove(values)
        elif len(known) >= MAX_SERIES:
            family.remove(*known.pop(0))
        known.append(values)

    # --- events and snapshots of a node ------------------------------------------------------------

    def record(self, event: Event) -> None:
        """Updates every metric, and the curves, that follow from an event."""
        match event:
            case GroupAdmitted():
                self.count("exchange/admitted_total")
                self.count("exchange/source_admitted_total", source=short(event.producer))
                self.gauge("exchange/source_free_text_share", event.free_text_share, source=short(event.producer))
                self.observe("exchange/arrival_s", max(0.0, event.age_s))
            case GroupRefused():
                self.count("exchange/refused_total", event.count, reason=event.reason)
                self.count("exchange/source_refused_total", event.count, source=short(event.producer))
            case GroupPut():
                self.count("rollout/groups_total", env=event.env)
                self.count("rollout/tokens_total", event.num_tokens)
                self.gauge("rollout/reward_mean", event.reward_mean, env=event.env)
                for finish, count in event.finishes.items():
                    self.count("rollout/responses_total", count, env=event.env, finish=finish)
                if event.finishes:
                    tokens_mean = event.num_tokens / sum(event.finishes.values())
                    self.gauge("rollout/response_tokens_mean", tokens_mean, env=event.env)
                for name, value in event.reward_parts.items():
                    self.gauge("rollout/reward_part_mean", value, env=event.env, reward=name)
            case GroupsDrawn():
                self._record_draw(event)
            case StepMade():
                self._record_step(event)
            case PolicyEvaluated():
                self.gauge("evaluation/accuracy", event.accuracy, env=event.env, split=event.split)
                self._draw_curves(event.step, {f"evaluation/{event.env}/{event.split}": event.accuracy})
            case VersionApplied():
                self.count("weights/applied_total")
                self.count("weights/applied_bytes_total", event.num_bytes)
                for phase in ("stage", "pause"):
                    if phase in event.seconds:
                        self.observe(f"weights/{phase}_s", event.seconds[phase])
            case ApplyFailed():
                self.count("weights/apply_failed_total")
            case LoopFailed():
                # "follow 3fa1..." is one loop per peer: the peer is in the log, not in a label
                self.count("node/failures_total", loop=event.loop.split(" ")[0])
            case _:
                pass  # no metric follows from it

    def snapshot(self, status: JsonDict) -> None:
        """Updates the metrics that no event holds from a node's status (see `Daemon.status`)."""
        self.total("exchange/received_bytes_total", status["bytes_received"])
        self.total("exchange/sent_bytes_total", status["bytes_sent"])
        self.gauge("exchange/peers", len(status["peers"]))
        self.gauge("exchange/known_peers", status["known_peers"])
        for result, count in status["dials"].items():
            self.total("exchange/dials_total", count, result=result)
        self.gauge("replay/groups", status["replay_groups"])
        self.gauge("replay/bytes", status["replay_bytes"])
        self.gauge("node/advice", _ADVICE.get(status["advice"], 0))
        if "is_coordinator_reachable" in status:
            self.gauge("node/coordinator_reachable", float(status["is_coordinator_reachable"]))
        if status.get("written_bytes") is not None:
            self.total("disk/written_bytes_total", status["written_bytes"])
        if status.get("reach"):
            self.gauge("node/relays", len(status["reach"]["relays"]))
        if status.get("relayed"):
            self.gauge("node/relayed_nodes", status["relayed"]["reservations"])
            self.total("node/relayed_bytes_total", status["relayed"]["bytes"])
        self._weights(status)
        for process, count in status["restarts"].items():
            self.total("node/restarts_total", count, process=process)
        self._rate(status["tokens_generated"], status["at_s"])

    def _weights(self, status: JsonDict) -> None:
        """Updates the metrics of published, served and followed weights, if the node has any."""
        self.total("weights/sent_bytes_total", status.get("weights_sent_bytes", 0))
        if status.get("published_step") is not None:
            self.gauge("weights/published_step", status["published_step"])
            self.gauge("weights/followers", len(status["followers"]))
        following = status.get("following")
        if following is None:
            return
        self.total("weights/fetched_bytes_total", following["bytes_fetched"])
        self.gauge("weights/credit_groups", following["credit"])
        if following["served_step"] is not None:
            self.gauge("weights/served_step", following["served_step"])
            self.gauge("weights/behind_steps", max(0, following["head_step"] - following["served_step"]))

    def _rate(self, tokens: float, at_s: float) -> None:
        """Updates the generation rate, an exponential mean with a time constant of 30 s."""
        before = self._generated
        self._generated = (tokens, at_s)
        if before is None or at_s <= before[1]:
            return
        weight = 1 - math.exp(-(at_s - before[1]) / 30)
        self._tokens_per_s += weight * (max(0.0, tokens - before[0]) / (at_s - before[1]) - self._tokens_per_s)
        self.gauge("rollout/tokens_per_s", self._tokens_per_s)

    def _record_draw(self, draw: GroupsDrawn) -> None:
        self.count("learn/zero_variance_groups_total", draw.num_zero_variance)
        for group in draw.groups:
            self.count("learn/groups_total", origin=group.origin)
            self.count("learn/source_groups_total", source=short(group.producer))
            self.observe("learn/reuse", group.use)
            self.observe("learn/age_in_flight_steps", group.in_flight_steps)
            self.observe("learn/age_in_queue_steps", group.age_steps - group.in_flight_steps)

    def _record_step(self, step: StepMade) -> None:
        figures = {"loss": step.loss, "grad_norm": step.grad_norm, **step.diagnostics}
        # A recipe of a plug-in may have figures of its own: they are in the event file.
        curves = {f"learn/{name}": value for name, value in figures.items() if f"learn/{name}" in METRICS}
        for name, value in curves.items():
            self.gauge(name, value)
        self.gauge("learn/step", step.step)
        self.gauge("node/last_step_timestamp_s", self._clock.now_s())
        self.count("learn/trained_tokens_total", step.num_tokens)
        self.count("learn/skipped_steps_total", float(step.was_skipped))
        for age in step.ages_steps:
            self.observe("learn/age_steps", age)
        for phase, value in step.seconds.items():
            self.count("learn/seconds_total", value, phase=phase)
        if "draw_wait" in step.seconds:
            self.observe("learn/draw_wait_s", step.seconds["draw_wait"])
        if (share := overlap_share(step.seconds)) is not None:
            self.gauge("learn/overlap_share", share)
            curves["learn/overlap_share"] = share
        for edge in step.edges:
            curves |= self._record_edge(edge)
        curves |= self._record_ages(step.diagnostics)
        self._draw_curves(step.step, curves)

    def _record_edge(self, edge: EdgeReport) -> dict[str, float]:
        source = short(edge.source)
        figures = {
            "learn/source_ess_share": edge.ess_share,
            "learn/source_mismatch_kl": edge.mismatch_kl,
            "learn/source_age_steps": edge.age_mean_steps,
        }
        for name, value in figures.items():
            self.gauge(name, value, source=source)
        return {f"{name}/{source}": value for name, value in figures.items()}

    def _record_ages(self, diagnostics: Mapping[str, float]) -> dict[str, float]:
        """Sets the gauges by age range (`ess_share_age_4` covers ages 4 to 7), and returns them as curves."""
        curves: dict[str, float] = {}
        for figure, name in _BY_AGE.items():
            for key, value in diagnostics.items():
                if key.startswith(f"{figure}_age_"):
                    age = key.removeprefix(f"{figure}_age_")
                    self.gauge(name, value, age=age)
                    curves[f"{name}/{age}"] = value
        return curves

    # --- where it is read -----------------------------------------------------------------------------

    def serve(self, listen: str) -> Callable[[], None]:
        """Serves /metrics and /healthz at `listen`, in a separate thread; returns a function that stops the server.

        Raises:
            ConfigError: `listen` is not host:port, or this process cannot listen there.
        """
        host, _, port = listen.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"telemetry.metrics_listen: {listen!r} is not host:port")
        server = PageServer(self._page_of)
        try:
            bound = server.start(host, int(port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"telemetry.metrics_listen: cannot listen on {listen}: {error}") from None
        self.metrics_address = f"{host}:{bound}"
        return server.stop

    def _page_of(self, path: str) -> Page | None:
        if path == "/healthz":
            return Page(body=b"ok\n")
        if path in ("/", "/metrics"):
            return Page(body=generate_latest(self.registry), kind="text/plain; version=0.0.4")
        return None

    @property
    def takes_alerts(self) -> bool:
        """True if a sink shows alerts."""
        return any(isinstance(sink, AlertSink) for sink in self._sinks)

    def alert(self, title: str, text: str, *, is_grave: bool) -> None:
        """Sends an alert to each sink that shows alerts."""
        self._deliver(lambda sink: sink.alert(title, text, is_grave=is_grave) if isinstance(sink, AlertSink) else None)

    def close(self) -> None:
        """Flushes and closes the sinks."""
        self._deliver(lambda sink: sink.close())
        self._sinks.clear()

    def _draw_curves(self, step: int, figures: dict[str, float]) -> None:
        self._deliver(lambda sink: sink.write(step, figures))

    def _deliver(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception:  # of packages that are not ours, with errors of their own: no step depends on a curve
                logger.exception("curves are not written any more", extra={"sink": type(sink).__name__})
                self._sinks.remove(sink)


def overlap_share(seconds: dict[str, float]) -> float | None:
    """Share of the shorter of generation and learning that passed in both; None if `seconds` lacks a phase."""
    if any(phase not in seconds for phase in _PHASES_OF_OVERLAP):
        return None
    shorter = min(seconds["generate"], seconds["learn"])
    return min(1.0, seconds["both"] / shorter) if shorter > 0 else 0.0


def make_sinks(
    config: TelemetryConfig, directory: Path, node: str, settings: JsonDict | None = None
) -> tuple[Sink, ...]:
    """Creates the sinks that the configuration enables.

    Args:
        config: section of the node's configuration.
        directory: the node's directory, for files of the sinks.
        node: name of the node, for its run.
        settings: the whole configuration, shown beside the curves.

    Raises:
        ConfigError: the package of a sink is not installed.
    """
    from swarm.telemetry.sinks import TensorBoardSink, TrackioSink, WandbSink

    sinks: list[Sink] = []
    if config.tensorboard:
        sinks.append(TensorBoardSink(directory / "tensorboard"))
    if config.wandb_project:
        sinks.append(WandbSink(config.wandb_project, node, directory, settings or {}))
    if config.trackio_project:
        sinks.append(TrackioSink(config.trackio_project, node, directory, settings or {}))
    return tuple(sinks)


def _family(metric: Metric, registry: CollectorRegistry) -> Any:
    help_text = f"{metric.meaning} [{metric.unit}]"
    if metric.kind == "histogram":
        return Histogram(metric.prometheus_name, help_text, metric.labels, registry=registry, buckets=metric.buckets)
    family = Counter if metric.kind == "counter" else Gauge
    return family(metric.prometheus_name, help_text, metric.labels, registry=registry)
