"""`python -m swarm.config` prints docs/configuration.md."""

import sys

from swarm.config.reference_page import markdown

sys.stdout.write(markdown())
