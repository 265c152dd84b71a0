"""How nodes find and reach each other.

Invariant: a combination that cannot work does not validate; the message names the key and the fix.
"""

from typing import Annotated, Literal

from pydantic import Field

from swarm.config.base import Endpoint, Model, Multiaddress, Positive, PositiveFloat


class ExchangeConfig(Model):
    """Talking to other nodes."""

    listen: str = "127.0.0.1:0"
    """host:port of the exchange service; port 0 picks a free one."""
    advertise: Endpoint = ""
    """host:port that others should dial (a mapped port, a public name); empty uses the listening address."""
    max_neighbours: Annotated[int, Field(ge=0, le=64)] = 8
    """Peers whose groups are streamed."""
    max_group_bytes: Annotated[int, Field(ge=1024, le=64 * 2**20)] = 4 * 2**20
    """Largest group accepted or sent (serialised, after decompression)."""
    store_bytes: Positive = 2 * 2**30
    """Disk budget of the group store."""
    groups_per_minute: Positive = 6000
    """Most groups accepted from one peer in a minute; ten times so many may be announced on its streams."""
    dial_timeout_s: PositiveFloat = 5.0
    """Deadline of a connection attempt."""
    lookup_every_s: PositiveFloat = 2.0
    """Seconds between two looks at the directory."""
    advert_every_s: PositiveFloat = 30.0
    """Seconds between two refreshes of the own advert; it expires after three times that."""


class DirectoryConfig(Model):
    """Discovery through the hivemind DHT."""

    kind: Literal["dht", "none"] = "dht"
    """`none` runs alone."""
    listen: str = "/ip4/127.0.0.1/tcp/0"
    """Multiaddress that the DHT listens on (TCP only)."""
    announce: tuple[Multiaddress, ...] = ()
    """Multiaddresses that others should dial (a mapped port, a public name) such as /dns4/example.org/tcp/7701; empty
    announces the listening addresses. The peer id is added."""
    bootstrap: tuple[str, ...] = ()
    """Multiaddresses of known DHT peers; several, in case one is gone."""
    shards: Annotated[int, Field(ge=1, le=1024)] = 1
    """Keys over which adverts are spread: about one per 64 nodes."""
    rejoin_every_s: PositiveFloat = 20.0
    """Seconds between two rounds of probe and repair."""


class CoordinatorLink(Model):
    """Where the coordinator is; a node works without one."""

    address: str = ""
    """host:port, several separated by commas; empty: no coordinator."""
    fingerprint: str = ""
    """Node id of the coordinator (SHA-256 of its public key, hex)."""
    heartbeat_s: PositiveFloat = 5.0
    """Seconds between heartbeats."""
