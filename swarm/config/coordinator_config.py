"""Configuration of the coordinator (coordinator.toml).

Invariant: what a joining node starts from is a whole node configuration, validated as one.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from swarm.config.network_config import DirectoryConfig, Endpoint, RelayPort
from swarm.config.node_config import NodeConfig
from swarm.config.runtime_config import TelemetryConfig
from swarm.config.section import Listening, Model, Positive, PositiveFloat
from swarm.types import RUN_ID_PATTERN


class CoordinatorConfig(Model):
    """Everything the coordinator needs. File: coordinator.toml."""

    dir: Path = Path("swarm-coordinator")
    """State: key, SQLite database."""
    run_id: str = Field(default="local", pattern=RUN_ID_PATTERN)
    """Name of the run."""
    listen: Listening = "127.0.0.1:0"
    """host:port of the gRPC service."""
    http_listen: Listening = "127.0.0.1:0"
    """host:port of /metrics, /healthz and the status page."""
    advertise: Endpoint = ""
    """host:port in the join link; empty uses the listening address."""
    lease_s: PositiveFloat = 30.0
    """A node without a heartbeat for this long is gone."""
    relay_reservations: Annotated[int, Field(ge=0, le=4096)] = 128
    """Nodes that cannot be dialled for which the coordinator passes on connections, whose content it cannot read, while
    no node does; 0: none."""
    relay_bytes_per_s: Positive = 8 * 2**20
    """Most bytes a second that it passes on for them, both directions together."""
    relay_port: RelayPort = 0
    """TCP port at which it passes their bytes on from socket to socket: 443, or 1024 to 65535, the same for others as
    here; 0: a free one, another one at each start. Where others do not reach it, bytes go by `listen`, at several times
    the work."""
    manifest_days: Annotated[float, Field(ge=0, le=3650)] = 0.0
    """Days after which a signed manifest is refused; it is signed anew when half of them are over. 0: never."""
    next_key: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Node id of a second key, kept elsewhere (`swarm keys new`), that takes over when this coordinator's is lost or
    stolen (`swarm-coordinator rotate`). It is named once: nodes hold to the first one that they see."""
    directory: DirectoryConfig = DirectoryConfig()
    node: NodeConfig = NodeConfig()
    """What a joining node starts from: environments, model, limits and recommended recipe."""
    telemetry: TelemetryConfig = TelemetryConfig()
