"""Lets the formulas import `golden_case`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
