"""Parameters of an environment, read from its configuration section with bounds.

Invariant: no parameter is ignored: an unknown name, a wrong type or a value out of bounds raises a ConfigError that
names the key, because the section may come from a stranger's run manifest.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

from swarm.config import EnvironmentConfig
from swarm.errors import ConfigError

MAX_TURNS: Final = 64  # largest `max_turns` of an environment here


class Params:
    """Reader of the `params` of a section: each method reads one parameter, and `finish` refuses unread parameters."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._left: dict[str, Any] = dict(config.params)
        self._known: list[str] = []

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        """The parameter `name`, or `default`: a whole number in [least, most]. Raises ConfigError for other values."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._refusal(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """The parameter `name`, or `default`: a number in [least, most]. Raises ConfigError for other values."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self._refusal(name, f"a number from {least:g} to {most:g}")
        return float(value)

    def choice(self, name: str, default: str, known: Sequence[str]) -> str:
        """The parameter `name`, or `default`: one of the words `known`. Raises ConfigError for other values."""
        value = self._take(name, default)
        if not isinstance(value, str) or value not in known:
            raise self._refusal(name, f"one of {', '.join(known)}")
        return value

    def text(self, name: str, default: str, letters: str) -> str:
        """The parameter `name`, or `default`: one or more distinct characters of `letters`. Raises ConfigError."""
        value = self._take(name, default)
        if not isinstance(value, str) or not value or len(set(value)) < len(value) or set(value) - set(letters):
            raise self._refusal(name, f"some of the characters {letters!r}")
        return value

    def turns(self, default: int) -> int:
        """The parameter `max_turns`, or `default`: a whole number in [1, MAX_TURNS]. Raises ConfigError otherwise."""
        return self.integer("max_turns", default, 1, MAX_TURNS)

    def finish(self) -> None:
        """Raises ConfigError if the section has a parameter that no method has read, or a dataset."""
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
    """Name of a verifier: its kind, a digest of the settings that decide its tasks (`drawn_from`), and its version."""
    return f"{config.kind}-{drawn_from(config, [config.dataset, config.params])}/{version}"


def drawn_from(config: EnvironmentConfig, named: object) -> str:
    """Digest, 8 hex digits, of a section's seed, number of tasks, prompt and prefill, and of the values `named`."""
    asked = [named, config.seed, config.num_tasks, config.prompt, config.prefill]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:8]
