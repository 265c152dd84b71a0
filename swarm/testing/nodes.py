"""Builders of a node's agent and admission on toy parts.

Invariant: apart from `builders`, so that whoever needs values alone does not import a whole agent.
"""

from collections.abc import Callable
from typing import Any

from swarm.clock import ManualClock
from swarm.config import NodeConfig
from swarm.exchange.admission import Admission
from swarm.exchange.agent import Agent
from swarm.exchange.known_versions import KnownVersions
from swarm.identity import Identity
from swarm.interfaces import GroupStore
from swarm.node_context import NodeContext
from swarm.peers.peer_table import Peers
from swarm.peers.reputation import Reputation
from swarm.testing.builders import TOY_ENV, ScriptedVerifier, ToyTokenizer, make_identity


async def inline(function: Callable[..., Any], /, *arguments: object) -> Any:
    """`Offload` without threads: a plain call."""
    return function(*arguments)


def make_context(config: NodeConfig | None = None, identity: Identity | None = None, **changes: Any) -> NodeContext:
    """A node's context with the default configuration, the first test identity and a clock that stands still.

    Args:
        config: of the node.
        identity: of the node.
        changes: other fields of `NodeContext`; without `emit` events are dropped, without `offload` all runs inline.
    """
    plain: dict[str, Any] = {"clock": ManualClock(), "emit": lambda event: None, "offload": inline}
    return NodeContext(config=config or NodeConfig(), identity=identity or make_identity(), **{**plain, **changes})


def make_agent(context: NodeContext, store: GroupStore, **changes: Any) -> Agent:
    """An agent in the toy environment, over a store.

    Args:
        context: see `make_context`.
        store: of groups.
        changes: other arguments of `Agent`.
    """
    plain: dict[str, Any] = {
        "tokenizer": ToyTokenizer(),
        "verifier": ScriptedVerifier(),
        "environments": frozenset({TOY_ENV}),
    }
    return Agent(context, store=store, **{**plain, **changes})


def make_admission(context: NodeContext, store: GroupStore, **changes: Any) -> Admission:
    """Admission in the toy environment on its own, which knows no heads and no versions.

    Args:
        context: see `make_context`; bounds are those of its configuration.
        store: takes what is admitted.
        changes: other arguments of `Admission`.
    """
    config, clock = context.config, context.clock
    plain: dict[str, Any] = {
        "tokenizer": ToyTokenizer(),
        "verifier": ScriptedVerifier(),
        "peers": Peers(context.node_id),
        "versions": KnownVersions(context.node_id, clock),
        "reputation": Reputation(clock, config.exchange.groups_per_minute),
        "environments": frozenset({TOY_ENV}),
    }
    return Admission(context, store=store, **{**plain, **changes})
