"""`python -m swarm.telemetry` prints docs/metrics.md."""

import sys

from swarm.telemetry.metrics import markdown

sys.stdout.write(markdown())
