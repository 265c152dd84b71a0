"""The public face of a node: its advert for the directory, and its report for the coordinator."""

from dataclasses import replace

from swarm.exchange.agent import Agent
from swarm.types import Advert, Correction, NodeReport, PolicyVersion


def own_advert(agent: Agent) -> Advert:
    """This node's record for the directory."""
    exchange, own_groups = agent.config.exchange, agent.own_groups
    return Advert(
        node_id=agent.node_id,
        run_id=agent.config.run_id,
        endpoints=_offered(agent),
        roles=agent.config.roles,
        tokenizer_digest=agent.tokenizer_digest,
        head=_advertised_version(agent),
        oldest_step=agent.streams.oldest_own_step,
        num_groups=own_groups.num_put,
        reward_mean=own_groups.reward_mean.value or 0.0,
        reward_std=own_groups.reward_std.value or 0.0,
        correction=Correction.EXACT,
        held_bytes=agent.replay.num_bytes,
        cursor=agent.streams.log_head,
        expires_at_s=agent.clock.now_s() + 3 * exchange.advert_every_s,
        equivocator=_equivocator(agent),
        credential=agent.credential(),
        relay_reservations=0 if agent.is_leaving else agent.relay_reservations(),
    )


async def wait_offer_changed(agent: Agent, advert: Advert) -> None:
    """Waits until `advert` is out of date: endpoints, lineage, whether weights are served, or a new equivocator."""

    def offer(endpoints: tuple[str, ...], head: PolicyVersion, equivocator: str) -> tuple[object, ...]:
        return endpoints, head.policy_id, bool(head.digest), equivocator

    of = offer(advert.endpoints, advert.head, advert.equivocator)
    await agent.context.changed.until(
        lambda: offer(_offered(agent), _advertised_version(agent), _equivocator(agent)) != of
    )


def own_report(agent: Agent, tokens_per_s: float) -> NodeReport:
    """This node's figures for the coordinator."""
    view = agent.coordinator_view
    return NodeReport(
        node_id=agent.node_id,
        name=agent.config.shown_name,
        roles=agent.config.roles,
        endpoints=agent.endpoints,
        head=agent.newest_version,
        tokens_per_s=tokens_per_s,
        reward_mean=agent.own_groups.reward_mean.value or 0.0,
        num_local=agent.journal.num_local,
        num_external=agent.journal.num_external,
        num_refused=sum(agent.ingest.refusals.values()),
        edges=tuple(view.edges.values()),
        evaluations=dict(view.evaluations),
    )


def _advertised_version(agent: Agent) -> PolicyVersion:
    """The newest version, with a digest only if its weights can be fetched here."""
    is_served = agent.version_publisher is not None or agent.weight_follower is not None
    return agent.newest_version if is_served else replace(agent.newest_version, digest=b"")


def _offered(agent: Agent) -> tuple[str, ...]:
    """Endpoints of this node; none once it leaves, so that nobody dials it until its advert ends."""
    return () if agent.is_leaving else agent.endpoints


def _equivocator(agent: Agent) -> str:
    """Beginning of the id of the newest owner proven to equivocate, as the advert names it; "" without one."""
    return next(reversed(agent.weight_server.proofs), "")[:16]
