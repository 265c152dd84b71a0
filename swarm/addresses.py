"""Dialable addresses: host:port for gRPC, TCP multiaddresses for the DHT.

Invariant: a dialable address names one host and one port, and the host is never a wildcard such as 0.0.0.0.
"""

import functools
import ipaddress
import re
import socket

HTTPS_PORT = 443
LEAST_PORT = 1024
_WILDCARDS = ("", "0.0.0.0", "::", "[::]")
_FAR_AWAY = "192.0.2.1"  # TEST-NET-1: routed like any other address, and unassigned
_NODE_ID = re.compile(r"[0-9a-f]{64}")
_PRIVATE_DOMAINS = (".localhost", ".local", ".internal", ".lan", ".home.arpa")  # never in the public DNS
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,99}")


def dialable_endpoint(text: str) -> str:
    """Checks and returns a host:port that others can dial, IPv6 in brackets; port 0 stands for the listening port.

    Raises:
        ValueError: `text` is no host:port, or its host is a wildcard.
    """
    host, _, port = text.rpartition(":")
    is_host = _is_ip(host[1:-1], 6) if host.startswith("[") and host.endswith("]") else _HOST.fullmatch(host)
    if not is_host or host in _WILDCARDS or not _is_port(port, least=0):
        raise ValueError("is no host:port that others could dial; expected one such as example.org:7700")
    return text


def listening_address(given: object) -> str:
    """Checks and returns a host:port to listen at; 0.0.0.0 or [::] stands for every interface, port 0 for a free port.

    Raises:
        ValueError: `given` is no host:port.
    """
    host, _, port = given.rpartition(":") if isinstance(given, str) else ("", "", "")
    is_v6 = host.startswith("[") and host.endswith("]") and _is_ip(host[1:-1], 6)
    if not isinstance(given, str) or not _is_port(port, least=0) or not (is_v6 or _HOST.fullmatch(host)):
        raise ValueError(
            "is no host:port to listen at; expected one such as 0.0.0.0:7700; port 0 stands for a free one"
        )
    return given


def dialable_anchor(text: str) -> str:
    """Checks and returns a NODE_ID@host:port.

    Raises:
        ValueError: `text` names no node id, or its host:port is not dialable.
    """
    node_id, _, endpoint = text.partition("@")
    if not _NODE_ID.fullmatch(node_id):
        raise ValueError("is no NODE_ID@host:port with a node id of 64 lower-case hex characters")
    dialable_endpoint(endpoint)
    return text


def is_service_port(port: int) -> bool:
    """True for a port that this node never dials at a peer's request: below LEAST_PORT and not HTTPS_PORT.

    Ports below LEAST_PORT belong to well-known services, and a peer could name a port of another host that shares its
    address. Also true for a number that is no port.
    """
    return port != HTTPS_PORT and not LEAST_PORT <= port < 65536


def relay_port(port: int) -> int:
    """Checks and returns the port of a relay; 0 stands for a free port.

    Raises:
        ValueError: `is_service_port` holds, so no node would dial the relay there.
    """
    if port and is_service_port(port):
        raise ValueError(f"is a port that nobody dials for a relay; expected {HTTPS_PORT}, {LEAST_PORT} to 65535, or 0")
    return port


def relayed_endpoint(relay: str, relay_id: str) -> str:
    """Endpoint of a node that holds a reservation at a relay: the relay's host:port, "/" and the relay's node id.

    Example:
        relayed_endpoint("relay.example.org:7700", 64 * "a")  # "relay.example.org:7700/aaaa..."
    """
    return f"{relay}/{relay_id}"


def split_relayed(endpoint: str) -> tuple[str, str]:
    """Splits an endpoint into the host:port to dial and the node id of the relay there, "" for a direct endpoint.

    Example:
        split_relayed("1.2.3.4:7700")  # ("1.2.3.4:7700", "")
    """
    host_port, _, relay_id = endpoint.partition("/")
    return host_port, relay_id


def dialable_multiaddress(text: str) -> str:
    """Checks and returns a TCP multiaddress without a peer id, such as /dns4/example.org/tcp/7701.

    Raises:
        ValueError: `text` has another form, its host is a wildcard, or its port is 0.
    """
    start, _, rest = text.partition("/")
    kind, host, transport, port = (rest.split("/") + 4 * [""])[:4]
    if kind in ("ip4", "ip6"):
        is_host = _is_ip(host, int(kind[2])) and host not in _WILDCARDS
    else:
        is_host = kind in ("dns", "dns4", "dns6") and _HOST.fullmatch(host)
    if start or not is_host or transport != "tcp" or not _is_port(port) or rest.count("/") != 3:
        raise ValueError("is no multiaddress that others could dial, such as /dns4/example.org/tcp/7701")
    return text


def endpoint_of(multiaddress: str) -> str:
    """host:port of a TCP multiaddress, with or without a peer id; host or port is empty if the address names none."""
    parts = multiaddress.strip("/").split("/")
    fields = dict(zip(parts[::2], parts[1::2], strict=False))
    host = f"[{fields['ip6']}]" if "ip6" in fields else ""
    host = next((fields[kind] for kind in ("ip4", "dns4", "dns", "dns6") if kind in fields), host)
    return f"{host}:{fields.get('tcp', '')}"


@functools.lru_cache(maxsize=2**14)
def public_subnet_of(host: str) -> str | None:
    """The /24 (IPv4) or /48 (IPv6) of a public address, which usually has one owner; None for any other host.

    Example:
        public_subnet_of("1.2.3.4")  # "1.2.3.0/24"
        public_subnet_of("10.0.0.7")  # None
    """
    address = _ip_of(host)
    if address is None or not address.is_global:
        return None
    return str(ipaddress.ip_network((address, 24 if address.version == 4 else 48), strict=False))


@functools.lru_cache(maxsize=2**14)
def subnet_of(host: str) -> str:
    """The network that holds a host and usually has one owner: the /24 of an IPv4 address, the /48 of an IPv6 one.

    A loopback or private address is returned without its network: the machines of a private network need not belong to
    one party. A name is returned unchanged and unresolved.

    Example:
        subnet_of("1.2.3.4")  # "1.2.3.0/24"
        subnet_of("127.0.0.7")  # "127.0.0.7"
    """
    return public_subnet_of(host) or str(_ip_of(host) or host)


def is_private_host(host: str) -> bool:
    """True for a loopback or private address, or a name without a public domain; names are not resolved.

    Only machines on the same network can dial a private host. False for a wildcard such as 0.0.0.0, which may stand for
    a public interface.

    Example:
        is_private_host("10.0.0.7")  # True
        is_private_host("head-node")  # True
        is_private_host("swarm.example.org")  # False
    """
    if host in _WILDCARDS:
        return False
    address = _ip_of(host)
    if address is None:
        is_number = host[:1].isdigit()  # another spelling of an address: 16909060 is 1.2.3.4
        return ("." not in host and not is_number) or host.lower().endswith(_PRIVATE_DOMAINS)
    return not address.is_global


def is_loopback(host: str) -> bool:
    """True for "localhost" or a loopback address, including an IPv4-mapped one.

    Example:
        is_loopback("[::ffff:127.0.0.1]")  # True
    """
    address = _ip_of(host)
    return host == "localhost" if address is None else address.is_loopback


@functools.cache
def has_whole_loopback() -> bool:
    """True if this machine can listen on all of 127.0.0.0/8, as on Linux, and not only on 127.0.0.1."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.1.2.3", 0))
        except OSError:
            return False
    return True


def is_wildcard(listen: str) -> bool:
    """True for a listening host:port whose host is a wildcard, which others cannot dial."""
    return listen.rpartition(":")[0] in _WILDCARDS


def own_address(towards: str = _FAR_AWAY) -> str:
    """This machine's address on the route to a host, IPv6 in brackets; 127.0.0.1 if none or only a link-local one.

    Asks the routing table and the resolver (blocking); sends no packet to the host.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(towards.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            address = str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
    if "%" in address:  # of one link only: others could not dial it
        return "127.0.0.1"
    return f"[{address}]" if ":" in address else address


def advertised(advertise: str, listen: str, towards: str = "") -> str:
    """The host:port that others dial: the configured `advertise`, else `listen`.

    If the host of `listen` is a wildcard, this machine's current address replaces it, and also the host of an
    `advertise` with port 0, which `swarm join` recorded and which may have changed; without a network that host stays.
    """
    is_of_joining = advertise.rpartition(":")[2] == "0"
    if not is_wildcard(listen) or (advertise and not is_of_joining):
        return advertise or listen
    own = own_address(towards) if towards else own_address()
    if is_of_joining and is_loopback(own):  # no network yet
        return advertise
    return f"{own}:{listen.rpartition(':')[2]}"


def _ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address of a host, brackets and zone removed, IPv4-mapped as IPv4; None for a name."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _is_port(text: str, least: int = 1) -> bool:
    return text.isascii() and text.isdecimal() and least <= int(text) < 65536 and len(text) <= 5


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version and "%" not in text
    except ValueError:
        return False
