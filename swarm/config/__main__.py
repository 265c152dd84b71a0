"""Prints docs/configuration.md: `python -m swarm.config`."""

import sys

from swarm.config.reference_page import markdown

sys.stdout.write(markdown())
