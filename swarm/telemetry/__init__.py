"""Telemetry of a node: metrics, structured logs, an event log, and live curves.

Invariant: each `Telemetry` has its own registry, and a figure that cannot be delivered never stops the node. Every
metric is named and explained in `swarm.telemetry.metrics`.
"""

from swarm.telemetry.event_log import EventLog, EventTail, count_refusals, read_events
from swarm.telemetry.logs import setup_logging
from swarm.telemetry.metrics import METRICS
from swarm.telemetry.recorder import Telemetry, make_sinks
from swarm.telemetry.warning_log import (
    LoggedWarning,
    WarningLog,
    drop_old_warnings,
    log_as,
    note_warning,
    read_warnings,
)

__all__ = [
    "METRICS",
    "EventLog",
    "EventTail",
    "LoggedWarning",
    "Telemetry",
    "WarningLog",
    "count_refusals",
    "drop_old_warnings",
    "log_as",
    "make_sinks",
    "note_warning",
    "read_events",
    "read_warnings",
    "setup_logging",
]
