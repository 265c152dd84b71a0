"""Parts that at least two methods share, and what methods of one's own are built from: a file for each kind.

Invariant: parts know nothing of methods; a method's own parts stand in its file. A method imports what it takes from
here, functions from their own file where one line does not hold them all.
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
