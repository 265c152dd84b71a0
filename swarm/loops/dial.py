"""A dial to a peer's advertised address, within the bounds of the address book.

Invariant: every dial of an address from an advert goes through here, and what came of it is remembered.
"""

from swarm.errors import OtherNode, Unavailable
from swarm.exchange.agent import Agent
from swarm.exchange.grpc_transport import DIAL_TIMEOUT_S
from swarm.interfaces import PeerAddress, PeerClient, Transport


async def dial(agent: Agent, transport: Transport, address: PeerAddress) -> PeerClient:
    """A connection to the peer, who proved its key.

    Raises:
        Unavailable: it did not answer, or may not be dialled now.
        Unauthenticated: somebody else answered.
    """
    book, is_alive = agent.address_book, agent.is_alive(address.node_id)
    caller = agent.peers.inbound.get(address.node_id, "")
    if not book.begin_dial(address, is_alive=is_alive):
        raise Unavailable(f"{address.endpoint} is not dialled now: it failed before, or too many others did")
    try:
        client = await transport.connect(address, DIAL_TIMEOUT_S)
    except OtherNode as error:
        book.record_other(address, error.found, caller)
        raise
    except Unavailable as error:
        book.newest_error = str(error)
        book.record_failure(address, caller)
        raise
    book.record_answer(address, is_alive=is_alive)
    return client
