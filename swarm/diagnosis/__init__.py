"""Diagnosis of a node from the files in its directory: why it does not learn, and the fix.

Invariant: only readers import this package (`swarm why`, `swarm status`, `swarm watch`, the pages); a node writes
figures and does not load it. Rules are pure functions of a snapshot; nothing here writes or waits.

Example:
    findings = diagnose(read_snapshot(directory, time.time()))
"""

from swarm.diagnosis.read_snapshot import read_snapshot
from swarm.diagnosis.rules import RULES, STATUS_RULES, diagnose, health_words, is_healthy, status_findings
from swarm.diagnosis.snapshot import Diagnosed, Gravity, Snapshot

__all__ = [
    "RULES",
    "STATUS_RULES",
    "Diagnosed",
    "Gravity",
    "Snapshot",
    "diagnose",
    "health_words",
    "is_healthy",
    "read_snapshot",
    "status_findings",
]
