"""Episodes of a node's first and newest evaluation, kept in its directory for people to read.

Invariant: each evaluation shows the same problems, the first ones of each environment, whatever their results.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from swarm.episode import Actions, EpisodeOutcome, Message, outcome_from_json, outcome_to_json
from swarm.read_files import read_json

logger = logging.getLogger(__name__)

NUM_SHOWN: Final = 3  # problems of an environment
MAX_BYTES: Final = 64 * 2**20  # of the episodes of one evaluation
_FOLDER, _FIRST, _NEWEST = "episodes", "first.json", "newest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownEpisode:
    """The first try at a held-out problem, and the number of successful tries among all."""

    step: int  # of the version that played it
    env: str
    task_id: int
    opening: tuple[Message, ...]
    actions: Actions
    outcome: EpisodeOutcome
    reference: str
    num_tries: int = 1
    num_right: int = 0


def write_episodes(directory: Path, episodes: Sequence[ShownEpisode]) -> None:
    """Stores the episodes of an evaluation as the newest, and if there were none before, also as the first.

    An OSError is only logged: nothing depends on the files.
    """
    if not episodes:
        return
    folder = directory / _FOLDER
    try:
        folder.mkdir(exist_ok=True)
        for name in (_NEWEST,) if (folder / _FIRST).exists() else (_FIRST, _NEWEST):
            fresh = folder / f".{name}.new"
            fresh.write_text(json.dumps([_to_json(episode) for episode in episodes], indent=1), encoding="utf-8")
            fresh.replace(folder / name)
    except OSError as error:
        logger.warning("episodes of an evaluation were not written", extra={"folder": str(folder), "error": str(error)})


def episodes_mark(directory: Path) -> object:
    """Mark that changes with each stored evaluation, cheaper than reading it; None if none is stored."""
    try:
        found = (directory / _FOLDER / _NEWEST).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_episodes(directory: Path) -> tuple[ShownEpisode, ...]:
    """Stored episodes of a node's first and newest evaluation, each once; unreadable files are skipped."""
    found: dict[tuple[int, str, int], ShownEpisode] = {}
    for name in (_FIRST, _NEWEST):
        try:
            episodes = [_from_json(each) for each in read_json(directory / _FOLDER / name, MAX_BYTES)]
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            continue
        found |= {(episode.step, episode.env, episode.task_id): episode for episode in episodes}
    return tuple(found.values())


def _to_json(episode: ShownEpisode) -> dict[str, Any]:
    return {
        "step": episode.step,
        "env": episode.env,
        "task_id": episode.task_id,
        "opening": [[message.role, message.content] for message in episode.opening],
        "actions": list(episode.actions),
        "outcome": outcome_to_json(episode.outcome),
        "reference": episode.reference,
        "num_tries": episode.num_tries,
        "num_right": episode.num_right,
    }


def _from_json(data: Any) -> ShownEpisode:
    return ShownEpisode(
        step=int(data["step"]),
        env=str(data["env"]),
        task_id=int(data["task_id"]),
        opening=tuple(Message(role=str(role), content=str(content)) for role, content in data["opening"]),
        actions=tuple(str(action) for action in data["actions"]),
        outcome=outcome_from_json(data["outcome"]),
        reference=str(data["reference"]),
        num_tries=int(data["num_tries"]),
        num_right=int(data["num_right"]),
    )
