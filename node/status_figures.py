"""Figures that a running node writes into status.json, for `swarm status`, `swarm why`, metrics and simulations.

Invariant: plain JSON, made without waiting for anything; nothing here judges the figures: their readers do.
"""

import os
from dataclasses import asdict
from typing import Final

from swarm.config import NodeConfig
from swarm.exchange.agent import Agent
from swarm.process import written_bytes_of_tree
from swarm.types import JsonDict, Role

STATUS: Final = "status.json"  # in the directory of a node
COMPUTE_FILE: Final = "compute_dtype.txt"  # beside it: the dtype that the worker computes in, in words


def agent_figures(agent: Agent, config: NodeConfig) -> JsonDict:
    """The present figures of an agent: lineage, groups, peers, weights and trouble, in the units of their names."""
    return {
        "node_id": agent.node_id,
        "name": config.shown_name,
        "run_id": config.run_id,
        "pid": os.getpid(),
        "reward_mean": agent.own_groups.reward_mean.value,
        "step": agent.newest_version.step,
        "last_step_at_s": agent.last_step_at_s,
        "paused_since_s": agent.context.pause.since_s,
        "written_bytes": written_bytes_of_tree(),
        "endpoints": list(agent.endpoints),
        "peers": sorted(agent.peers.connected),
        "readers": sorted(agent.streams.readers),
        "known_peers": len(agent.address_book.known),
        "dials": {"answered": agent.address_book.num_answered, "failed": agent.address_book.num_failed},
        "newest_dial_error": agent.address_book.newest_error,
        "num_put": agent.own_groups.num_put,
        "is_store_full": agent.own_groups.is_full,
        "num_admitted": agent.ingest.num_admitted,
        "num_local_used": agent.journal.num_local,
        "num_external_used": agent.journal.num_external,
        "num_set_aside": agent.journal.num_set_aside,
        "tokens_generated": agent.own_groups.tokens_generated,
        "bytes_sent": agent.streams.bytes_sent,
        "bytes_received": agent.ingest.bytes_received,
        "refusals": {str(reason): count for reason, count in agent.ingest.refusals.items()},
        "newest_refusals": {str(reason): newest for reason, newest in agent.ingest.newest_refusals.items()},
        "evaluations": agent.coordinator_view.evaluations,
        "replay_groups": agent.replay.num_groups,
        "replay_bytes": agent.replay.num_bytes,
        "num_failures": agent.num_failures,
        "who_counts": who_counts(config),
        "environments": {each.name: each.exchange for each in config.environments},
        "standing": {peer: agent.parties.standing_of(peer) for peer in sorted(agent.peers.connected)},
        "max_disk_bytes": config.disk.max_bytes,
        "worker": None if agent.local.activity is None else asdict(agent.local.activity),
        "guard": dict(agent.local.idle_figures),
        **_awaited(config, agent),
        "advice": agent.coordinator_view.advice.state,
        **_weights_status(agent),
        "coordinator_refusal": agent.coordinator_view.refusal,
    }


def _awaited(config: NodeConfig, agent: Agent) -> JsonDict:
    """Source of the groups that this node's learner waits for; {} without a learner."""
    if Role.TRAINER not in config.roles:
        return {}
    if Role.GENERATOR in config.roles and config.replay.local_groups:
        return {"own_since_step": asdict(agent.own_groups.since_step)}
    return {"learns_from_others": True}


def _weights_status(agent: Agent) -> JsonDict:
    """Weights that the node serves, the credit it granted, and the policy it follows."""
    status: JsonDict = {"weights_sent_bytes": agent.weight_server.bytes_sent}
    if agent.version_publisher is not None:
        status["published_step"] = agent.weight_server.head_step(agent.node_id)
        status["followers"] = agent.credit_ledger.status()
    if agent.weight_follower is not None:
        status["following"] = agent.weight_follower.status()
    return status


def who_counts(config: NodeConfig) -> str:
    """The producers whose groups count in full, in words; groups of all others together fill an eighth of a step."""
    if config.is_private:
        return "everybody"
    return "members and the nodes they invited" if config.entry.members else "nodes that the coordinator invited"
