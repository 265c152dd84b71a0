"""Every loop of a node: waiting, retries, and the end of each task.

Agent side (`agent_loops`, `neighbours`, `fetch_weights`): announce, take groups from neighbours and weights from their
holders, heartbeat, repair, tidy up.
Worker side (`worker`, `generate_loop`, `learn_loop`): generate, learn, evaluate. The learner waits only for groups of
its own policy; the generator waits only for admission capacity; neither waits for the network.

Invariant: every task belongs to a TaskGroup, and `supervise` holds the only broad `except Exception`: at a task's
boundary, where the failure is logged with its traceback, counted and reported as an event.
"""

from swarm.loops.agent_loops import KEPT_SHARE, hand_in_versions, run_agent
from swarm.loops.learn_loop import run_worker
from swarm.loops.neighbours import neighbours_loop
from swarm.loops.worker import Ask, Encode, Greedy, Produce, Worker

__all__ = [
    "KEPT_SHARE",
    "Ask",
    "Encode",
    "Greedy",
    "Produce",
    "Worker",
    "hand_in_versions",
    "neighbours_loop",
    "run_agent",
    "run_worker",
]
