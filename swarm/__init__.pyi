# What type checkers see of the names that __init__.py imports when they are first asked for.

from node.python_api.agent_run import AgentRun as AgentRun
from node.python_api.agent_run import agent_run as agent_run
from node.python_api.rollout_source import RolloutSource as RolloutSource
from node.python_api.rollout_source import SourcedGroup as SourcedGroup
from node.python_api.rollout_source import connect as connect
from node.python_api.rollout_source import trl_columns as trl_columns
from node.python_api.step_metrics import Metrics as Metrics
from node.python_api.training import Callback as Callback
from node.python_api.training import Training as Training
from node.python_api.training import train as train

__version__: str
