"""Parts that at least two methods share, also for building new methods; one file for each kind.

Invariant: parts do not import methods, and a part of a single method is in the file of that method. A method imports
from here; functions that do not fit on that import line are imported from their own file.
"""
# ruff: noqa: F403

from swarm.objectives.parts.advantage import *
from swarm.objectives.parts.aggregate import *
from swarm.objectives.parts.clip import *
from swarm.objectives.parts.group_statistics import *
from swarm.objectives.parts.kl import *
from swarm.objectives.parts.likelihood import *
from swarm.objectives.parts.mismatch_correction import *
from swarm.objectives.parts.prompts import *
from swarm.objectives.parts.ratio import *
from swarm.objectives.parts.turns import *
