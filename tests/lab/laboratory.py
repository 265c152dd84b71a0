"""A laboratory of networks: namespaces of the kernel, joined by virtual cables, with routers between them.

Needs root, `ip` and `nft`. All addresses are of the laboratory's own namespaces (10.77.0.0/16 is its "internet",
192.168.x.0/24 are homes behind routers); nothing leaves it. `close` removes all of it.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

NEEDS: Final = ("ip", "nft")
INTERNET: Final = "10.77.0"


def why_not() -> str:
    """Why there can be no laboratory here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in NEEDS if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: apt-get install iproute2 nftables"
    probe = f"swarm-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "this kernel lets us make no network namespace"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return ""


@dataclass
class Laboratory:
    """Networks under construction.

    Example:
        with Laboratory() as lab:
            coordinator = lab.host("coordinator")
            laptop = lab.behind_router("laptop", rules=MASQUERADE)
            subprocess.Popen(lab.command(laptop, ["swarm", "join", link]))
    """

    made: list[str] = field(default_factory=list[str])
    _num_hosts: int = 0
    _num_cables: int = 0

    def __enter__(self) -> "Laboratory":
        self._core = self._namespace("core")
        self._in(self._core, "ip link add bridge0 type bridge")
        self._in(self._core, "ip link set bridge0 up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(self.made):
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
            for pid in pids.split():
                subprocess.run(["kill", "-9", pid], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    # --- networks ----------------------------------------------------------------------------------

    def host(self, name: str, rules: Sequence[str] = ()) -> str:
        """A host on the "internet", with firewall rules of its own; returns its namespace."""
        namespace = self._namespace(name)
        self._attach(namespace)
        self._filter(namespace, rules)
        return namespace

    def behind_router(self, name: str, rules: Sequence[str], *, home: int = 1, is_double: bool = False) -> str:
        """A host behind a router with these rules (and behind a second one with the same, where it is double)."""
        router = self._namespace(f"{name}-r")
        self._attach(router)
        self._filter(router, rules)
        inner, number = router, home
        if is_double:
            second = self._namespace(f"{name}-r2")
            self._cable(router, f"192.168.{number}.1/24", second, f"192.168.{number}.2/24", via=f"192.168.{number}.1")
            self._filter(second, rules, outward="up1")
            inner, number = second, home + 100
        namespace = self._namespace(name)
        self._cable(inner, f"192.168.{number}.1/24", namespace, f"192.168.{number}.2/24", via=f"192.168.{number}.1")
        return namespace

    def routed(self, name: str, rules: Sequence[str], *, subnet: int) -> str:
        """A host with an address of its own (10.77.`subnet`.2) behind a router that forwards by these rules."""
        router = self._namespace(f"{name}-r")
        own = self._attach(router)
        self._filter(router, rules)
        self._in(self._core, f"ip route add 10.77.{subnet}.0/24 via {own}", may_fail=True)
        namespace = self._namespace(name)
        self._cable(router, f"10.77.{subnet}.1/24", namespace, f"10.77.{subnet}.2/24", via=f"10.77.{subnet}.1")
        for other in self.made:
            if other != self._core:
                self._in(other, f"ip route add 10.77.{subnet}.0/24 via {own}", may_fail=True)
        return namespace

    def address_of(self, namespace: str) -> str:
        """Its address."""
        found = self._out(namespace, "ip -4 -o addr show up scope global").split()
        return found[found.index("inet") + 1].partition("/")[0]

    def command(self, namespace: str, command: Sequence[str]) -> list[str]:
        """The command as it runs there."""
        return ["ip", "netns", "exec", namespace, *command]

    def run(self, command: Sequence[str]) -> None:
        """Runs a command to its end. Raises CalledProcessError."""
        subprocess.run(command, check=True, capture_output=True)

    # --- parts -------------------------------------------------------------------------------------

    def _namespace(self, name: str) -> str:
        full = f"swarm-{os.getpid()}-{name}"
        subprocess.run(["ip", "netns", "add", full], check=True)
        self.made.append(full)
        self._in(full, "ip link set lo up")
        return full

    def _attach(self, namespace: str) -> str:
        self._num_hosts += 1
        address = f"{INTERNET}.{self._num_hosts + 1}"
        outer, inner = self._pair(self._core, namespace)
        self._in(self._core, f"ip link set {outer} master bridge0 up")
        self._in(namespace, f"ip link set {inner} name up0")
        self._in(namespace, f"ip addr add {address}/24 dev up0")
        self._in(namespace, "ip link set up0 up")
        return address

    def _cable(self, one: str, address: str, other: str, other_address: str, via: str) -> None:
        near, far = self._pair(one, other)
        self._in(one, f"ip addr add {address} dev {near}")
        self._in(one, f"ip link set {near} up")
        name = "up1" if other.endswith("-r2") else "up0"
        self._in(other, f"ip link set {far} name {name}")
        self._in(other, f"ip addr add {other_address} dev {name}")
        self._in(other, f"ip link set {name} up")
        self._in(other, f"ip route add default via {via}")
        self._in(one, "sysctl -qw net.ipv4.ip_forward=1")

    def _pair(self, one: str, other: str) -> tuple[str, str]:
        self._num_cables += 1
        near, far = f"v{self._num_cables}a", f"v{self._num_cables}b"
        self._in(one, f"ip link add {near} type veth peer name {far} netns {other}")
        return near, far

    def _filter(self, namespace: str, rules: Sequence[str], outward: str = "up0") -> None:
        for rule in rules:
            self._in(namespace, rule.replace("OUTWARD", outward))

    def _in(self, namespace: str, command: str, *, may_fail: bool = False) -> None:
        words = command.split("'")
        parts = [*words[0].split(), *words[1:2], *(words[2].split() if len(words) > 2 else [])]
        done = subprocess.run(self.command(namespace, parts), capture_output=True, text=True, check=False)
        if done.returncode and not may_fail:
            raise RuntimeError(f"{namespace}: {command}: {done.stderr.strip()}")

    def _out(self, namespace: str, command: str) -> str:
        return subprocess.run(
            self.command(namespace, command.split()), capture_output=True, text=True, check=True
        ).stdout


# --- what routers do -------------------------------------------------------------------------------

MASQUERADE: Final = (
    "nft add table ip nat",
    "nft add chain ip nat post '{ type nat hook postrouting priority 100 ; }'",
    "nft add rule ip nat post oifname OUTWARD masquerade",
    *(
        _drop_inward := (
            "nft add table ip filter",
            "nft add chain ip filter forward '{ type filter hook forward priority 0 ; }'",
            "nft add rule ip filter forward iifname OUTWARD ct state new drop",
        )
    ),
)
# Other ports for each connection, and a connection that is idle for a few seconds is forgotten.
SHORT_IDLE_S: Final = 8
SHORT_MASQUERADE: Final = (
    "nft add table ip nat",
    "nft add chain ip nat post '{ type nat hook postrouting priority 100 ; }'",
    "nft add rule ip nat post oifname OUTWARD masquerade fully-random",
    *_drop_inward,
    f"sysctl -qw net.netfilter.nf_conntrack_tcp_timeout_established={SHORT_IDLE_S}",
    "sysctl -qw net.netfilter.nf_conntrack_tcp_loose=0",
)
ONLY_443: Final = (
    *MASQUERADE,
    "nft add rule ip filter forward oifname OUTWARD ct state new tcp dport != 443 drop",
    "nft add rule ip filter forward oifname OUTWARD ct state new udp dport != 53 drop",
)
STATEFUL: Final = ("sysctl -qw net.ipv4.ip_forward=1", *_drop_inward)
