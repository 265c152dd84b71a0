"""`swarm join`: from a link to a running node.

Invariant: the manifest is verified against the link's fingerprint and checked before anything is written;
it can name only built-in tasks and recipes.
"""

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.addresses import own_address
from swarm.config import NodeConfig, load_config, parse_config
from swarm.errors import ConfigError, Unauthenticated
from swarm.process import load_or_create_identity
from swarm.types import JsonDict, Role
from swarm.wire.manifest import JoinLink, fetch_manifest, node_config_from_manifest, write_toml

FETCH_TIMEOUT_S = 10.0


async def join_swarm(
    link: str,
    directory: Path,
    overrides: list[str],
    start: bool,
    say: Callable[[str], None],
    roles: Sequence[Role] = (),
) -> None:
    """Fetches the manifest, writes `<directory>/node.toml` where there is none, and runs the node.

    Args:
        link: swarm://host:port[,host:port]/RUN#FINGERPRINT
        directory: the node's own; its key is made on first use.
        overrides: `key.path=value` on top of the manifest.
        start: False only writes the file.
        say: where messages for people go.
        roles: what a new node does; empty: it trains and generates.

    Raises:
        ConfigError: the link or the manifest cannot be used; names the field.
        Unavailable: no address of the link answered.
    """
    from node.daemon import run_daemon
    from swarm.telemetry import setup_logging

    path = directory / "node.toml"
    identity = await asyncio.to_thread(load_or_create_identity, directory / "identity.key")
    if await asyncio.to_thread(path.exists):
        say(f"{path} exists and is used as it is; delete it to join anew")
    else:
        parsed = JoinLink.parse(link)
        try:
            fetched = await fetch_manifest(parsed, identity, FETCH_TIMEOUT_S)
        except Unauthenticated as error:
            raise ConfigError(f"link: its fingerprint is not that of who answered; is it complete? ({error})") from None
        data = node_config_from_manifest(fetched.manifest, parsed, fetched.bootstrap_peers, directory)
        data |= {"roles": [str(role) for role in roles]} if roles else {}
        await asyncio.to_thread(_require_recipe, parse_config(NodeConfig, data, "manifest"))
        data["worker"] = "inline" if fetched.manifest.model.source == "tiny" else "process"
        own = await asyncio.to_thread(own_address, parsed.addresses[0].rpartition(":")[0])
        say(listen_towards(data, own))
        await asyncio.to_thread(write_toml, data, path)
        say(f"joined run {parsed.run_id}; configuration in {path}")
    config = load_config(NodeConfig, path, overrides)
    if start:
        say(f"node {identity.node_id[:8]} starts; Ctrl-C stops it, the same command resumes it")
        setup_logging(config.telemetry.log_level, config.telemetry.log_format, config.name)
        await run_daemon(config)


def _require_recipe(config: NodeConfig) -> None:
    """Refuses a run whose recipe this installation does not have, or that cannot supply what the recipe needs.

    Raises:
        ConfigError: names the key.
    """
    try:
        from swarm.recipes import recipes_of

        recipes_of(config)
    except ConfigError as error:
        raise ConfigError(f"manifest: {error}; the run may need a newer swarm-trainer") from None
    except ImportError as error:
        raise ConfigError(f"a node learns and needs {error.name}: pip install 'swarm-trainer[learn]'") from None


def listen_towards(data: JsonDict, own: str) -> str:
    """Makes a joining node listen where the others are; says in a sentence who can dial it.

    Args:
        data: plain data of node.toml; changed in place.
        own: this machine's address on the way to the coordinator.
    """
    if ipaddress.ip_address(own.strip("[]")).is_loopback:
        return "the coordinator is on this machine: only nodes on it can dial this one"
    kind, host = ("ip6", "[::]") if own.startswith("[") else ("ip4", "0.0.0.0")
    data["exchange"] |= {"listen": f"{host}:0", "advertise": f"{own}:0"}
    data["directory"] |= {"listen": f"/{kind}/{own.strip('[]')}/tcp/0"}
    return (
        f"other nodes dial {own}; where that is behind NAT, fix the ports in exchange.listen and directory.listen, "
        "forward them, and set exchange.advertise and directory.announce"
    )
