"""Diagnosis of a node from what it leaves on the disk: what keeps it from learning, and the fix.

Invariant: rules are pure functions of a snapshot, a file for each part of a node; nothing here writes or waits.
"""

from swarm.causes.all_rules import RULES, STATUS_RULES, diagnose, status_findings
from swarm.causes.finding import Certainty, Diagnosed, Gravity, is_healthy
from swarm.causes.read_snapshot import read_snapshot
from swarm.causes.snapshot import Snapshot

__all__ = [
    "RULES",
    "STATUS_RULES",
    "Certainty",
    "Diagnosed",
    "Gravity",
    "Snapshot",
    "diagnose",
    "is_healthy",
    "read_snapshot",
    "status_findings",
]
