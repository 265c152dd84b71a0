"""Curve writers for TensorBoard and Weights & Biases.

Invariant: the packages are imported only when a sink is made; a missing one is a ConfigError with its fix.
"""

import math
import time
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError


class TensorBoardSink:
    """Writes event files below a directory: `tensorboard --logdir <directory>`.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
            from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise ConfigError(
                "telemetry.tensorboard is true, but tensorboard is missing: pip install 'swarm-trainer[tensorboard]'"
            ) from None
        directory.mkdir(parents=True, exist_ok=True)
        self._event: Any = Event
        self._summary: Any = Summary
        self._writer: Any = EventFileWriter(str(directory))

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Adds one point to each curve; what is not finite is left out."""
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in figures.items() if math.isfinite(value)
        ]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()


class WandbSink:
    """Logs to a Weights & Biases project, one run per node.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, project: str, node: str, directory: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "telemetry.wandb_project is set, but wandb is missing: pip install 'swarm-trainer[wandb]'"
            ) from None
        self._run: Any = wandb.init(project=project, name=node or None, dir=str(directory), reinit="create_new")

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Logs the finite figures of one step; W&B joins calls with equal steps."""
        self._run.log({name: value for name, value in figures.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        """Marks the run as finished and uploads the rest."""
        self._run.finish()
