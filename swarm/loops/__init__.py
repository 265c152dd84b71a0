"""Every loop of a node, in one place: who waits for whom, what is retried, and how it all ends.

Agent side (`agent`, `neighbours`, `follow`): announce, take groups from neighbours and weights from those who hold
them, heartbeat, repair, tidy up.
Worker side (`worker`, `overlap`): generate, learn, evaluate. The learner waits only for groups of its own policy; the
generator waits only for admission capacity; nobody waits for the network.

Invariant: every task belongs to a TaskGroup, and `retry` holds the only broad `except`: at a task's boundary, where
the failure is logged with its traceback, counted and reported as an event.
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
