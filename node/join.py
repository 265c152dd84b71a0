"""`swarm join`: turns a join link into a configured, running node.

Invariant: the manifest is verified against the link's fingerprint and checked, together with the overrides, before
node.toml is written; it can name only built-in environments and recipes. An option is applied or refused.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from node.credential import keep_invitation, read_invitation
from node.device_checks import machine_choice, with_choice
from node.disk_budget import recipe_words, takes_line, within_budget
from swarm.addresses import is_loopback, own_address
from swarm.clock import SystemClock
from swarm.command_line import waiting
from swarm.config import NODE_FILE, NodeConfig, apply_overrides, load_config, parse_config
from swarm.config.generation_config import SHIPPED
from swarm.environments.first_problem import require_first_problems
from swarm.errors import ConfigError, SwarmError, Unauthenticated, Unavailable
from swarm.identity import Identity
from swarm.printable import as_argument
from swarm.process import load_or_create_identity
from swarm.trained.own_directories import code_of_engine, code_of_node, record_own, require_trusted
from swarm.types import JsonDict, NodeId, Role
from swarm.wire.held_manifest import HELD, differences, in_words, load_held, save_held, with_held
from swarm.wire.join_link import FetchedManifest, JoinLink, fetch_manifest, node_config_from_manifest
from swarm.wire.run_manifest import check_expiry, check_succession, write_node_toml

FETCH_TIMEOUT_S = 10.0
GUEST_NICENESS = 10  # of a node that joins: the machine's own user goes first
OTHERWISE = "this node and the others refuse each other's groups"


async def join_swarm(
    link: str,
    directory: Path,
    overrides: list[str],
    start: bool,
    say: Callable[[str], None],
    roles: Sequence[Role] = (),
    invitation: str = "",
    is_trusted: bool = False,
) -> None:
    """Fetches the manifest, writes `<directory>/node.toml` if there is none, and runs the node.

    Args:
        link: swarm://host:port[,host:port]/RUN#FINGERPRINT
        directory: the node's directory; its key is made on first use.
        overrides: `key.path=value` on top of the manifest, written as well; with a node.toml that exists, for this
            start only.
        start: False only writes the file.
        say: function that takes messages for people.
        roles: the node's roles; empty: a new node trains and generates.
        invitation: text of a member's invitation, kept in the directory; "": none, or the one that is there.
        is_trusted: True: code that the directory's node.toml names is loaded, whoever made it.

    Raises:
        ConfigError: the link, the manifest or an override cannot be used, or the directory is of a node that does
            something else, or names code and is neither own nor trusted; the message names the field.
        Unavailable: no address of the link answered.
    """
    from node.daemon import run_daemon
    from swarm.telemetry import setup_logging

    parsed, path = JoinLink.parse(link), directory / NODE_FILE
    is_new = not await asyncio.to_thread(directory.exists)
    identity = await asyncio.to_thread(load_or_create_identity, directory / "identity.key")
    if invitation:
        await asyncio.to_thread(keep_invitation, directory, invitation, parsed.run_id, identity.node_id)
    if await asyncio.to_thread(path.exists):
        written = config = load_config(NodeConfig, path, overrides)
        await asyncio.to_thread(
            require_trusted, directory, code_of_node(config) | code_of_engine(config), is_trusted, overrides
        )
        config = await asyncio.to_thread(_in_directory, config, path, say)
        held = await asyncio.to_thread(load_held, directory, config.run_id)
        followed = with_held(config, held) if held is not None and held.key == parsed.fingerprint else config
        _require_same_node(followed, path, parsed, roles)
        if not start and written != load_config(NodeConfig, path):
            raise ConfigError(f"{path} exists, and --set is not written into it: change the file itself")
        say(f"{path} exists and is used as it is{', with --set for this start' if overrides else ''}")
        if config.coordinator.address != ",".join(parsed.addresses):
            say(f"coordinator.address stays {config.coordinator.address!r}: change it there if the coordinator moved")
        if held is None:
            say(await _hold_first(parsed, identity, directory))
        elif found := differences(config, held.manifest):
            say(f"warning: {in_words(found)}: {OTHERWISE}; change {path}, or delete it and join again: the node keeps "
                "its key, groups and checkpoints")  # fmt: skip
    else:
        try:
            with waiting(f"asking the coordinator of {parsed.run_id}, and trying the run's first problems", say=say):
                config = await _write_new(parsed, identity, path, overrides, say, roles)
        except BaseException:
            if is_new:  # nothing but a key that nobody saw
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            raise
        await asyncio.to_thread(record_own, directory)
    if start:
        if Role.TRAINER in config.roles:
            say(f"recipe     {recipe_words(config.learner)}")
        with waiting("measuring this machine", say=say):
            takes = await asyncio.to_thread(lambda: takes_line(with_choice(config, machine_choice(config))))
        say(takes)
        say(f"node {identity.node_id[:8]} starts; Ctrl-C stops it, the same command resumes it")
        setup_logging(config.telemetry.log_level, config.telemetry.log_format, config.shown_name)
        await run_daemon(config)


async def _hold_first(link: JoinLink, identity: Identity, directory: Path) -> str:
    """Stores the run's manifest for a node that joined before manifests were kept; returns a sentence for people."""
    try:
        signed = (await fetch_manifest(link, identity, FETCH_TIMEOUT_S)).signed
        check_expiry(signed.manifest, SystemClock().now_s())
        await asyncio.to_thread(save_held, directory, signed)
    except SwarmError as error:
        return f"the run's manifest is not followed yet: {error}; the same command tries again"
    return f"{directory / HELD} holds the run's manifest, and newer ones are followed"


def _in_directory(config: NodeConfig, path: Path, say: Callable[[str], None]) -> NodeConfig:
    """The configuration with the directory of node.toml as `dir`, unless the node's key is in `dir`.

    Raises:
        ConfigError: the directory is a copy of another node's.
    """
    directory = path.parent
    if config.dir.resolve() == directory.resolve():
        return config
    if (config.dir / NODE_FILE).exists():
        raise ConfigError(
            f"{path}: dir is {str(config.dir)!r}, where a node is too, so this directory is a copy of it, and two "
            f"nodes cannot have one key: join in a new directory, or delete {directory / 'identity.key'} and write "
            f'dir = "{directory}" there'
        )
    if (config.dir / "identity.key").exists():
        return config
    say(f"{path}: dir is {str(config.dir)!r}, where no node is; it runs in {directory}")
    return config.model_copy(update={"dir": directory})


def _require_same_node(config: NodeConfig, path: Path, link: JoinLink, roles: Sequence[Role]) -> None:
    """Refuses to start a node of another run, coordinator or task than was asked for. Raises ConfigError."""
    pairs = [
        ("run_id", config.run_id, link.run_id),
        ("coordinator.fingerprint", config.coordinator.fingerprint, link.fingerprint),
        ("roles", ", ".join(config.roles), ", ".join(roles or config.roles)),
    ]
    wrong = [f"{key} is {has!r}, you asked for {asked!r}" for key, has, asked in pairs if has != asked]
    if wrong:
        raise ConfigError(
            f"{path}: {'; '.join(wrong)}; give the new node a directory of its own with --dir, "
            f"or start this one as it is: swarm-node start {as_argument(path.parent)}"
        )


async def _write_new(
    link: JoinLink,
    identity: Identity,
    path: Path,
    overrides: list[str],
    say: Callable[[str], None],
    roles: Sequence[Role],
) -> NodeConfig:
    """Writes node.toml and the manifest for this machine, with the overrides, once all of it is valid.

    Returns:
        The configuration in node.toml.
    """
    fetched = await _fetch(link, identity)
    check_expiry(fetched.manifest, SystemClock().now_s())
    held = await asyncio.to_thread(load_held, path.parent, link.run_id)
    if held is not None:  # node.toml was deleted: an older manifest is refused all the same
        try:
            check_succession(held, fetched.signed)
        except Unauthenticated as error:
            raise ConfigError(f"{path.parent / HELD}: {error}; join in another directory to begin anew") from None
    data = node_config_from_manifest(fetched.manifest, link, fetched.bootstrap_peers, path.parent)
    data |= {"roles": [str(role) for role in roles]} if roles else {}
    data["niceness"] = GUEST_NICENESS
    data["worker"] = "inline" if fetched.manifest.model.source in SHIPPED else "process"
    own = await asyncio.to_thread(own_address, link.addresses[0].rpartition(":")[0])
    reach = listen_towards(data, own)
    apply_overrides(NodeConfig, data, overrides)
    origin = "manifest with --set" if overrides else "manifest"
    config = parse_config(NodeConfig, data, origin)
    await asyncio.to_thread(require_first_problems, config.environments)
    await asyncio.to_thread(_require_recipe, config, origin)
    await asyncio.to_thread(within_budget, config)
    if config.model.source != fetched.manifest.model.source:
        say(f"note: model.source is {config.model.source!a} here and {fetched.manifest.model.source!a} in the run: "
            "what this node makes is another model's, and counts for less the less likely it is there")  # fmt: skip
    if found := differences(config, fetched.manifest):
        say(f"warning: {in_words(found)}: {OTHERWISE}; leave it out of --set unless all others do the same")
    say(reach if config.exchange.reach == "auto" else f"others reach this node as set: {_set_reach(config)}")
    say(_describe_entry(with_held(config, fetched.signed), identity.node_id))
    await asyncio.to_thread(save_held, path.parent, fetched.signed)
    await asyncio.to_thread(write_node_toml, config, path)
    say(f"joined run {link.run_id}; configuration in {path}")
    return config


def _set_reach(config: NodeConfig) -> str:
    """Description of a configured exchange.reach."""
    if config.exchange.reach == "outward":
        return "through relays"
    return f"they dial {config.exchange.advertise or config.exchange.listen}"


def _describe_entry(config: NodeConfig, node_id: NodeId) -> str:
    """Sentence on the run's rule of entry, and on the credential that this node still needs."""
    has_invitation = read_invitation(config.dir) is not None
    if node_id in config.entry.members:
        return "this node is a member of the run"
    if config.entry.kind == "open" and (config.is_private or has_invitation):
        return f"this run admits every node{'; this one shows its invitation' if has_invitation else ''}"
    if config.entry.kind == "open":
        return (
            "this run admits every node; groups of others fill an eighth of each step; to count in full ask for an "
            f"invitation (swarm-node invite {node_id}), or set entry.established"
        )
    if config.entry.kind == "members":
        return f"this run admits listed nodes only; ask its operator to list {node_id}"
    if has_invitation:
        return "this node shows its invitation"
    if config.entry.kind == "work":
        tries = f"{2**config.entry.work_bits:,} tries (131,072 take about 4 minutes of one core)"
        return f"this run asks for a proof of work of about {tries}, kept and made anew every 30 to 60 days"
    return f"this run admits invited nodes only; ask a member for: swarm-node invite {node_id}"


async def _fetch(link: JoinLink, identity: Identity) -> FetchedManifest:
    """The run's manifest. Raises ConfigError if another key or run answers, Unavailable if no address answers."""
    try:
        return await fetch_manifest(link, identity, FETCH_TIMEOUT_S)
    except Unauthenticated as error:
        raise ConfigError(
            f"link: {error}; its run and its fingerprint must be as the coordinator printed them"
        ) from None
    except Unavailable as error:
        asked = "" if str(error).endswith("?") else "; is the coordinator running, and its port open?"
        raise Unavailable(f"{error}{asked}") from None


def _require_recipe(config: NodeConfig, origin: str) -> None:
    """Refuses a run whose recipe is not installed here, or that cannot supply the inputs of the recipe.

    Raises:
        ConfigError: the message names the key.
    """
    try:
        from swarm.objectives.methods import recipes_of

        recipes_of(config)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}; the run may need a newer swarm-trainer") from None
    except ImportError as error:
        raise ConfigError(f"a node learns and needs {error.name}: pip install 'swarm-trainer[learn]'") from None


def listen_towards(data: JsonDict, own: str) -> str:
    """Makes a joining node listen on the network of the other nodes; returns a sentence on who can dial it.

    Args:
        data: plain data of node.toml; changed in place.
        own: this machine's address as the coordinator sees it.
    """
    if is_loopback(own):
        return "the coordinator is on this machine: only nodes on it can dial this one"
    kind, host = ("ip6", "[::]") if own.startswith("[") else ("ip4", "0.0.0.0")
    data["exchange"] |= {"listen": f"{host}:0", "advertise": f"{own}:0"}
    data["directory"] |= {"listen": f"/{kind}/{host.strip('[]')}/tcp/0"}  # no address: a laptop has another tomorrow
    return (
        f"whether others can dial {own} is tried at the start; where they cannot, relays lead to this node "
        "(docs/networks.md)"
    )
