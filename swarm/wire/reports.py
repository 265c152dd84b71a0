"""Messages for heartbeats and advice between a node and the coordinator.

Invariant: a message with a value that is not finite or exceeds a bound becomes None; neither side trusts the other.
"""

import math
from typing import Final

from swarm.identity import is_hex_digest
from swarm.types import Advice, EdgeReport, NodeId, NodeReport, PolicyVersion
from swarm.wire.adverts import MAX_ENDPOINTS, ROLE_NUMBERS, ROLES_BY_NUMBER, is_location
from swarm.wire.rollout_groups import MAX_STEP, Malformed, decimal, version_from_message, version_to_message
from swarm.wire.v1 import coordinator_service_pb2 as pb
from swarm.wire.v1 import policy_pb2

MAX_EDGES: Final = 64
MAX_EVALUATIONS: Final = 64
MAX_SOURCES: Final = 4096
MAX_LABEL_CHARS: Final = 80
MAX_DISPLAY_CHARS: Final = 40
MAX_AGE_STEPS: Final = 1_000_000
ADVICE_STATES: Final = frozenset({"ok", "tightened", "alarm"})
_MAX_LEASE_S: Final = 86_400.0
_MAX_COUNT: Final = 2**53


def version_or_none(message: policy_pb2.PolicyVersion) -> PolicyVersion | None:
    """Reads a policy version from its protobuf message; None if the version breaks a bound."""
    try:
        return version_from_message(message)
    except Malformed:
        return None


def report_to_heartbeat(report: NodeReport) -> pb.HeartbeatRequest:
    """Converts a node's figures to a heartbeat, with at most MAX_EDGES edges and MAX_EVALUATIONS evaluations.

    The node id is left out: it follows from the session.
    """
    return pb.HeartbeatRequest(
        name=report.name,
        roles=[ROLE_NUMBERS[role] for role in report.roles],
        endpoints=report.endpoints,
        head=version_to_message(report.head),
        tokens_per_s=report.tokens_per_s,
        reward_mean=report.reward_mean,
        num_local=report.num_local,
        num_external=report.num_external,
        num_refused=report.num_refused,
        edges=[
            pb.EdgeReport(
                source=edge.source,
                num_groups=edge.num_groups,
                age_mean_steps=edge.age_mean_steps,
                ess_share=edge.ess_share,
                mismatch_kl=edge.mismatch_kl,
                reward_mean=edge.reward_mean,
            )
            for edge in report.edges[:MAX_EDGES]
        ],
        evaluations=dict(list(report.evaluations.items())[:MAX_EVALUATIONS]),
    )


def heartbeat_to_report(message: pb.HeartbeatRequest, node_id: NodeId) -> NodeReport | None:
    """Reads the figures of the node `node_id` from its heartbeat; None if any is out of bounds."""
    head = version_or_none(message.head)
    floats = [message.tokens_per_s, message.reward_mean, *message.evaluations.values()]
    is_whole = (
        head is not None
        and len(message.name) <= MAX_DISPLAY_CHARS
        and message.name.isprintable()
        and len(message.roles) == len(set(message.roles) & set(ROLES_BY_NUMBER))
        and len(message.endpoints) <= MAX_ENDPOINTS
        and all(map(is_location, message.endpoints))
        and len(message.edges) <= MAX_EDGES
        and all(map(_is_edge, message.edges))
        and len(message.evaluations) <= MAX_EVALUATIONS
        and all(len(label) <= MAX_LABEL_CHARS and label.isprintable() for label in message.evaluations)
        and all(map(math.isfinite, floats))
        and max(message.num_local, message.num_external, message.num_refused) < _MAX_COUNT
    )
    if not is_whole or head is None:
        return None
    return NodeReport(
        node_id=node_id,
        name=message.name,
        roles=tuple(ROLES_BY_NUMBER[role] for role in message.roles),
        endpoints=tuple(message.endpoints),
        head=head,
        tokens_per_s=decimal(message.tokens_per_s),
        reward_mean=decimal(message.reward_mean),
        num_local=message.num_local,
        num_external=message.num_external,
        num_refused=message.num_refused,
        edges=tuple(map(_edge_from_message, message.edges)),
        evaluations={label: decimal(value) for label, value in message.evaluations.items()},
    )


def _is_edge(edge: pb.EdgeReport) -> bool:
    return (
        is_hex_digest(edge.source)
        and all(map(math.isfinite, (edge.age_mean_steps, edge.ess_share, edge.mismatch_kl, edge.reward_mean)))
        and 0.0 <= edge.age_mean_steps < MAX_STEP
        and 0.0 <= edge.ess_share <= 1.0 + 1e-6
    )


def _edge_from_message(edge: pb.EdgeReport) -> EdgeReport:
    return EdgeReport(
        source=edge.source,
        num_groups=edge.num_groups,
        age_mean_steps=decimal(edge.age_mean_steps),
        ess_share=min(decimal(edge.ess_share), 1.0),
        mismatch_kl=decimal(edge.mismatch_kl),
        reward_mean=decimal(edge.reward_mean),
    )


def advice_to_message(advice: Advice) -> pb.HeartbeatResponse:
    """Converts advice to the response to a heartbeat."""
    return pb.HeartbeatResponse(
        max_age_steps=-1 if advice.max_age_steps is None else advice.max_age_steps,
        source_weights=advice.source_weights,
        state=advice.state,
        lease_s=advice.lease_s,
    )


def advice_from_message(message: pb.HeartbeatResponse) -> Advice | None:
    """Reads the coordinator's advice from its response to a heartbeat; None if any value is out of bounds."""
    weights = message.source_weights
    is_whole = (
        message.max_age_steps <= MAX_AGE_STEPS
        and len(weights) <= MAX_SOURCES
        and all(is_hex_digest(source) and 0.0 <= weight <= 1.0 for source, weight in weights.items())
        and message.state in ADVICE_STATES
        and 0.0 < message.lease_s <= _MAX_LEASE_S
    )
    if not is_whole:
        return None
    return Advice(
        max_age_steps=None if message.max_age_steps < 0 else message.max_age_steps,
        source_weights={source: decimal(weight) for source, weight in weights.items()},
        state=message.state,
        lease_s=decimal(message.lease_s),
    )
