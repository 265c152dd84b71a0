"""hivemind DHT peer inside our own event loop. Only this module, `dht_calls` and `dht_storage` import hivemind.

Invariant: no forked process, no pickle, no pipe: a `DHTNode` on this loop and one p2pd child, which dies with us.
`discovery_dht` imports this module late, in a thread: hivemind is an extra and brings torch.
"""

import asyncio
import hashlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID, PeerInfo
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import crypto_pb2 as _untyped_crypto_pb2
from hivemind.proto import dht_pb2 as _untyped_dht_pb2
from hivemind.proto import p2pd_pb2 as _untyped_p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from swarm.addresses import endpoint_of, is_loopback
from swarm.clock import Clock
from swarm.config import DirectoryConfig
from swarm.errors import Unavailable
from swarm.identity import Identity
from swarm.peers.dht_calls import BoundedCalls, bound_calls, inside
from swarm.peers.dht_records import RecordChecker
from swarm.peers.dht_storage import AdvertsOnly, AdvertStorage, peers_in, records_in
from swarm.peers.nearest_peers import nearest_peers

logger = logging.getLogger(__name__)

crypto_pb2, dht_pb2 = cast(Any, _untyped_crypto_pb2), cast(Any, _untyped_dht_pb2)
p2pd_pb2 = cast(Any, _untyped_p2pd_pb2)

NUM_REPLICAS = 8
"""Nearest nodes that hold, and are asked for, each shard. On two cores 8 peers announce in 7 ms and look up in 6.5."""

_RPC_TIMEOUT_S = 3.0
_SEARCH_S = 4.0  # a peer that does not answer takes 3 of them
_ASKED_AT_ONCE = 12
_DIAL_TIMEOUT_S = 4.0
_PROBE_TIMEOUT_S = 30.0  # our own daemon answers in 25 ms beside four busy processes; a stuck one is replaced
_PORT_ATTEMPTS, _PORT_PAUSE_S = 40, 0.25
_START_PAUSES_S = (1.0, 5.0)  # before the second and the third try of a daemon that ended
_EXIT_S = 5.0  # from the end of a daemon's output to its exit code
_START_HANG_S = 120.0  # that a daemon lives and names no address, or answers no call: 1.1 s beside four busy processes
_MAX_SPARE_NODES = 20  # replacements kept per routing bucket; hivemind itself keeps all that ever said hello
_MAX_MESSAGE_BYTES = 2**18  # between p2pd and us: a call or an answer; records of a shard, and whom a peer names
_DOMAIN_PEER_KEY = b"swarm.v1.dht-peer-key"


class DhtPeer:
    """A running DHT peer: finds the nodes near a shard's key, reads their records and stores records there."""

    def __init__(self, node: DHTNode, storage: AdvertStorage, addresses: tuple[str, ...]) -> None:
        self._node = node
        self._p2p = inside(node).p2p
        self._storage = storage
        self.addresses = addresses  # multiaddresses with /p2p/<id>, for others to dial

    @classmethod
    async def start(
        cls,
        identity: Identity,
        run_id: str,
        config: DirectoryConfig,
        checker: RecordChecker,
        clock: Clock,
        *,
        is_client: bool = False,
    ) -> "DhtPeer":
        """Starts p2pd and a DHT node that knows no other node yet; its peer id follows from the identity and the run.

        Args:
            is_client: the peer asks and stores, but answers no calls and is not named to other peers.

        Raises:
            Unavailable: the port stays taken, p2pd does not start in three tries, or its node cannot be used.
        """
        use_hivemind_log_handler("nowhere")
        logging.getLogger("hivemind").setLevel(logging.ERROR)  # one line per unreachable peer otherwise
        listen = config.listen
        is_loopback = listen.startswith(("/ip4/127.", "/ip6/::1/"))
        storage = AdvertStorage(run_id, config.shards, clock)
        await _wait_for_port(listen)
        async with _key_file(identity, run_id) as key_path:
            daemon = await _start_daemon(
                listen,
                host_maddrs=[listen],
                announce_maddrs=list(config.announce) or None,
                identity_path=str(key_path),
                check_if_identity_free=False,
                dht_mode="client" if is_client else "server",
                persistent_conn_max_msg_size=_MAX_MESSAGE_BYTES,
                nat_port_map=not is_loopback,
                auto_nat=False,
                use_relay=False,  # else p2pd gives strangers circuits of gigabytes, outside of every bound of ours
            )
        try:
            async with asyncio.timeout(_START_HANG_S):
                node = await DHTNode.create(
                    p2p=daemon,
                    node_id=DHTID.generate(source=identity.public_key),
                    num_replicas=NUM_REPLICAS,
                    wait_timeout=_RPC_TIMEOUT_S,
                    num_workers=_ASKED_AT_ONCE,
                    cache_locally=False,
                    cache_nearest=0,
                    cache_on_store=False,
                    cache_size=1,
                    record_validator=AdvertsOnly(storage.shard_by_key, checker),
                    client_mode=True,  # until all that follows is in place
                )
                nothing = AdvertStorage(run_id, 0, clock)  # is cached for others
                addresses = await _prepare(node, storage, nothing, clock, is_client=is_client)
        except BaseException as error:
            await _end(daemon)
            if not isinstance(error, Exception):
                raise
            raise Unavailable(f"the DHT daemon on {listen} cannot be used: {error!r}") from error  # many kinds
        return cls(node, storage, for_others(addresses))

    @property
    def daemon_pid(self) -> int:
        return int(self._p2p._child.pid)

    @property
    def num_known(self) -> int:
        """Number of nodes in the routing table."""
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    async def connected(self) -> dict[str, str]:
        """One multiaddress of each connected peer, by peer id; "" if hivemind does not know the kind of address.

        Raises:
            Unavailable: p2pd is dead or stuck.
        """
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                found = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
                peers = [PeerInfo.from_protobuf(peer) for peer in found.peers]
        except Exception as error:  # the control socket fails in many ways, TimeoutError among them
            raise Unavailable(f"the DHT daemon does not answer: {error!r}") from error
        return {str(peer.peer_id): _text_of(peer) for peer in peers if peer.addrs}

    async def dial(self, addresses: Sequence[str]) -> int:
        """Connects to multiaddresses, all at once; returns the number of those that answered."""
        results = await asyncio.gather(*(self._dial(address) for address in addresses))
        return sum(results)

    async def answers(self, peers: Iterable[str]) -> bool:
        """True if at least one of these peers, given as base 58 ids, answers now."""
        pings = (
            self._node.protocol.call_ping(PeerID.from_base58(peer), validate=False, strict=False) for peer in peers
        )
        return any(pong is not None for pong in await asyncio.gather(*pings))

    async def ping_unknown(self, most: int) -> None:
        """Clears the list of unresponsive peers, and pings up to `most` connected peers that the routing table lacks.

        Then searches for our own neighbours and drops spare nodes over the bound. Raises Unavailable.
        """
        node, table = self._node, self._node.protocol.routing_table
        node.blacklist.clear()
        peers = [PeerID.from_base58(peer) for peer in await self.connected()]
        missing = [peer for peer in peers if peer not in table][:most]
        await asyncio.gather(*(node.protocol.call_ping(peer, validate=False, strict=False) for peer in missing))
        if self.num_known:
            await self._search(node.node_id)
        for bucket in table.buckets:
            for uid in list(bucket.replacement_nodes)[:-_MAX_SPARE_NODES]:
                del table[uid]

    async def nearest(self, shard: int) -> list[PeerID]:
        """Other nodes near a shard's key: the nearest in the routing table, then those found by a search."""
        key = self._storage.keys[shard]
        beside = DHTID(int(key) ^ 1)  # same neighbours, but nobody has a record there to send with each answer
        named = await self._search(beside)
        # A search ends with whom others name: one peer can name many that are not there, or itself under many ids.
        table = self._node.protocol.routing_table
        answered = table.get_nearest_neighbors(beside, NUM_REPLICAS, exclude=self._node.node_id)
        return list(dict.fromkeys([*(peer for _, peer in answered), *named]))

    async def _search(self, key: DHTID) -> list[PeerID]:
        """At most NUM_REPLICAS answering nodes, nearest to a key first, found through the nodes that others name.

        Bounded in time: hivemind's own search goes on for as long as nodes name further ones.
        """
        node: Any = self._node
        width: int = node.protocol.bucket_size

        async def ask(peer: PeerID) -> list[tuple[int, PeerID]] | None:
            if peer in node.blacklist:
                return None
            try:
                response = await self._find(peer, key)
                node_id, named = DHTID.from_bytes(response.peer.node_id), peers_in(response, width)
            except Exception:  # as below
                node.blacklist.register_failure(peer)
                await node.protocol.update_routing_table(None, peer, responded=False)
                return None
            node.blacklist.register_success(peer)
            await node.protocol.update_routing_table(node_id, peer)
            return with_distances(each for each in named if each[1] not in node.blacklist)

        def with_distances(named: Iterable[tuple[int, PeerID]]) -> list[tuple[int, PeerID]]:
            return [(node_id ^ int(key), each) for node_id, each in named if each != node.peer_id]

        known = with_distances(node.protocol.routing_table.get_nearest_neighbors(key, width, exclude=node.node_id))
        found = await nearest_peers(known, ask, width=width, at_once=_ASKED_AT_ONCE, timeout_s=_SEARCH_S)
        return found[:NUM_REPLICAS]

    async def ask(self, peer: PeerID, shard: int) -> list[tuple[bytes, bytes, float]]:
        """The unchecked records of a peer under a shard's key: (sub-key, value, expiry); [] without a usable answer."""
        try:
            return records_in(await self._find(peer, self._storage.keys[shard]))
        except Exception:  # an answer may be hostile: whatever it breaks ends here
            logger.debug("a DHT peer gave no usable answer", extra={"peer": str(peer)}, exc_info=True)
            return []

    async def _find(self, peer: PeerID, key: DHTID) -> Any:
        """A peer's answer about a key, unparsed; hivemind's own call would parse all of it. May raise any exception."""
        protocol = self._node.protocol
        request = dht_pb2.FindRequest(keys=[key.to_bytes()], peer=protocol.node_info)
        async with asyncio.timeout(_RPC_TIMEOUT_S + 1):
            return await protocol.get_stub(peer).rpc_find(request, timeout=_RPC_TIMEOUT_S)

    async def store(self, peers: Iterable[PeerID], shard: int, public_key: bytes, data: bytes, until_s: float) -> int:
        """Keeps a record here and asks peers to keep it; returns the number of peers that agreed."""
        key = self._storage.keys[shard]
        self._storage.store_subkey(key, public_key, data, until_s)
        calls = [self._node.protocol.call_store(peer, [key], [data], [until_s], [public_key]) for peer in peers]
        answers = await asyncio.gather(*calls)
        return sum(bool(answer and answer[0]) for answer in answers)

    def held(self, shard: int) -> list[tuple[bytes, bytes, float]]:
        """The records that this node itself keeps for a shard: (sub-key, value, expiry)."""
        return self._storage.records(self._storage.keys[shard])

    async def stop(self) -> None:
        """Ends p2pd, by force if it does not exit within a second, and removes its sockets."""
        p2p = self._p2p
        logging.getLogger("hivemind").setLevel(logging.CRITICAL)  # p2pd says as an error that its socket was closed
        self._node.is_alive = False
        with suppress(Exception):
            async with asyncio.timeout(1.0):
                await self._node.protocol.shutdown()
        await _end(p2p)
        control = p2p._client.control
        tasks = [control._read_task, control._write_task, p2p._reader_task, p2p._listen_task]
        # Cancelled above, or failed when the daemon died: collected, so that nothing complains later.
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        for address in (p2p._daemon_listen_maddr, p2p._client_listen_maddr):
            _remove(Path(address["unix"]))

    async def _ask(self, request: Any) -> Any:
        """Answer of p2pd to one request. hivemind's own calls leave their connection open when they are cancelled."""
        reader, writer = await self._p2p._client.control.daemon_connector.open_connection()
        response = p2pd_pb2.Response()
        try:
            await write_pbmsg(writer, request)
            await read_pbmsg_safe(reader, response)
        finally:
            writer.close()
        raise_if_failed(response)
        return response

    async def _dial(self, address: str) -> bool:
        base, _, peer = address.rpartition("/p2p/")
        try:
            peer_id = PeerID.from_base58(peer)
            async with asyncio.timeout(_DIAL_TIMEOUT_S):
                asked = p2pd_pb2.ConnectRequest(peer=peer_id.to_bytes(), addrs=[Multiaddr(base).to_bytes()])
                await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=asked))
            pong = await self._node.protocol.call_ping(peer_id, validate=False, strict=False)
        except Exception as error:  # refused, timed out, or not an address
            logger.debug("a DHT address did not answer", extra={"address": address, "error": repr(error)})
            return False
        return pong is not None


async def _start_daemon(listen: str, **options: Any) -> P2P:
    """Starts p2pd and waits until it answers. Each of three tries ends with its process, or after _START_HANG_S.

    Raises:
        Unavailable: three daemons ended or hung; the message describes each.
    """
    seen: list[str] = []
    for pause_s in (0.0, *_START_PAUSES_S):
        await asyncio.sleep(pause_s)
        began_s, made = time.monotonic(), list[Any]()

        class Daemon(P2P):
            def __init__(self, made: list[Any] = made) -> None:
                super().__init__()
                made.append(self)  # `create` forgets what it began where it fails

        try:
            async with asyncio.timeout(_START_HANG_S):
                return await Daemon.create(startup_timeout=cast(Any, None), **options)
        except Exception as error:  # hivemind raises many kinds here, P2PDaemonError and OSError among them
            if made and made[0]._child is not None and not isinstance(error, TimeoutError):
                with suppress(TimeoutError):  # its output ended, which comes before its exit code
                    await asyncio.wait_for(made[0]._child.wait(), _EXIT_S)
            state = await _end(made[0]) if made else "no process"
            seen.append(f"{state} after {time.monotonic() - began_s:.1f} s: {str(error) or 'it hung'}")
            logger.warning("the DHT daemon did not start", extra={"seen": seen[-1]})
        except BaseException:
            for daemon in made:
                await _end(daemon)
            raise
    raise Unavailable(f"the DHT daemon did not start on {listen}, tried {len(seen)} times: {'; '.join(seen)}")


async def _end(daemon: Any) -> str:
    """Ends p2pd, by force if it does not exit within a second; returns a description of its end."""
    child: asyncio.subprocess.Process | None = daemon._child
    was_running = child is not None and child.returncode is None
    daemon._terminate()
    if child is None:
        return "no process"
    try:
        async with asyncio.timeout(1.0):
            await child.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    return f"process {child.pid} {'was stopped' if was_running else f'ended with code {child.returncode}'}"


async def _prepare(
    node: DHTNode, storage: AdvertStorage, cache: AdvertStorage, clock: Clock, *, is_client: bool
) -> list[str]:
    """Installs our bounds and storage in a node, which answers calls from then on unless it is a client.

    Returns:
        The node's multiaddresses.
    """
    bound_calls(node)
    protocol: Any = node.protocol
    protocol.storage, protocol.cache = storage, cache
    if not is_client:
        protocol.client_mode, protocol.node_info = False, dht_pb2.NodeInfo(node_id=node.node_id.to_bytes())
        await protocol.add_p2p_handlers(inside(node).p2p, BoundedCalls(node, clock))
    return [str(address) for address in await inside(node).p2p.get_visible_maddrs()]


def _text_of(peer: PeerInfo) -> str:
    """The multiaddress of a connected peer; "" if hivemind does not know its kind.

    If we dialled the peer, the peer chose the transport, by the addresses that it announced.
    """
    try:
        return f"{peer.addrs[0]}/p2p/{peer.peer_id}"
    except ValueError:
        return ""


def for_others(addresses: Sequence[str]) -> tuple[str, ...]:
    """The multiaddresses without loopback, which leads others to themselves; all of them if there are no others."""
    return tuple(a for a in addresses if not is_loopback(endpoint_of(a).rpartition(":")[0])) or tuple(addresses)


@asynccontextmanager
async def _key_file(identity: Identity, run_id: str) -> AsyncGenerator[Path, None]:
    """Path of a private file with p2pd's Ed25519 key; the file is removed when the context ends.

    The key is derived from a signature that is never shown to anyone, so the peer id outlives restarts without a file,
    and the identity's own key never leaves this process.
    """
    seed = hashlib.sha256(identity.sign(_DOMAIN_PEER_KEY, run_id.encode())).digest()
    public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    key = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.Ed25519, data=seed + public)
    descriptor, name = tempfile.mkstemp(prefix="swarm-dht-")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key.SerializeToString())
        yield Path(name)
    finally:
        _remove(Path(name))


async def _wait_for_port(listen: str) -> None:
    """Waits up to 10 s for the port: p2pd itself would share it with a daemon that still runs there.

    Raises:
        Unavailable: the port could not be bound in that time.
    """
    _, kind, host, _, port, *_ = listen.split("/")
    if kind not in ("ip4", "ip6") or port == "0":
        return
    for attempt in range(_PORT_ATTEMPTS):
        with socket.socket(socket.AF_INET if kind == "ip4" else socket.AF_INET6) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, int(port)))
                return
            except OSError as error:
                if attempt == _PORT_ATTEMPTS - 1:
                    raise Unavailable(
                        f"directory.listen: the DHT daemon cannot listen on {listen}: {error.strerror}"
                    ) from error
        await asyncio.sleep(_PORT_PAUSE_S)  # a killed node's daemon goes within two seconds


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
