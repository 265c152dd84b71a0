"""Builders of a node's agent and admission from toy parts.

Invariant: `builders` does not import this file, so that tests of values import no agent.
"""

from collections.abc import Callable, Mapping
from typing import Any

from swarm.clock import ManualClock
from swarm.config import NodeConfig
from swarm.environments.sandbox.time_accounts import TimeAccounts
from swarm.exchange.admission import Admission
from swarm.exchange.agent import Agent
from swarm.exchange.checks.origin_checks import OriginChecks
from swarm.exchange.known_versions import KnownVersions
from swarm.exchange.novelty import Novelty
from swarm.identity import Identity
from swarm.interfaces import EnvironmentShape, GroupStore, Tokenizer, Verifier
from swarm.node_context import NodeContext
from swarm.peers.entry import EntryRule
from swarm.peers.peer_table import Peers
from swarm.peers.reputation import Reputation
from swarm.testing.builders import TOY_ENV, ScriptedVerifier, ToyTokenizer, make_identity
from swarm.types import Correction, NodeId


async def inline(function: Callable[..., Any], /, *arguments: object) -> Any:
    """Calls `function` in place: an `Offload` without threads."""
    return function(*arguments)


def make_context(config: NodeConfig | None = None, identity: Identity | None = None, **changes: Any) -> NodeContext:
    """A node's context with the default configuration, the first test identity and a clock that stands still.

    Args:
        config: configuration of the node.
        identity: identity of the node.
        changes: other fields of `NodeContext`; by default events are dropped and `offload` calls in place.
    """
    plain: dict[str, Any] = {"clock": ManualClock(), "emit": lambda event: None, "offload": inline, "in_place_bytes": 0}
    return NodeContext(config=config or NodeConfig(), identity=identity or make_identity(), **{**plain, **changes})


def make_agent(context: NodeContext, store: GroupStore, **changes: Any) -> Agent:
    """An agent in the toy environment over a group store; `changes` are other arguments of `Agent`."""
    plain: dict[str, Any] = {
        "tokenizer": ToyTokenizer(),
        "verifier": ScriptedVerifier(),
        "environments": frozenset({TOY_ENV}),
    }
    return Agent(context, store=store, **{**plain, **changes})


def make_admission(
    context: NodeContext,
    store: GroupStore,
    *,
    tokenizer: Tokenizer | None = None,
    verifier: Verifier | None = None,
    peers: Peers | None = None,
    versions: KnownVersions | None = None,
    reputation: Reputation | None = None,
    environments: frozenset[str] = frozenset({TOY_ENV}),
    usable: frozenset[Correction] = frozenset(Correction),
    entry: EntryRule | None = None,
    novelty: Novelty | None = None,
    origin_of: Callable[[NodeId], str] = str,
    is_established: Callable[[NodeId], bool] = lambda _: False,
    accounts: TimeAccounts | None = None,
    shapes: Mapping[str, EnvironmentShape] | None = None,
) -> Admission:
    """An `Admission` without an agent and without credit; by default for the toy environment, with no known heads.

    Args:
        context: see `make_context`; its configuration sets the bounds.
        store: keeps the admitted groups.
    """
    clock = context.clock
    reputation = Reputation(clock) if reputation is None else reputation
    peers = Peers(context.node_id) if peers is None else peers
    versions = KnownVersions(context.node_id, clock) if versions is None else versions
    return Admission(
        context,
        store,
        ToyTokenizer() if tokenizer is None else tokenizer,
        ScriptedVerifier() if verifier is None else verifier,
        OriginChecks(context, entry, reputation, environments, peers, versions, None),
        reputation,
        usable,
        Novelty() if novelty is None else novelty,
        origin_of,
        is_established,
        TimeAccounts() if accounts is None else accounts,
        {} if shapes is None else shapes,
    )
