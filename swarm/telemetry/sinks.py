"""Curve writers for TensorBoard, Weights & Biases and Trackio; Trackio also takes traces and alerts.

Invariant: the packages are imported only when a sink is made; a missing one is a ConfigError with its fix.
"""

import math
import time
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError
from swarm.telemetry.shown_episodes import ShownEpisode, episodes_mark, read_episodes
from swarm.types import JsonDict


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
            raise _missing("tensorboard is true", "tensorboard") from None
        directory.mkdir(parents=True, exist_ok=True)
        self._event: Any = Event
        self._summary: Any = Summary
        self._writer: Any = EventFileWriter(str(directory))

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Adds one point to each curve, except for figures that are not finite."""
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in figures.items() if math.isfinite(value)
        ]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class WandbSink:
    """Logs to a Weights & Biases project, one run for each start of a node.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, project: str, node: str, directory: Path, settings: JsonDict) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("wandb_project is set", "wandb") from None
        self._run: Any = wandb.init(
            project=project, name=node or None, dir=str(directory), reinit="create_new", config=settings
        )

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Logs the finite figures of one step; W&B joins calls with equal steps."""
        self._run.log({name: value for name, value in figures.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        """Marks the run as finished and uploads the rest."""
        self._run.finish()


class TrackioSink:
    """Logs to a Trackio project on this machine (`trackio show`), one run per node, which a restart continues.

    The stored episodes of each evaluation, as in `swarm report`, become traces.

    Raises:
        ConfigError: trackio is not installed.
    """

    def __init__(self, project: str, node: str, directory: Path, settings: JsonDict) -> None:
        try:
            import trackio
        except ImportError:
            raise _missing("trackio_project is set", "trackio") from None
        self._trackio: Any = trackio
        self._directory = directory
        self._mark = episodes_mark(directory)  # of what was read last
        self._traced_step = max((each.step for each in read_episodes(directory)), default=-1)  # of a run before
        self._run: Any = trackio.init(
            project=project,
            name=node or None,
            config=settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Logs the finite figures of one step, and the episodes of evaluations since the last call."""
        finite: dict[str, Any] = {name: value for name, value in figures.items() if math.isfinite(value)}
        self._run.log(finite, step=step)
        self._write_traces()

    def alert(self, title: str, text: str, *, is_grave: bool) -> None:
        """Shows an alert at the newest step."""
        level = self._trackio.AlertLevel
        self._run.alert(title=title, text=text, level=level.ERROR if is_grave else level.WARN)

    def close(self) -> None:
        """Writes remaining traces and ends the run."""
        self._write_traces()
        self._run.finish()

    def _write_traces(self) -> None:
        mark = episodes_mark(self._directory)
        if mark == self._mark:
            return
        self._mark = mark
        fresh = [each for each in read_episodes(self._directory) if each.step > self._traced_step]
        for number, episode in enumerate(fresh):
            self._traced_step = max(self._traced_step, episode.step)
            name = f"held_out/{episode.env}/{number}"
            self._run.log({name: self._trackio.Trace(_messages(episode), metadata=_about(episode))}, step=episode.step)


def _missing(setting: str, package: str) -> ConfigError:
    return ConfigError(f"telemetry.{setting}, but {package} is missing: pip install 'swarm-trainer[{package}]'")


def _messages(episode: ShownEpisode) -> list[dict[str, str]]:
    """An episode as a chat: the question, and the model's actions with the environment's replies."""
    chat = [{"role": each.role, "content": each.content} for each in episode.opening]
    for action, turn in zip(episode.actions, episode.outcome.transitions, strict=False):
        chat.append({"role": "assistant", "content": action})
        chat += [{"role": each.role, "content": each.content} for each in turn.messages]
    return chat


def _about(episode: ShownEpisode) -> JsonDict:
    return {
        "environment": episode.env,
        "task": episode.task_id,
        "reward": episode.outcome.reward,
        "reference": episode.reference,
        "tries": episode.num_tries,
        "right": episode.num_right,
    }
