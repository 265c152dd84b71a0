"""Parameters of an environment, read from its configuration section with bounds.

Invariant: nothing that was written is ignored: an unknown name, another type or a value out of bounds is a ConfigError
that names the key, since a run manifest of a stranger may have written it.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

from swarm.config import EnvironmentConfig
from swarm.errors import ConfigError

MAX_TURNS: Final = 64  # that any environment here may be given


class Params:
    """The `params` of a section, taken one by one; `finish` refuses what is left."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._left: dict[str, Any] = dict(config.params)
        self._known: list[str] = []

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        """A whole number in [least, most]. Raises ConfigError."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._refusal(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number in [least, most]. Raises ConfigError."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self._refusal(name, f"a number from {least:g} to {most:g}")
        return float(value)

    def choice(self, name: str, default: str, known: Sequence[str]) -> str:
        """One of the known words. Raises ConfigError."""
        value = self._take(name, default)
        if not isinstance(value, str) or value not in known:
            raise self._refusal(name, f"one of {', '.join(known)}")
        return value

    def text(self, name: str, default: str, letters: str) -> str:
        """Different letters, at least one of the known ones. Raises ConfigError."""
        value = self._take(name, default)
        if not isinstance(value, str) or not value or len(set(value)) < len(value) or set(value) - set(letters):
            raise self._refusal(name, f"some of the characters {letters!r}")
        return value

    def turns(self, default: int) -> int:
        """`max_turns`: most actions of an episode. Raises ConfigError."""
        return self.integer("max_turns", default, 1, MAX_TURNS)

    def finish(self) -> None:
        """Raises ConfigError where the section has a parameter that was not asked for, or a dataset."""
        where = f"environment {self._config.name}"
        if self._left:
            raise ConfigError(f"{where}: unknown param {min(self._left)!r}; known: {sorted(self._known)}")
        if self._config.dataset:
            raise ConfigError(f"{where}: kind {self._config.kind} takes no dataset, got {self._config.dataset!r}")

    def _take(self, name: str, default: object) -> object:
        self._known.append(name)
        return self._left.pop(name, default)

    def _refusal(self, name: str, wanted: str) -> ConfigError:
        value = str(self._config.params[name])[:80]
        return ConfigError(f"environment {self._config.name}: params.{name} must be {wanted}, got {value!a}")


def verifier_name(config: EnvironmentConfig, version: int) -> str:
    """Name of a verifier that is equal where all is that decides tasks: what the question does not show counts."""
    return f"{config.kind}-{drawn_from(config, [config.dataset, config.params])}/{version}"


def drawn_from(config: EnvironmentConfig, named: object) -> str:
    """Digest of what a section draws its tasks from: the seed, how many, how they are asked, and what is named here."""
    asked = [named, config.seed, config.num_tasks, config.prompt, config.prefill]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:8]
