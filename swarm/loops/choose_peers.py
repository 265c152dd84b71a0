"""Choice of the peers whose groups are taken, and of the addresses that are tried to find more peers.

Invariant: only a peer that proved its key at an address takes a place; adverts decide which addresses are tried, within
the budgets of the address book, and never push out a neighbour that works.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Final

from swarm.exchange.agent import ESTABLISHED, Agent
from swarm.interfaces import PeerAddress
from swarm.peers.address_book import budget_key_of
from swarm.peers.topology import choose_neighbours, rank
from swarm.types import Advert, Role

MAX_CONSIDERED: Final = 1024  # adverts of lineages in use, of peers known to be alive, and of strangers, in one look-up
MAX_TRIALS: Final = 8  # addresses tried at a time
NUM_SPARE_TRIALS: Final = 2  # more trials than free places
MAX_FOLLOWERS: Final = 256  # streamed from, for the groups they made with our credit


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerChoice:
    """Peers to stream from and addresses to try, chosen after a look at the directory."""

    streams: set[tuple[PeerAddress, bool]]  # peers whose groups are taken; True with notices of others' groups
    trials: list[PeerAddress]  # addresses to be dialled, the most promising first


def sample_adverts(agent: Agent, adverts: Sequence[Advert], rng: random.Random) -> list[Advert]:
    """All adverts, or at random at most MAX_CONSIDERED each of lineages in use, other live peers, and strangers."""
    if len(adverts) <= MAX_CONSIDERED:
        return list(adverts)
    in_use: list[Advert] = []
    alive: list[Advert] = []
    others: list[Advert] = []
    for advert in adverts:
        is_in_use, is_alive = agent.peers.is_in_use(advert.node_id), agent.is_alive(advert.node_id)
        (in_use if is_in_use else alive if is_alive else others).append(advert)
    chosen = (rng.sample(each, min(MAX_CONSIDERED, len(each))) for each in (in_use, alive, others))
    return list(chain.from_iterable(chosen))


def choose_peers(agent: Agent, adverts: Sequence[Advert], with_notices: bool, rng: random.Random) -> PeerChoice:
    """Chooses streams of followers and neighbours, and addresses to try; a mere follower of a trainer gets none.

    Args:
        agent: agent of the node.
        adverts: see `sample_adverts`.
        with_notices: True if neighbours have to announce the groups of others; pure generators do not, and are skipped.
        rng: order in which strangers are tried; no other node may know it.
    """
    if agent.weight_follower is not None and Role.RELAY not in agent.config.roles:
        return PeerChoice(streams=set(), trials=[])
    book, limit, own = agent.address_book, agent.config.exchange.max_neighbours, agent.node_id
    allowed = [a for a in adverts if a.node_id != own and agent.reputation.is_allowed(a.node_id)]
    followers = agent.credit_ledger.followers
    no_forwarders = {
        a.node_id for a in allowed if with_notices and Role.TRAINER not in a.roles and Role.RELAY not in a.roles
    }

    # Peers that proved themselves take the places, also those that the directory does not name just now.
    known = sorted(
        (
            peer
            for node_id, peer in book.known.items()
            if node_id != own and node_id not in followers and node_id not in no_forwarders
            if agent.reputation.is_allowed(node_id) and agent.entry_rule.is_admitted(node_id)
            if node_id in agent.peers.connected or book.may_dial(peer.address)
        ),
        key=lambda peer: (book.is_anchor(peer.address.node_id), peer.since_s),  # anchors serve everybody
    )
    kept = [peer.address for peer in known]
    places = choose_neighbours(own, kept, limit, kept)

    # All other addresses have to be tried first.
    unproven = [
        address
        for advert in allowed
        if advert.endpoints and advert.node_id not in followers and advert.node_id not in no_forwarders
        if not book.is_known(address := book.best_address(advert.node_id, advert.endpoints)) and book.may_dial(address)
    ]
    rng.shuffle(unproven)
    moved = [address for address in unproven if address.node_id in book.known]
    alive = [a for a in unproven if a.node_id not in book.known and agent.is_alive(a.node_id)]
    strangers = [a for a in unproven if a.node_id not in book.known and not agent.is_alive(a.node_id)]
    num_free = limit - len(places)
    listed: list[PeerAddress] = []
    if num_free:
        # Free keys cannot sign a member's advert, and a member that invites many keys is tried as often as any other.
        listed = [a for a in strangers if agent.standing(a.node_id) == ESTABLISHED]
        listed = one_of_each_first(listed, [agent.parties.party_of(a.node_id) for a in listed])
        alive = _most_credible_first(agent, alive)
        strangers = one_of_each_first(strangers, [budget_key_of(a.endpoint) for a in strangers])
    else:
        alive, strangers = (
            [a for a in choose_neighbours(own, [*kept, *pool], limit, kept) if not book.is_known(a)]
            for pool in (alive, strangers)
        )
    anchors = [a for a in book.anchors if not book.is_known(a)] if len(known) < max(1, limit // 2) else []
    mixed = [a for a in chain.from_iterable(zip_longest(moved, listed, alive, anchors, strangers)) if a is not None]
    trials = list(dict.fromkeys(mixed))[: min(MAX_TRIALS, num_free + NUM_SPARE_TRIALS)]
    streams = {(address, with_notices) for address in places}
    return PeerChoice(
        streams=streams
        | {(book.best_address(a.node_id, a.endpoints), False) for a in choose_followers(agent, allowed)},
        trials=trials,
    )


def _most_credible_first(agent: Agent, addresses: Sequence[PeerAddress]) -> list[PeerAddress]:
    """Sorts addresses that live keys claim by standing: a call is free, a group costs more, a voucher is scarce.

    Within a standing the keys whose claims failed least come first, one of each subnet that they called from: many keys
    of one subnet that claim dead addresses everywhere are tried a few times only.
    """
    book, inbound = agent.address_book, agent.peers.inbound

    def doubts(address: PeerAddress) -> tuple[int, int]:
        node_id = address.node_id
        return -agent.standing(node_id), book.num_false_claims(node_id, inbound.get(node_id, ""))

    turns = _turns([inbound.get(a.node_id) or budget_key_of(a.endpoint) for a in addresses])
    order = sorted(range(len(addresses)), key=lambda index: (doubts(addresses[index]), turns[index]))
    return [addresses[index] for index in order]


def one_of_each_first(
    addresses: Sequence[PeerAddress], units: Sequence[str], taken: Iterable[str] = ()
) -> list[PeerAddress]:
    """Addresses in turns: first one of each party or subnet, then the second ones, and so on.

    Args:
        addresses: of equal rank, in any order.
        units: party or subnet of each address.
        taken: units that had a turn already; repeated for each turn.
    """
    turns = _turns(units, taken)
    return [addresses[index] for index in sorted(range(len(addresses)), key=turns.__getitem__)]


def _turns(units: Sequence[str], taken: Iterable[str] = ()) -> list[int]:
    """Number of equal units before each unit, including those in `taken`."""
    num_before = Counter[str](taken)
    turns: list[int] = []
    for unit in units:
        turns.append(num_before[unit])
        num_before[unit] += 1
    return turns


def choose_followers(agent: Agent, allowed: Sequence[Advert]) -> list[Advert]:
    """Followers that have delivered, plus as many others as could have credit; newcomers come last in each part.

    Their streams carry no notices of other nodes' groups: groups made with our credit are taken whatever our quota.
    """
    config, status, delivered = agent.config, agent.credit_ledger.status(), agent.peers.delivered_steps
    most = max(config.exchange.max_neighbours, (config.replay.max_age_steps + 1) * config.replay.local_groups)
    followers = [a for a in allowed if a.node_id in status and a.endpoints]

    def order(advert: Advert) -> tuple[bool, bool, bytes]:
        node_id, credit = advert.node_id, status[advert.node_id]
        has_none = credit["granted"] <= credit["delivered"] + credit["expired"]
        return not agent.parties.is_established(node_id), has_none, rank(agent.node_id, node_id)

    known = [a for a in followers if a.node_id in delivered]
    new = [a for a in followers if a.node_id not in delivered]
    return [*sorted(known, key=order)[:MAX_FOLLOWERS], *sorted(new, key=order)[:most]]


def unlisted_followers(
    agent: Agent, followed: Collection[tuple[PeerAddress, bool]], adverts: Sequence[Advert]
) -> set[tuple[PeerAddress, bool]]:
    """Streams in `followed` to followers that the directory does not list now: we wait for their groups."""
    found = {advert.node_id for advert in adverts if advert.endpoints}
    return {
        (address, with_notices)
        for address, with_notices in followed
        if address.node_id in agent.credit_ledger.followers - found and agent.reputation.is_allowed(address.node_id)
    }
