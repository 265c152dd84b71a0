# What type checkers see of the names that __init__.py imports when they are first asked for.

from node.api import Training as Training
from node.api import train as train
from node.callbacks import Callback as Callback
from node.callbacks import Metrics as Metrics
from node.rollout_source import RolloutSource as RolloutSource
from node.rollout_source import SourcedGroup as SourcedGroup
from node.rollout_source import connect as connect
from node.rollout_source import trl_columns as trl_columns

__version__: str
