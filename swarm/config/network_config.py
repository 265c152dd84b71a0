"""Relations to other nodes: exchange of groups, directory, coordinator, and admission to the run.

Invariant: an address that the node advertises has a form that others can dial.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from swarm.addresses import dialable_anchor, dialable_endpoint, dialable_multiaddress, relay_port
from swarm.config.section import Listening, Model, NotNegative, Positive, PositiveFloat, Usual

Endpoint = Annotated[str, AfterValidator(lambda text: dialable_endpoint(text) if text else text)]
MAX_ANCHORS = 16
Anchor = Annotated[str, AfterValidator(dialable_anchor)]
Multiaddress = Annotated[str, AfterValidator(dialable_multiaddress)]
MAX_MEMBERS = 1000
RelayPort = Annotated[int, AfterValidator(relay_port)]
LEAST_UPLOAD_BYTES_PER_S = 50_000  # a chunk of 1 MiB in 28 s beside relayed bytes: peers wait for one for 30 s
NodeIdText = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ExchangeConfig(Model):
    """The exchange of groups with other nodes."""

    removed: ClassVar = {"groups_per_minute": 6000, "dial_timeout_s": 5.0}

    listen: Listening = "127.0.0.1:0"
    """host:port of the exchange service; port 0 picks a free one."""
    advertise: Endpoint = ""
    """host:port that others should dial (a mapped port, a public name); empty uses the listening address."""
    reach: Annotated[Literal["auto", "dialable", "outward"], Usual("auto", "peers")] = "auto"
    """Way to this node. `auto`: the coordinator and some peers try to dial it, and where they cannot it is
    reached through relays. `outward`: through relays, without a try. `dialable`: where it listens or advertises,
    whatever comes of their tries, after which they can lead to it who cannot dial it themselves."""
    relay_reservations: Annotated[int, Field(ge=0, le=4096)] = 128
    """Nodes that cannot be dialled for which this one passes on connections, whose content it cannot read; 0: none."""
    relay_bytes_per_s: Positive = 8 * 2**20
    """Most bytes a second that it passes on for them, both directions together; a quarter of max_upload_bytes_per_s
    where that is less."""
    relay_port: RelayPort = 0
    """TCP port at which it passes their bytes on from socket to socket: 443, or 1024 to 65535, the same for others as
    here; 0: a free one, another one at each start. Where others do not reach it, bytes go by `listen`, at several times
    the work."""
    max_neighbours: Annotated[int, Field(ge=0, le=64), Usual("1..", "peers")] = 8
    """Peers whose groups are streamed."""
    max_group_bytes: Annotated[int, Field(ge=1024, le=64 * 2**20), Usual("1e5..", "exchange")] = 4 * 2**20
    """Largest group accepted or sent (serialised, after decompression)."""
    store_bytes: Positive = 2 * 2**30
    """Disk budget of the group store."""
    max_upload_bytes_per_s: Annotated[NotNegative, Usual("5e5..", "peers exchange")] = 0
    """Most bytes per second that leave for peers: groups, manifests and chunks of weights, and what is passed on for
    others, together. Peers that give groups go first. The DHT and the coordinator do not count. 0: no limit."""
    lookup_every_s: Annotated[PositiveFloat, Usual("..60", "peers")] = 2.0
    """Seconds between two look-ups in the directory."""
    advert_every_s: Annotated[PositiveFloat, Usual("..600", "peers")] = 30.0
    """Seconds between two refreshes of the own advert; it expires after three times that."""
    anchors: Annotated[tuple[Anchor, ...], Field(max_length=MAX_ANCHORS)] = ()
    """Long-lived nodes that are dialled while few other peers are known, each as NODE_ID@host:port."""

    @property
    def most_relayed_bytes_per_s(self) -> int:
        """Bound of relayed bytes per second: relay_bytes_per_s, at most a quarter of a set max_upload_bytes_per_s."""
        most = self.max_upload_bytes_per_s
        return min(self.relay_bytes_per_s, most // 4) if most else self.relay_bytes_per_s

    @property
    def most_own_bytes_per_s(self) -> int:
        """Bound of own bytes per second to peers: max_upload_bytes_per_s less the relayed share; 0: no limit."""
        most = self.max_upload_bytes_per_s
        return most - self.most_relayed_bytes_per_s if most and self.relay_reservations else most

    @model_validator(mode="after")
    def _upload_is_of_use(self) -> "ExchangeConfig":
        if 0 < self.max_upload_bytes_per_s < LEAST_UPLOAD_BYTES_PER_S:
            raise ValueError(
                f"max_upload_bytes_per_s: {self.max_upload_bytes_per_s} is below {LEAST_UPLOAD_BYTES_PER_S:,}, with "
                "which a chunk of weights comes later than peers wait for it; set more, or 0 for no limit"
            )
        return self


class DirectoryConfig(Model):
    """Discovery through the hivemind DHT."""

    removed: ClassVar = {"rejoin_every_s": 20.0}

    kind: Literal["dht", "none"] = "dht"
    """`none` runs alone."""
    listen: str = "/ip4/127.0.0.1/tcp/0"
    """Multiaddress that the DHT listens on (TCP only)."""
    announce: tuple[Multiaddress, ...] = ()
    """Multiaddresses that others should dial (a mapped port, a public name) such as /dns4/example.org/tcp/7701; empty
    announces the listening addresses. The peer id is added."""
    bootstrap: tuple[str, ...] = ()
    """Multiaddresses of known DHT peers; several, in case one is gone."""
    shards: Annotated[int, Field(ge=1, le=1024), Usual("..1", "peers")] = 1
    """Keys over which adverts are spread: about one per 64 nodes."""


class CoordinatorLink(Model):
    """Address of the coordinator; a node works without one."""

    address: str = ""
    """host:port, several separated by commas; empty: no coordinator."""
    fingerprint: str = ""
    """Node id of the coordinator (SHA-256 of its public key, hex)."""
    heartbeat_s: Annotated[PositiveFloat, Usual("..60", "peers")] = 5.0
    """Seconds between heartbeats."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Each host:port in `address`, in order."""
        return tuple(each.strip() for each in self.address.split(",") if each.strip())


class EntryConfig(Model):
    """Admission to the run: public, vouched and private runs differ in these lines alone."""

    kind: Literal["open", "work", "invited", "members"] = "open"
    """`open`: every key. `work`: whoever shows minutes of proof of work, or an invitation. `invited`: keys that a
    member or the coordinator invited. `members`: the listed ones only. Members enter every run."""
    members: tuple[NodeIdText, ...] = Field(default=(), max_length=MAX_MEMBERS)
    """Node ids of those who belong to the run from the start and may invite others (`swarm-node invite`)."""
    denied: tuple[NodeIdText, ...] = Field(default=(), max_length=MAX_MEMBERS)
    """Node ids that are refused whatever they show; what they invited is refused, too."""
    established: Literal["auto", "everybody", "members"] = "auto"
    """Nodes whose groups count in full. `members`: members and those that they invited; all other nodes together fill
    at most an eighth of what this node draws of others' groups. `everybody`: a closed network, where whoever reaches
    this node belongs to it; groups without log-probs have an eighth there, too. `auto`: everybody where the kind is
    `open`, no members are listed, and this node, its coordinator and its bootstrap peers have loopback or private
    addresses, or names without a public domain; else members."""
    work_bits: Annotated[int, Field(ge=1, le=40), Usual("17..22", "peers")] = 17
    """Proof of work: 2 to this power is the mean number of tries; 17 takes about 4 minutes of one core of a laptop."""

    @model_validator(mode="after")
    def _somebody_enters(self) -> "EntryConfig":
        if self.kind == "members" and not self.members:
            raise ValueError('members: kind "members" admits the listed node ids only, and none is listed')
        return self
