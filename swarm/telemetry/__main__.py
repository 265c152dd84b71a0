"""Prints docs/metrics.md: `python -m swarm.telemetry`."""

import sys

from swarm.telemetry.metrics import markdown

sys.stdout.write(markdown())
