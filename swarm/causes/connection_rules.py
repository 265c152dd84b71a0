"""Rules about connections: whether other nodes are found, dial this one, and are dialled by it."""

from typing import Any, Final

from swarm.addresses import is_private_host
from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.pace_rules import overdue
from swarm.causes.snapshot import Snapshot, shortened
from swarm.events import GroupAdmitted, events_of

PATIENCE_S: Final = 60.0  # a node needs some of them to find others
FEW_CALLERS: Final = 4
FULL_SHARE: Final = 0.8


def turns_others_away(snapshot: Snapshot) -> Diagnosed | None:
    """The entry rule here lets nobody in who calls."""
    count = snapshot.value("num_entry_refused", 0)
    if count < FEW_CALLERS or snapshot.value("peers", list[str]()):
        return None
    kind = "" if snapshot.config is None else f" (entry.kind = {snapshot.config.entry.kind})"
    return Diagnosed(
        name="turns_others_away",
        claim=f"this node turns away all others: they show nothing that its entry rule asks for{kind}",
        evidence=(f"num_entry_refused {count}, peers: none (status.json)",),
        fix="compare [entry] with the run's; list them under entry.members, or invite them: swarm-node invite ID",
        gravity=Gravity.HARMS,
        key="entry.kind",
    )


def cannot_dial(snapshot: Snapshot) -> Diagnosed | None:
    """Addresses of others do not answer, and nobody is connected."""
    dials: dict[str, int] = snapshot.value("dials", {})
    failed, answered = dials.get("failed", 0), dials.get("answered", 0)
    if snapshot.value("peers", list[str]()) or not failed or answered or snapshot.up_s < PATIENCE_S / 2:
        return None
    error = shortened(snapshot.value("newest_dial_error", ""))
    return Diagnosed(
        name="cannot_dial",
        claim="other nodes are known, and none of their addresses answers" + (f": {error}" if error else ""),
        evidence=(f"dials: {failed} failed, 0 answered; peers: none (status.json)",),
        fix="on them: exchange.advertise must be an address that others can dial (a mapped port, a public "
        "name), and the "
        f"firewall must let it through; swarm doctor --config {snapshot.directory / 'node.toml'} tries what is "
        f"set here",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        follows_from=frozenset({"clock_is_wrong", "coordinator_refuses"}),
    )


def nobody_can_dial(snapshot: Snapshot) -> Diagnosed | None:
    """Others are elsewhere, and the address that they get from this node is of this machine alone."""
    if snapshot.config is None or not snapshot.has_others:
        return None
    endpoints = snapshot.value("endpoints", list[str]())
    local = [each for each in endpoints if each.rpartition(":")[0].strip("[]") in ("127.0.0.1", "localhost", "::1")]
    known = [address.rpartition(":")[0] for address in snapshot.config.coordinator.addresses[:1]]
    known += [each.split("/")[2] for each in snapshot.config.directory.bootstrap if each.count("/") > 3]
    far = [host for host in known if host and host not in ("127.0.0.1", "localhost", "::1")]
    if not local or len(local) < len(endpoints) or not far:
        return None
    kind = "in a private network" if is_private_host(far[0]) else "on the internet"
    return Diagnosed(
        name="nobody_can_dial",
        key="exchange.listen",
        claim="no other machine can dial this node: it announces an address of this machine alone",
        evidence=(f"endpoints: {', '.join(endpoints)} (status.json); the run is {kind} ({far[0]})",),
        fix=snapshot.set_key(
            "exchange.listen",
            "0.0.0.0:7700",
            why=', [exchange] advertise = "HOST:7700", and under '
            '[directory] listen = "/ip4/0.0.0.0/tcp/7701" and announce',
        ),
        gravity=Gravity.HARMS,
        certainty=Certainty.SURE,
    )


def no_relay(snapshot: Snapshot) -> Diagnosed | None:
    """Others cannot dial this node, and it has a reservation at no relay."""
    reach: dict[str, Any] = snapshot.value("reach", {})
    if reach.get("kind") != "outward" or reach.get("relays") or snapshot.up_s < PATIENCE_S / 2:
        return None
    return Diagnosed(
        name="no_relay",
        claim="nobody takes groups or weights from this node: others cannot dial it, and it holds no relay reservation",
        evidence=(f"reached: outward, through nobody; {reach.get('detail', '')} (status.json)",),
        fix="forward a TCP port to this machine and name it in exchange.listen and exchange.advertise, or have the "
        "operator set relay_reservations above 0 in coordinator.toml; swarm doctor LINK tries what this network allows",
        gravity=Gravity.HARMS,
        certainty=Certainty.SURE,
        follows_from=frozenset({"clock_is_wrong", "coordinator_refuses"}),
    )


def directory_is_off(snapshot: Snapshot) -> Diagnosed | None:
    """Other nodes are named in the configuration of a node that runs alone."""
    config = snapshot.config
    if config is None or config.directory.kind != "none":
        return None
    named = [f"directory.bootstrap ({len(config.directory.bootstrap)})"] if config.directory.bootstrap else []
    named += [f"exchange.anchors ({len(config.exchange.anchors)})"] if config.exchange.anchors else []
    if not named:
        return None
    return Diagnosed(
        name="directory_is_off",
        key="directory.kind",
        claim='the node runs alone, as directory.kind is "none", though other nodes are named',
        evidence=(f"{' and '.join(named)} (node.toml)",),
        fix=snapshot.set_key("directory.kind", "dht") + "; where it is to be alone, take their addresses out",
        gravity=Gravity.WASTES,
        certainty=Certainty.LIKELY,
    )


def upload_is_short(snapshot: Snapshot) -> Diagnosed | None:
    """What leaves for peers fills the limit all the time."""
    config, up_s = snapshot.config, snapshot.at_s - snapshot.value("started_at_s", snapshot.at_s)
    most = 0 if config is None else config.exchange.most_own_bytes_per_s
    sent = snapshot.value("bytes_sent", 0) + snapshot.value("weights_sent_bytes", 0)
    if not most or up_s < PATIENCE_S or sent < FULL_SHARE * most * up_s:
        return None
    return Diagnosed(
        name="upload_is_short",
        key="exchange.max_upload_bytes_per_s",
        claim="what leaves for peers fills exchange.max_upload_bytes_per_s: they get groups and weights late",
        evidence=(f"{sent / up_s:,.0f} bytes a second of {most:,} (bytes_sent, weights_sent_bytes in status.json)",),
        fix=snapshot.set_key("exchange.max_upload_bytes_per_s", 0, why=" (no limit), or more than now"),
        gravity=Gravity.WASTES,
        certainty=Certainty.LIKELY,
    )


def alone(snapshot: Snapshot) -> Diagnosed | None:
    """A node that looks for others has found none."""
    config = snapshot.config
    if config is None or not snapshot.has_others or snapshot.up_s < PATIENCE_S or snapshot.is_finished:
        return None
    if snapshot.value("peers", list[str]()) or snapshot.following is not None:
        return None
    wants = config.replay.external_groups > 0
    knows = bool(config.directory.bootstrap or config.coordinator.address)
    known = snapshot.value("known_peers", 0)
    newest_s = max((event.at_s for event in events_of(GroupAdmitted, snapshot.events)), default=0.0)
    are_gone = newest_s >= snapshot.started_at_s if snapshot.started_at_s is not None else False
    if are_gone and snapshot.at_s - newest_s < PATIENCE_S and overdue(snapshot, GroupAdmitted) is None:
        return None
    if are_gone:
        claim = (
            f"the other nodes are gone: none is connected, and the newest of the {snapshot.num_admitted} groups that "
            f"came is {snapshot.at_s - newest_s:.0f} s old"
        )
        fix = "do they run (swarm why on them), and does the network between still work? This node goes on alone"
    elif not knows:
        claim = "this node is alone: it is told of nobody (directory.bootstrap is empty), and nobody came"
        fix = "where others are there: " + snapshot.set_key("directory.bootstrap", "ADDRESS").replace(
            '"ADDRESS"', '["ADDRESS"], the row bootstrap of their swarm status'
        )
    else:
        claim = "this node is alone: no other node of the run was found"
        fix = (
            f"is anybody else there, with the same run_id ({config.run_id}) and directory.shards "
            f"({config.directory.shards}), and do both clocks show the same time (timedatectl)? "
            f"swarm doctor --config {snapshot.directory / 'node.toml'} tries the bootstrap addresses"
        )
    error = shortened(snapshot.value("newest_dial_error", ""))
    return Diagnosed(
        name="alone",
        claim=claim + (f"; the newest dial failed: {error}" if error else ""),
        evidence=(
            f"peers: none, known_peers {known} after {snapshot.up_s:.0f} s (status.json); bootstrap: "
            f"{len(config.directory.bootstrap)} addresses (node.toml)",
        ),
        fix=fix,
        gravity=Gravity.HARMS if wants and (knows or are_gone) else Gravity.NOTE,
        certainty=Certainty.POSSIBLE,
        follows_from=frozenset(
            {"cannot_dial", "coordinator_refuses", "clock_is_wrong", "coordinator_away", "nobody_can_dial", "no_relay"}
            | {"turns_others_away"}
        ),
    )
