"""Reach (NAT): measures whether others can dial this node, and holds reservations at relays if they cannot.

Invariant: a node advertises only addresses where it was reached or that are configured, or relays where it holds a
reservation now. Only the address that our own calls come from is ever tried. Relays that proved their keys to us are
asked for a reservation; while none of them gives one, relays known from adverts alone are asked, too, one at a time and
within the budget for strangers.
"""

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final

from swarm.addresses import endpoint_of, is_loopback, own_address
from swarm.errors import Unavailable
from swarm.exchange.agent import ESTABLISHED, Agent
from swarm.flow import BoundedTable, TokenBucket
from swarm.interfaces import DialBack, PeerAddress, Reachability, Reservation
from swarm.loops.choose_peers import one_of_each_first
from swarm.peers.address_book import STRANGERS_BURST, STRANGERS_PER_S, budget_key_of, is_public
from swarm.types import JsonDict, short

logger = logging.getLogger(__name__)

NUM_RESERVATIONS: Final = 2  # held at a time, at relays of different subnets where there are
NUM_WITNESSES: Final = 3  # of different subnets where there are
DIAL_BACK_TIMEOUT_S: Final = 6.0
MEASURE_EVERY_S: Final = 600.0
UNKNOWN_EVERY_S: Final = 10.0  # while nobody was there to ask
LOOK_EVERY_S: Final = 2.0  # at our own address and the clock
SLEPT_S: Final = 10.0  # advance of the wall clock over this process that means sleep
FIRST_PAUSE_S: Final = 1.0  # after a reservation was lost, or refused; doubles
LONGEST_PAUSE_S: Final = 60.0
USELESS_PAUSE_S: Final = 10.0  # at least, after a relay did not lead to us, so that another one is tried
LASTING_S: Final = 30.0
MAX_IN_VAIN: Final = 4  # useless reservations until the coordinator comes before relays of free keys
MAX_PAUSES: Final = 1024
# Strangers asked for a reservation: half of what may be dialled, the other half is for finding neighbours.
RELAYS_PER_S: Final = STRANGERS_PER_S / 2
RELAYS_BURST: Final = STRANGERS_BURST / 2
HELD_TIMEOUT_S: Final = 10.0
CHECK_EVERY_S: Final = 60.0  # between checks that a reservation leads to us; doubles while it does
LONGEST_CHECK_S: Final = 480.0
CHECK_TIMEOUT_S: Final = 5.0


class ReachKind(StrEnum):
    """Ways in which others reach a node."""

    UNKNOWN = "unknown"  # no node could be asked; its endpoint is advertised as configured
    DIALABLE = "dialable"
    LOCAL = "local"  # only this machine can dial it, since it listens nowhere else
    OUTWARD = "outward"  # it dials, and is reached through relays


@dataclass(eq=False, slots=True)
class _Relay:
    address: PeerAddress
    task: asyncio.Task[None]
    reservation: Reservation
    delay_s: float = math.inf  # from asking to reaching ourselves through it; infinite until then


@dataclass(slots=True)
class _Pause:
    until_s: float = -math.inf
    num_in_row: int = 0


@dataclass(slots=True)
class ReachState:
    """Reach of this node as known now, for status and advert."""

    kind: ReachKind = ReachKind.UNKNOWN
    host: str = ""  # our address as others see it
    detail: str = ""  # reason that a witness gave why it could not dial us
    relays: list[tuple[PeerAddress, float]] = field(default_factory=list[tuple[PeerAddress, float]])  # and delay_s


class Reach:
    """Measures how others reach this node, and keeps it reachable.

    Args:
        agent: agent of the node; its `endpoints` are replaced as they change.
        transport: asks others to dial this node, and opens reservations.
        rng: jitter; seeded differently at each node.
        is_advertise_set: True if the owner configured where others dial this node; else it is where they reached it.
        find_address: finds this machine's address.
    """

    def __init__(
        self,
        agent: Agent,
        transport: Reachability,
        rng: random.Random,
        *,
        is_advertise_set: bool,
        find_address: Callable[[], Awaitable[str]] = partial(asyncio.to_thread, own_address),
    ) -> None:
        self._agent, self._transport, self._rng = agent, transport, rng
        self._config = agent.config.exchange
        self._direct = agent.endpoints  # as the transport serves
        self._is_advertise_set, self._find_address = is_advertise_set, find_address
        self._relays: dict[PeerAddress, _Relay] = {}
        self._pauses = BoundedTable[PeerAddress, _Pause](MAX_PAUSES)
        self._strangers = TokenBucket(RELAYS_PER_S, RELAYS_BURST, agent.clock.monotonic_s())  # asked for a reservation
        self._num_in_vain = 0  # reservations in a row that did not lead here, or not for long
        self._measured_s = -math.inf
        self.state = ReachState()

    @property
    def _fixed(self) -> ReachKind | None:
        """The kind of reach that configuration or listening address fixes; None if it has to be measured."""
        if self._config.reach != "auto":
            return ReachKind(self._config.reach)
        if not is_loopback(_host_of(self._config.listen)):
            return None
        # behind a mapped port it is dialled from elsewhere, too
        return ReachKind.LOCAL if is_loopback(_host_of(self._direct[0])) else ReachKind.DIALABLE

    # --- dial-back -----------------------------------------------------------------

    async def measure(self) -> None:
        """Asks up to NUM_WITNESSES nodes to dial this node; the majority decides, and the first answer breaks a tie.

        If any node with a public address answers, only answers of such nodes count. Without answers nothing changes.
        A reach that the configuration fixes is not measured; `exchange.reach = "dialable"` asks all the same, and only
        logs a warning.
        """
        self._measured_s = self._agent.clock.monotonic_s()
        fixed = self._fixed
        if fixed is not None:
            self._become(fixed)
            if self._config.reach != "dialable" or is_loopback(_host_of(self._config.listen)):
                return
        witnesses = self._witnesses()
        asked = await asyncio.gather(*map(self._ask, witnesses))
        answers = [(each, answer) for each, answer in zip(witnesses, asked, strict=True) if answer is not None]
        # a node in our own network may dial addresses that nobody else can
        public = [answer for each, answer in answers if is_public(each.endpoint)]
        judged = public or [answer for _, answer in answers]
        if not judged:
            return
        host, num_agreed = Counter(answer.host for answer in judged).most_common(1)[0]
        self.state.host = host
        before, self.state.detail = self.state.detail, next((each.detail for each in judged if not each.is_reached), "")
        if fixed is not None:
            if self.state.detail and not before:
                logger.warning(
                    "exchange.reach is dialable, and not everybody who tried could dial this node",
                    extra={"error": self.state.detail, "fix": 'open the port, or set exchange.reach = "auto"'},
                )
            return
        num_reached = sum(answer.is_reached for answer in judged)
        if 2 * num_reached > len(judged) or (2 * num_reached == len(judged) and judged[0].is_reached):
            # one witness alone could name any address, to cut us off or to have others dial it
            self._become(ReachKind.DIALABLE, host if 2 * num_agreed > len(judged) else "")
        else:
            self._become(ReachKind.OUTWARD)

    def _witnesses(self) -> list[PeerAddress]:
        """Nodes to ask: coordinator, anchors, then known peers, public ones first; one of each subnet first."""
        book = self._agent.address_book
        known = [peer.address for peer in book.known.values() if peer.address.relay is None]
        self._rng.shuffle(known)
        known.sort(key=lambda each: (not is_public(each.endpoint), -self._agent.standing(each.node_id)))
        found = dict.fromkeys([*coordinator_addresses(self._agent), *book.anchors, *known])
        others = [address for address in found if address.node_id != self._agent.node_id]
        return one_of_each_first(others, [budget_key_of(a.endpoint) for a in others])[:NUM_WITNESSES]

    async def _ask(self, witness: PeerAddress) -> DialBack | None:
        try:
            return await self._transport.dial_back(witness, DIAL_BACK_TIMEOUT_S)
        except Unavailable as error:
            logger.debug("no dial-back", extra={"peer": short(witness.node_id), "error": str(error)})
            return None

    def _become(self, kind: ReachKind, host: str = "") -> None:
        before, self.state.kind = self.state.kind, kind
        self._transport.is_dialable = kind is not ReachKind.OUTWARD
        if kind is ReachKind.DIALABLE and host and not self._is_advertise_set:
            port = self._direct[0].rpartition(":")[2]
            self._direct = (f"{host}:{port}",)
        if kind is not before and (self._fixed is None or kind is ReachKind.OUTWARD):
            logger.info("how others reach this node", extra={"reach": str(kind), "detail": self.state.detail})
        if kind is not ReachKind.OUTWARD:
            for relay in self._relays.values():
                relay.task.cancel()
        self._advertise()

    def _advertise(self) -> None:
        """Replaces the endpoints of the advert if they changed, and the list of relays."""
        held = [each for each in self._relays.values() if each.reservation.held.is_set() and each.delay_s < math.inf]
        held.sort(key=lambda relay: relay.delay_s)
        self.state.relays = [(relay.address, relay.delay_s) for relay in held]
        self._agent.address_book.relays = tuple(relay.address for relay in held)
        through = tuple(relay.reservation.endpoint for relay in held)
        endpoints = through if self.state.kind is ReachKind.OUTWARD else self._direct
        if endpoints != self._agent.endpoints:
            self._agent.endpoints = endpoints
            self._agent.context.changed.fire()

    # --- reservations at relays --------------------------------------------------------------------------

    async def keep(self) -> None:
        """Measures now and then, at once after a change of address or a sleep, and holds reservations until cancelled.

        Returns at once if the node neither is reached from outside of this machine nor dials out of it.
        """
        dialled = map(_host_of, _dialled(self._agent))
        if self.state.kind is ReachKind.LOCAL and all(map(is_loopback, dialled)):
            return
        async with asyncio.TaskGroup() as tasks:
            address, ahead_s = await self._network()
            while True:
                if self.state.kind is ReachKind.OUTWARD:
                    self._fill(tasks)
                await asyncio.sleep(LOOK_EVERY_S * self._rng.uniform(0.5, 1.0))
                address_now, ahead_now_s = await self._network()
                has_moved = address_now != address or ahead_now_s - ahead_s > SLEPT_S
                address, ahead_s = address_now, ahead_now_s
                if has_moved:
                    logger.info("another address, or awake again: connections begin anew", extra={"own": address})
                    self._pauses.clear()
                    await self._transport.renew_connections()
                every_s = UNKNOWN_EVERY_S if self.state.kind is ReachKind.UNKNOWN else MEASURE_EVERY_S
                if has_moved or self._agent.clock.monotonic_s() - self._measured_s > every_s:
                    await self.measure()

    async def _network(self) -> tuple[str, float]:
        """This machine's address, and the lead of its wall clock over its monotonic one in seconds."""
        clock = self._agent.clock
        return await self._find_address(), clock.now_s() - clock.monotonic_s()

    def _fill(self, tasks: asyncio.TaskGroup) -> None:
        now_s = self._agent.clock.monotonic_s()
        # looked at anew after each: the next one is of another subnet
        while len(self._relays) < NUM_RESERVATIONS and (candidates := self._candidates(now_s)):
            self._begin(candidates[0], tasks)
        # in a large swarm all known relays may be full
        stranger = None if self._relays else self._stranger(now_s)
        if stranger and self._strangers.try_take(now_s) and self._agent.address_book.begin_dial(stranger):
            self._begin(stranger, tasks)

    def _begin(self, address: PeerAddress, tasks: asyncio.TaskGroup) -> None:
        reservation = self._transport.reservation_at(address)
        task = tasks.create_task(self._hold(address, reservation), name=f"reservation at {short(address.node_id)}")
        self._relays[address] = _Relay(address, task, reservation)

    def _stranger(self, now_s: float) -> PeerAddress | None:
        """A relay known from an advert alone that may be asked now, at random by subnet; None without one."""
        book, reputation = self._agent.address_book, self._agent.reputation
        offered: dict[str, list[PeerAddress]] = {}
        for node_id, address in self._agent.peers.relays.items():
            is_new = node_id not in book.known and not self._is_paused(address, now_s)
            if is_new and reputation.is_allowed(node_id) and book.may_dial(address):
                offered.setdefault(budget_key_of(address.endpoint), []).append(address)
        return self._rng.choice(offered[self._rng.choice(list(offered))]) if offered else None

    def _is_paused(self, address: PeerAddress, now_s: float) -> bool:
        pause = self._pauses.get(address)
        return pause is not None and pause.until_s > now_s

    def _candidates(self, now_s: float) -> list[PeerAddress]:
        """Relays that may be asked now, the best first; one of each subnet first.

        Established peers that relay and answered us, then anchors, then other peers that relay and answered, whose keys
        are free, then the coordinator, which comes before these last peers once MAX_IN_VAIN reservations led nowhere.
        """
        book, relays = self._agent.address_book, self._agent.peers.relays
        peers = [
            peer.address
            for node_id, peer in book.known.items()
            if node_id in relays and peer.address.relay is None and self._agent.reputation.is_allowed(node_id)
        ]
        self._rng.shuffle(peers)
        established = [address for address in peers if self._agent.standing(address.node_id) == ESTABLISHED]
        coordinator = coordinator_addresses(self._agent)
        others = [*coordinator, *peers] if self._num_in_vain >= MAX_IN_VAIN else [*peers, *coordinator]
        found = [
            address
            for address in dict.fromkeys([*established, *book.anchors, *others])
            if address.node_id != self._agent.node_id
            if address not in self._relays and not self._is_paused(address, now_s)
        ]
        taken = {budget_key_of(relay.endpoint) for relay in self._relays}
        return one_of_each_first(found, [budget_key_of(address.endpoint) for address in found], taken)

    async def _hold(self, address: PeerAddress, reservation: Reservation) -> None:
        clock, pause = self._agent.clock, self._pauses.setdefault(address, _Pause())
        began_s = clock.monotonic_s()
        holding = asyncio.ensure_future(reservation.hold())
        checking = asyncio.ensure_future(self._check(address, reservation, began_s))
        is_useless = False
        try:
            done, _ = await asyncio.wait([holding, checking], return_when=asyncio.FIRST_COMPLETED)
            is_useless = holding not in done  # the relay takes connections, and passes nothing on
            for each in done:
                each.result()
        except Unavailable as error:
            logger.info("no reservation at a relay", extra={"peer": short(address.node_id), "error": str(error)})
        finally:
            holding.cancel()
            checking.cancel()
            await asyncio.gather(holding, checking, return_exceptions=True)
            lasted_s = clock.monotonic_s() - began_s
            has_led = lasted_s > LASTING_S and self._relays[address].delay_s < math.inf
            self._num_in_vain = 0 if has_led else self._num_in_vain + 1
            pause.num_in_row = 1 if lasted_s > LASTING_S else pause.num_in_row + 1
            pause_s = min(FIRST_PAUSE_S * 2.0 ** min(pause.num_in_row - 1, 20), LONGEST_PAUSE_S)
            pause_s = max(pause_s, USELESS_PAUSE_S) if is_useless else pause_s
            pause.until_s = clock.monotonic_s() + pause_s * self._rng.uniform(0.5, 1.0)
            self._relays.pop(address, None)
            self._advertise()

    async def _check(self, address: PeerAddress, reservation: Reservation, began_s: float) -> None:
        """Advertises a reservation once it led to us, and checks it now and then. Raises Unavailable if it fails."""
        try:
            async with asyncio.timeout(HELD_TIMEOUT_S):
                await reservation.held.wait()
        except TimeoutError:
            raise Unavailable(f"{address.endpoint} gave no reservation within {HELD_TIMEOUT_S:.0f} s") from None
        every_s = CHECK_EVERY_S
        while True:
            await self._transport.check_reservation(reservation, CHECK_TIMEOUT_S)
            relay = self._relays[address]
            if relay.delay_s == math.inf:
                relay.delay_s = self._agent.clock.monotonic_s() - began_s
                extra = {"peer": short(address.node_id), "endpoint": address.endpoint}
                logger.info("reached through a relay", extra=extra)
                if self._agent.peers.relays.get(address.node_id) == address:
                    self._agent.address_book.record_answer(address)  # it is known from now on
                self._advertise()
            await asyncio.sleep(every_s * self._rng.uniform(0.5, 1.0))
            every_s = min(2 * every_s, LONGEST_CHECK_S)

    @property
    def helpers(self) -> list[PeerAddress]:
        """Relays that act for us, the nearest first, or else the coordinator; empty unless we cannot be dialled."""
        if self.state.kind is not ReachKind.OUTWARD:
            return []
        return [address for address, _ in self.state.relays] or list(coordinator_addresses(self._agent))

    def status(self) -> JsonDict:
        """Reach as part of this node's status."""
        return {
            "kind": str(self.state.kind),
            "host": self.state.host,
            "detail": self.state.detail,
            "relays": [
                {"node_id": address.node_id, "endpoint": address.endpoint, "delay_ms": round(1000 * delay_s)}
                for address, delay_s in self.state.relays
            ],
        }


def coordinator_addresses(agent: Agent) -> Sequence[PeerAddress]:
    """Addresses of the coordinator, which relays and dials back as a node does; empty if none is configured."""
    link = agent.config.coordinator
    return [PeerAddress(node_id=link.fingerprint, endpoint=each) for each in link.addresses if link.fingerprint]


def _dialled(agent: Agent) -> Sequence[str]:
    """host:port of every address that a node is configured to dial."""
    config = agent.config
    bootstrap = [endpoint_of(address) for address in config.directory.bootstrap]
    anchors = [anchor.partition("@")[2] for anchor in config.exchange.anchors]
    return [*config.coordinator.addresses, *bootstrap, *anchors]


def _host_of(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]
