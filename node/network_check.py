"""Check of this machine's network for `swarm doctor LINK`: abilities of a node here, and possible improvements.

Invariant: only the run's own coordinator and bootstrap peers are called; a server listens for the time of the check.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.credential import read_credential
from swarm.addresses import endpoint_of, is_loopback, own_address
from swarm.clock import CLOCK_SKEW_S, SystemClock
from swarm.config import ExchangeConfig, NodeConfig, parse_config
from swarm.errors import ConfigError, NotHeld, Unauthenticated, Unavailable
from swarm.exchange.grpc_transport import PeerHooks
from swarm.identity import Identity
from swarm.interfaces import PeerAddress
from swarm.relay.relaying_transport import RelayingTransport
from swarm.types import Digest, NodeId, SealedGroup
from swarm.wire.join_link import FetchedManifest, JoinLink, fetch_manifest, node_config_from_manifest
from swarm.wire.session import open_channel

TIMEOUT_S: Final = 6.0
IDLE_S: Final = (5.0, 10.0, 18.0)  # a server asks for a sign of life every 20 s, which would hide what is longer


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkReport:
    """Result of the check of this machine's network."""

    is_dialable: bool
    host: str  # that our calls come from, as the coordinator saw it
    listened: str  # port that was tried
    detail: str  # why nobody could dial us
    relay_ms: float | None  # from here to here through the coordinator; None: no reservation, or not tried
    reached: tuple[str, ...]  # host:port of the run that answer: the coordinator, and bootstrap peers
    unreached: tuple[str, ...]
    idle_s: float  # so long a connection without a byte was kept
    is_idle_kept: bool  # whether it was kept as long as we looked
    clock_ahead_s: float = 0.0  # of the coordinator's

    def lines(self) -> list[str]:
        """Lines for people: a wrong clock, if any, the network's abilities, their effect, and possible improvements."""
        kept = f"{self.idle_s:.0f} s or more" if self.is_idle_kept else f"at most {self.idle_s:.0f} s"
        out = f"out: {', '.join(self.reached)} answer"
        if self.unreached:
            out += f", {', '.join(self.unreached)} not"
        inward = "others can dial it" if self.is_dialable else f"others cannot dial it ({self.detail})"
        if self.is_dialable and self.host == self.reached[0].rpartition(":")[0]:
            inward = "where the coordinator runs too: nobody else tried to dial it"
        allows = f"this network: seen as {self.host}, {inward}; {out}; idle connections are kept {kept}"
        if self.is_dialable:
            follows = "follows: a node here is dialled like any other, and relays for those that cannot be"
            better = f"better: nothing to do; a fixed port (exchange.listen, here {self.listened}) keeps its address"
        elif self.relay_ms is not None:
            follows = (
                f"follows: a node here dials out and is reached through relays ({self.relay_ms:.0f} ms there and back "
                "through the coordinator); it gives and takes groups and weights all the same"
            )
            if self.unreached:
                follows += ", and a relay dials and asks the directory for it"
            own = own_address(self.reached[0].rpartition(":")[0])
            is_routed = own == self.host  # no address was translated
            way = "have the firewall let a TCP port in" if is_routed else f"forward a TCP port of the router to {own}"
            better = (
                f"better: {way}, set exchange.listen to that port and "
                f'exchange.advertise = "{self.host}:PORT"; then nobody has to pass anything on'
            )
        else:
            follows = "follows: a node here takes groups and gives none: nobody reaches it, and it holds no reservation"
            better = "better: forward a TCP port, or ask the operator for a coordinator with relay_reservations above 0"
        return [*self._clock_line(), allows, follows, better]

    @property
    def has_wrong_clock(self) -> bool:
        """True if peers would refuse the groups of a node here."""
        return abs(self.clock_ahead_s) > CLOCK_SKEW_S

    def _clock_line(self) -> list[str]:
        if not self.has_wrong_clock:
            return []
        return [
            f"the clock here is {abs(self.clock_ahead_s):.0f} s {'ahead of' if self.clock_ahead_s > 0 else 'behind'} "
            f"the coordinator's; beyond {CLOCK_SKEW_S:.0f} s adverts and groups are refused; set the clock (run NTP)"
        ]


class _Nothing:
    """Handler for the time of the check, which refuses every call."""

    async def subscribe(self, *_: object) -> None:
        raise Unavailable("a check of the network; no node")

    watch = subscribe

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        raise NotHeld("a check of the network; no node")

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        raise NotHeld("a check of the network; no node")


async def check_network(link: str, directory: Path | None = None, listen_port: int = 0) -> NetworkReport:
    """Tries the connections of a node of the run from here; takes about 20 seconds, most of it waiting.

    Args:
        link: join link of the run.
        directory: directory of a node whose key and invitation are shown; None: a new key, for runs that admit all
            nodes.
        listen_port: port to try; 0 picks a free one.

    Raises:
        ConfigError: the link cannot be used, or leads to this machine, or no key is named that the run admits.
        Unavailable: the coordinator does not answer, or refuses the key.
    """
    parsed = JoinLink.parse(link)
    key = directory / "identity.key" if directory is not None else None
    identity = Identity.load(key) if key is not None and key.exists() else Identity.create()
    fetched = await fetch_manifest(parsed, identity, TIMEOUT_S)
    coordinator = PeerAddress(node_id=parsed.fingerprint, endpoint=fetched.address)
    shown = b"" if directory is None else _credential(directory, parsed, fetched, identity)
    host = "[::]" if own_address().startswith("[") else "0.0.0.0"
    config = ExchangeConfig(listen=f"{host}:{listen_port}", advertise=f"{own_address()}:{listen_port}")
    clock, ahead_s = SystemClock(), [0.0]

    def note_clock(node_id: NodeId, now_s: float, at_s: float) -> None:
        if node_id == parsed.fingerprint:
            ahead_s[0] = clock.now_s() - now_s - (clock.monotonic_s() - at_s)

    hooks = PeerHooks(note_clock=note_clock)
    transport = RelayingTransport(identity, parsed.run_id, config, clock, hooks=hooks, credential=lambda: shown)
    others = [endpoint_of(maddr) for maddr in fetched.bootstrap_peers]
    try:
        (endpoint,) = await transport.serve(_Nothing())  # pyright: ignore[reportArgumentType] # nobody may call it
        back = await transport.dial_back(coordinator, 2 * TIMEOUT_S)  # alone: it tells whether our key is admitted
        idle, answers = await asyncio.gather(
            _idle_kept_s(coordinator, identity, parsed.run_id, shown),
            asyncio.gather(*map(_answers, others)),
        )
        relay_ms = None if back.is_reached else await _through_relay_ms(transport, coordinator, identity.node_id)
    except Unauthenticated:
        if key is not None and key.exists():
            raise
        raise ConfigError(
            f"run {parsed.run_id} does not admit every key, and none was named: try with that of the node, "
            f"swarm doctor LINK --dir DIR (swarm-node id --dir DIR makes one and prints its id)"
        ) from None
    except Unavailable:
        if is_loopback(fetched.address.rpartition(":")[0]):
            raise ConfigError(
                f"{fetched.address}: the coordinator is on this machine, so only nodes on it can dial one that joins "
                "here; run this on the machine that is to join, with a link that leads here from there"
            ) from None
        raise
    finally:
        await transport.stop()
    reached = [endpoint for endpoint, has_answered in zip(others, answers, strict=True) if has_answered]
    silent = parsed.addresses[: parsed.addresses.index(fetched.address)]  # of the link, asked before
    return NetworkReport(
        is_dialable=back.is_reached,
        host=back.host,
        listened=endpoint.rpartition(":")[2],
        detail=back.detail,
        relay_ms=relay_ms,
        reached=(fetched.address, *reached),
        unreached=(*silent, *(each for each in others if each not in reached)),
        idle_s=idle[0],
        is_idle_kept=idle[1],
        clock_ahead_s=ahead_s[0],
    )


def _credential(directory: Path, link: JoinLink, fetched: FetchedManifest, identity: Identity) -> bytes:
    data = node_config_from_manifest(fetched.manifest, link, fetched.bootstrap_peers, directory)
    return read_credential(parse_config(NodeConfig, data, "manifest"), identity.node_id).to_bytes()


async def _answers(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return True


async def _idle_kept_s(
    coordinator: PeerAddress, identity: Identity, run_id: str, credential: bytes
) -> tuple[float, bool]:
    """(seconds that a connection without a byte was kept, True if it was kept to the end of the check)."""

    async def is_kept(seconds: float) -> bool:
        channel = await open_channel(
            coordinator.endpoint, coordinator.node_id, identity, run_id, TIMEOUT_S,
            credential=lambda: credential, ping_s=1000.0,
        )  # fmt: skip
        try:
            await asyncio.sleep(seconds)  # what is measured is time
            await channel.check_server(TIMEOUT_S / 2)
        except Unavailable:
            return False
        finally:
            await channel.close()
        return True

    kept: Sequence[bool] = await asyncio.gather(*map(is_kept, IDLE_S))
    for seconds, was_kept in zip(IDLE_S, kept, strict=True):
        if not was_kept:
            return seconds, False
    return IDLE_S[-1], True


async def _through_relay_ms(transport: RelayingTransport, relay: PeerAddress, own: NodeId) -> float | None:
    """Milliseconds to connect from us to us through a reservation at a relay; None if that fails."""
    reservation, clock = transport.reservation_at(relay), SystemClock()
    holding = asyncio.ensure_future(reservation.hold())
    waiting = asyncio.ensure_future(reservation.held.wait())
    try:
        await asyncio.wait({holding, waiting}, timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not reservation.held.is_set():
            return None
        began_s = clock.monotonic_s()
        peer = await transport.connect(PeerAddress(node_id=own, endpoint=reservation.endpoint), TIMEOUT_S)
        took_s = clock.monotonic_s() - began_s
        await peer.close()
        return 1000 * took_s
    except Unavailable:
        return None
    finally:
        holding.cancel()
        waiting.cancel()
        await asyncio.gather(holding, waiting, return_exceptions=True)
