"""What a process takes of its machine and says about itself: scoring, disk, telemetry, injected faults."""

from typing import Annotated, Literal

from pydantic import Field

from swarm.config.section import ListeningOrOff, Model, NotNegative, Positive, PositiveFloat, Usual


class SandboxConfig(Model):
    """Limits of the process that scores answers."""

    timeout_s: Annotated[PositiveFloat, Usual("0.5..60", "pace")] = 5.0
    """Wall-clock seconds for the answers of one group; most CPU seconds that an environment may declare for one."""
    memory_bytes: Annotated[Positive, Usual("128e6..", "pace")] = 1024 * 2**20
    """Largest address space, bytes."""


class DiskConfig(Model):
    """What the node may take and write of this machine's disk."""

    max_bytes: NotNegative = 0
    """Most bytes that `dir` may take. Checkpoints and what else has a fixed size come first; exchange.store_bytes and
    weights.store_bytes are lowered to what is left. `swarm check` shows the parts. 0: those two alone bound it."""
    checkpoint_at_end: bool = True
    """Write one after the last step, and when the node is stopped. Without it a restart makes the steps since the last
    one again from the draw journal, all of them where there is none."""
    kept_checkpoints: Annotated[int, Field(ge=1, le=16)] = 2
    """Newest checkpoints that stay; while one is written the disk has one more. With 1 there is none before a damaged
    one."""


class TelemetryConfig(Model):
    """Metrics, logs and event files."""

    metrics_listen: ListeningOrOff = ""
    """host:port of /metrics; empty: off."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is logged."""
    log_format: Literal["console", "json"] = "console"
    """`console` for people, `json` for machines."""
    tensorboard: bool = False
    """Write event files to <dir>/tensorboard."""
    wandb_project: str = ""
    """Weights & Biases project; empty: off."""
    trackio_project: str = ""
    """Trackio project on this machine, with episodes of evaluations as traces and what `swarm why` finds as alerts;
    empty: off."""


class FaultConfig(Model):
    """Faults that simulations inject: they make this node slower than its machine."""

    slow_factor: Annotated[float, Field(ge=1), Usual("..1", "pace")] = 1.0
    """Generation and steps take this many times as long (an awaited delay, no CPU)."""
    latency_ms: Annotated[float, Field(ge=0), Usual("..0", "exchange")] = 0.0
    """Delay before each group from a peer is looked at."""
