"""Effect of optimizer steps on single tokens, for people to read: some rollouts of recent steps, on the disk.

Invariant: figures are those of the step itself, and a step shows the groups that weighed most in it; at most
`MAX_TOKENS` tokens of a step, one step in `EVERY_S`, the newest `MAX_KEPT` steps.
"""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from swarm.read_files import read_json

logger = logging.getLogger(__name__)

SAID, LEFT_OUT, TRAINED = 0, 1, 2  # by the environment; by a model, and not trained on; by a model, and trained on
MAX_TOKENS: Final = 2048
MAX_KEPT: Final = 64
MAX_BYTES: Final = 4 * 2**20  # of one step: 2,048 tokens take 100 KB
EVERY_S: Final = 10.0
_FOLDER: Final = "updates"
_NAME = re.compile(r"\d{1,12}\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRollout:
    """One rollout in a step; the sequences have one entry for each token, observations included."""

    digest: str  # of its group, hexadecimal
    place: int  # in the group
    reward: float
    age_steps: int
    token_ids: Sequence[int]
    kinds: Sequence[int]  # `SAID`, `LEFT_OUT` or `TRAINED`
    generator: Sequence[float | None]  # log-prob when the token was sampled, nats; None: not known, or not sampled
    learner: Sequence[float]  # log-prob under the policy at its update, nats
    advantages: Sequence[float]
    weights: Sequence[float]  # -c_t: how hard the step pushed log pi_t up, in units of the loss
    bounded: Sequence[bool]  # clipped or capped by the recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownUpdate:
    """Some rollouts of one optimizer step, with its recipe."""

    step: int  # of the version that it made
    recipe: str
    rollouts: Sequence[ShownRollout]


def write_update(directory: Path, update: ShownUpdate) -> None:
    """Stores an update and deletes those of the lowest steps beyond `MAX_KEPT`; an OSError is only logged."""
    folder = directory / _FOLDER
    try:
        folder.mkdir(exist_ok=True)
        draft = folder / "draft"
        draft.write_text(json.dumps(_rounded(asdict(update)), separators=(",", ":")), encoding="utf-8")
        draft.replace(folder / f"{update.step}.json")
        for step in kept_updates(directory)[MAX_KEPT:]:
            (folder / f"{step}.json").unlink()
    except OSError as error:
        logger.warning(
            "what a step made of its tokens was not written", extra={"dir": str(folder), "error": str(error)}
        )


def kept_updates(directory: Path) -> list[int]:
    """Steps with a stored update, the newest first."""
    try:
        names = [path.name for path in (directory / _FOLDER).iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return []
    return sorted((int(name.removesuffix(".json")) for name in names), reverse=True)


def read_update(directory: Path, step: int) -> ShownUpdate | None:
    """The stored update of a step; None if there is none or it cannot be read."""
    try:
        data = read_json(directory / _FOLDER / f"{step}.json", MAX_BYTES)
        rollouts = tuple(ShownRollout(**each) for each in data["rollouts"])
        update = ShownUpdate(step=int(data["step"]), recipe=str(data["recipe"]), rollouts=rollouts)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return update if all(_is_even(each) for each in rollouts) else None


def _is_even(shown: ShownRollout) -> bool:
    columns = (shown.kinds, shown.generator, shown.learner, shown.advantages, shown.weights, shown.bounded)
    return all(len(column) == len(shown.token_ids) for column in columns)


def _rounded(value: Any) -> Any:
    """A copy of a JSON value with each float rounded to four significant digits; tuples become lists."""
    match value:
        case float():
            return float(f"{value:.4g}")
        case dict():
            return {key: _rounded(each) for key, each in value.items()}
        case list() | tuple():
            return [_rounded(each) for each in value]
        case _:
            return value
