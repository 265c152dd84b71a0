"""Join link: the line of text by which a node finds a run, and the signed manifest that the link leads to.

Invariant: a manifest from the network is used only with the signature of the key that the link names.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from swarm.config import NodeConfig, parse_config
from swarm.errors import ConfigError, Unauthenticated, Unavailable
from swarm.identity import Identity, is_hex_digest
from swarm.types import RUN_ID_PATTERN, JsonDict, NodeId
from swarm.wire.adverts import is_endpoint
from swarm.wire.run_manifest import RunManifest, SignedManifest, check_manifest, open_manifest

MAX_BOOTSTRAP_PEERS: Final = 16
MAX_ADDRESSES: Final = 8
_AROUND: Final = " \t\r\n'\"`<>\u2018\u2019\u201c\u201d"  # added around a link by mail, chat and shells
_MULTIADDRESS: Final = re.compile(r"/[!-~]{1,255}")


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinLink:
    """`swarm://host:port[,host:port]/RUN#FINGERPRINT`: addresses of a run, and the key that must sign its manifest.

    Example:
        JoinLink.parse("swarm://10.0.0.1:4400/demo#3fa1...")
    """

    addresses: tuple[str, ...]  # host:port
    run_id: str
    fingerprint: NodeId

    @classmethod
    def parse(cls, text: str) -> "JoinLink":
        """Parses a link, ignoring quotes and white space around it. Raises ConfigError naming the wrong part."""
        form = "expected swarm://host:port[,host:port]/RUN#FINGERPRINT"
        rest = text.strip(_AROUND)
        if not rest:
            raise ConfigError(
                "join link: it is empty: does the coordinator run? `swarm-coordinator link DIR` prints the link of one "
                "that does"
            )
        if not rest.startswith("swarm://"):
            raise ConfigError(f"join link: {rest[:200]!a} does not begin with swarm://; {form}")
        location, _, fingerprint = rest.removeprefix("swarm://").partition("#")
        hosts, _, run_id = location.partition("/")
        addresses = tuple(address.strip() for address in hosts.split(","))
        if len(addresses) > MAX_ADDRESSES:
            raise ConfigError(f"join link: {len(addresses)} addresses exceed {MAX_ADDRESSES}")
        for address in addresses:
            if not is_endpoint(address):
                raise ConfigError(f"join link: {address[:120]!a} is not host:port, port 1 to 65535; {form}")
        if not re.fullmatch(RUN_ID_PATTERN, run_id):
            raise ConfigError(f"join link: run {run_id[:80]!a} is not 1 to 40 of A-Z a-z 0-9 . _ -; {form}")
        if not fingerprint:
            raise ConfigError(
                f"join link: no fingerprint follows a #; {form}; quote the link: a shell may end it at the #"
            )
        if not is_hex_digest(fingerprint.lower()):
            found = f"fingerprint {fingerprint[:80]!a} of {len(fingerprint)} characters"
            raise ConfigError(f"join link: {found} is not 64 hex characters; copy the whole link again; {form}")
        return cls(addresses=addresses, run_id=run_id, fingerprint=fingerprint.lower())

    def __str__(self) -> str:
        return f"swarm://{','.join(self.addresses)}/{self.run_id}#{self.fingerprint}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedManifest:
    """A verified manifest, and bootstrap addresses of the directory."""

    signed: SignedManifest
    bootstrap_peers: tuple[str, ...]  # multiaddresses
    address: str  # the address of the link that answered

    @property
    def manifest(self) -> RunManifest:
        """The manifest without its signature."""
        return self.signed.manifest


async def fetch_manifest(link: JoinLink, identity: Identity, timeout_s: float) -> FetchedManifest:
    """The run's manifest, from the first address of the link that answers; `timeout_s` bounds handshake and call each.

    Raises:
        ConfigError: the manifest is signed but breaks a bound, or is of another run.
        Unauthenticated: no address gave the manifest; at one of them another node answered, or a proof was wrong.
        Unavailable: no address answered.
    """
    failures: list[Unavailable] = []
    for address in link.addresses:
        try:
            return await _fetch_from(address, link, identity, timeout_s)
        except Unavailable as error:
            failures.append(error)
    wrong = [error for error in failures if isinstance(error, Unauthenticated)]
    kind = Unauthenticated if wrong else Unavailable
    raise kind("; ".join(map(str, failures)))


async def _fetch_from(address: str, link: JoinLink, identity: Identity, timeout_s: float) -> FetchedManifest:
    # imported here, so that reading a manifest from disk loads no gRPC
    import grpc

    from swarm.wire.grpc_errors import error_of
    from swarm.wire.session import open_channel
    from swarm.wire.v1 import coordinator_service_pb2 as pb
    from swarm.wire.v1 import coordinator_service_pb2_grpc as pb_grpc

    # Without a credential, since the manifest tells which one the run asks for.
    channel = await open_channel(address, link.fingerprint, identity, link.run_id, timeout_s, credential=None)
    try:
        stub: Any = pb_grpc.CoordinatorServiceStub(channel.channel)
        answer = await stub.GetManifest(pb.GetManifestRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        failed = error_of(error, f"manifest from {address}")
        raise failed if isinstance(failed, Unavailable) else Unavailable(str(failed)) from None
    finally:
        await channel.close()
    signed = open_manifest(answer.manifest, answer.public_key, answer.signature, link.fingerprint, link.run_id)
    peers = [peer for peer in answer.bootstrap_peers[:MAX_BOOTSTRAP_PEERS] if _MULTIADDRESS.fullmatch(peer)]
    return FetchedManifest(signed=signed, bootstrap_peers=tuple(peers), address=address)


def node_config_from_manifest(
    manifest: RunManifest, link: JoinLink, bootstrap: tuple[str, ...], directory: Path
) -> JsonDict:
    """Plain data of a node.toml for taking part in the run from `directory`. Raises ConfigError beyond a bound.

    `entry.established` is left out: a value in the file would be the node's own, and override the newest manifest.
    """
    check_manifest(manifest)
    data: JsonDict = {
        "dir": str(directory),
        "run_id": manifest.run_id,
        **{
            section: getattr(manifest, section).model_dump(mode="json")
            for section in ("model", "generator", "replay", "learner", "evaluation", "entry")
        },
        "environments": [env.model_dump(mode="json") for env in manifest.environments],
        **({"follow": {"policy": manifest.trainer}} if manifest.trainer else {}),
        "exchange": {
            "max_group_bytes": manifest.limits.max_group_bytes,
            **({"anchors": list(manifest.anchors)} if manifest.anchors else {}),
        },
        "directory": {
            "kind": "dht" if bootstrap else "none",
            "bootstrap": list(bootstrap),
            "shards": manifest.limits.directory_shards,
        },
        "coordinator": {"address": ",".join(link.addresses), "fingerprint": link.fingerprint},
    }
    parse_config(NodeConfig, data, "manifest")
    del data["entry"]["established"]
    return data
