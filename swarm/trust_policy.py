"""Trust policy: the share of this node's places, draws, influence, CPU time, streams and connections for each standing.

A key is free, so no bound counts keys alone. Standings, from lowest to highest:

- A *newcomer* proved a key and nothing more. All newcomers together get one place in SHARE of each scarce resource.
  A group without log-probs counts as a newcomer's, whoever made it, in every kind of run. In grants of credit, a
  follower that delivers groups without log-probs counts as a newcomer, too.
- A *known* peer has a reputation above 0, from admitted groups. It precedes newcomers, but gets no more of a draw.
- An *established* party is a member of the run or was invited by one (`swarm.peers.parties`). It gets an equal share of
  what newcomers leave. In a private run every key is established, and draws bound newcomers' groups alone.
- A *member* is named by the operator. It does not share a bound with its subnet, and answers for the keys it invites.

No standing overrides evidence: while held-out accuracy is down, sources are set aside, newest first, even established
ones, and used again in their order of arrival (`swarm.learn.held_out_effect`).

This module imports no other module of the project, so that every layer can import it.
"""

from dataclasses import dataclass, replace
from typing import Final

# --- places and draws ------------------------------------------------------------------------------------------------

SHARE: Final = 8
"""All newcomers together get one part in SHARE of the places of a draw, credit, intake, replay room, turns of scoring
and of fetching, upload bytes while givers wait, and an account's CPU seconds."""

WINDOW: Final = 64
"""Consecutive places of draws over which the shares of parties and tasks are counted."""

LEAST_BOUND: Final = WINDOW // SHARE
"""Least bound on a party's places in a WINDOW, however many parties there are; also for one subnet of invited keys."""

GROUPS_PER_TRIAL: Final = 4
"""Credit capacity, in groups, for each concurrent trial of an established generator that has not delivered yet."""

SURPLUS: Final = 1.5
"""External groups admitted per group that a draw takes, shared equally by neighbours: some are refused or late.
With 1.5 instead of 2 the draws of 200 nodes were as full as before (docs/measurements/virtual.md)."""

# --- influence on the weights ----------------------------------------------------------------------------------------

MASS_FACTOR: Final = 3.0
"""Largest mass of an established party's group, in masses of a usual own group: groups differ in length and number of
right answers. For newcomers the bound is 1: half of their honest groups lose a little, a hostile group half of its
effect."""

MIN_BITS: Final = 64.0
"""Bits of a group's answers that repeat earlier answers; a group with this many counts as a copy and is refused."""

UNCLAIMED_SHARE: Final = 1 / 8
"""Share of an answer's expected bits that counts if its producer's own claim does not count."""

# --- a fall of held-out accuracy --------------------------------------------------------------------------------------

LOW_EVALUATIONS: Final = 8
"""Consecutive low evaluations, or draws without a usable group, after which the sources set aside are not blamed."""

CALM_EVALUATIONS: Final = 16
"""Evaluations without a fall after which earlier falls are forgotten; also the most evaluations without a fall before
one halving of the sources is undone."""

PRESENT_DRAWS: Final = 64
"""A source without a group in this many newest draws counts as absent, and cannot be the oldest source in use."""

MAX_SOURCES: Final = 256
"""Most sources whose first draw is remembered; further sources are not remembered and are set aside first."""

# --- CPU seconds and signature checks --------------------------------------------------------------------------------

FIRST_TRY_S: Final = 0.01
"""CPU seconds for the texts of a group, and for its replay, once its party has used up its account: 8 right episodes of
a shipped environment take .3 to 7 ms."""

KEY_TRIES_S: Final = 2 * FIRST_TRY_S
"""Bound on the CPU seconds of one key's recent first tries."""

PROBE_S: Final = 0.003
"""CPU seconds of the first try of an unknown producer while other unknown producers wait: 8 honest answers right after
a fork take .9 ms."""

KNOWN_CHECKS_PER_S, NEWCOMER_CHECKS_PER_S = 400.0, 200.0
"""Signature checks of directory records, 0.1 to 0.2 ms of CPU each."""

# --- streams and bytes -----------------------------------------------------------------------------------------------

STREAMS_TOTAL: Final = 256
STREAMS_PER_PEER: Final = 6
"""Streams of one peer: a subscription, a watch and a fetch, and three more for a connection that just broke."""

STREAMS_OF_NEWCOMERS: Final = 64
"""Streams that peers of lower standing keep while peers of higher standing ask for more."""

ITEMS_PER_GROUP: Final = 10
"""Stream items per group that a peer may bring: the peer also announces the groups of other nodes."""

CHUNKS_PER_PEER: Final = 8
"""Chunk requests of one peer, served or waiting; with 1 MiB each this fills a line of 80 MB/s at 100 ms."""

GIVER_SCORE: Final = 0.05
"""Least reputation of a peer that is served before peers that give nothing; one admitted group earns five minutes."""

# --- dials and connections -------------------------------------------------------------------------------------------

# Only dials that fail cost anything.
STRANGERS_PER_S: Final = 0.5
STRANGERS_BURST: Final = 16.0
RESERVE: Final = 4.0
"""Dials of strangers reserved for peers known to be alive, such as followers and newcomers that called us."""

KNOWN_PER_S: Final = 0.25
KNOWN_BURST: Final = 64.0
SUBNET_PER_S: Final = 1 / 60
"""Dials per second to one subnet, and as many to peers known to be alive that did not prove an address there."""

SUBNET_BURST: Final = 3.0
ALIVE_BURST: Final = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionBounds:
    """Bounds of one server's open connections: without an identity yet (unproven), and with an identity (proven)."""

    # 128, not fewer: the nodes of a local swarm, or users behind one router, connect at the same moment
    unproven_per_address: int = 128
    unproven_per_subnet: int = 256
    unproven_of_strangers: int = 768
    unproven_of_known: int = 256  # places of subnets that proved an identity before
    unproven_s: float = 10.0  # from the connection to the end of Hello
    proven_per_node: int = 8
    proven_per_subnet: int = 512
    proven: int = 2048

    @property
    def total(self) -> int:
        """Most connections that stay open in all."""
        return self.unproven_of_strangers + self.unproven_of_known + self.proven

    def scaled(self, share: float) -> "ConnectionBounds":
        """A copy with the total bounds scaled by `share`, 0 to 1, each at least 1, for a low limit of open files."""
        totals = ("unproven_of_strangers", "unproven_of_known", "proven")
        return replace(self, **{name: max(1, int(share * getattr(self, name))) for name in totals})
