"""One run of an agent against a served policy that learns: a key of its own for the calls, and its reward.

Invariant: a run whose block ends without a reward is not learned from; its reward may still come, for a day.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from swarm.addresses import is_loopback
from swarm.errors import ConfigError, Unavailable
from swarm.types import JsonDict

_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentRun:
    """A run that was begun: `base_url` and `key` are all that its agent needs."""

    id: str
    base_url: str
    key: str  # of its calls
    reward_key: str  # of its reward, not for the agent

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that OpenAI's clients read."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.key}

    def reward(self, reward: float | Mapping[str, float]) -> JsonDict:
        """Ends the run, with a reward in [0, 1] or several by name; returns its state. Raises as `agent_run`."""
        body = {"reward": reward} if isinstance(reward, int | float) else {"rewards": dict(reward)}
        return _ask(f"{self.base_url}/episodes/{self.id}/reward", self.reward_key, body)

    def state(self) -> JsonDict:
        """State of the run, and with `not_learned` the `reason`. Raises as `agent_run`."""
        return _ask(f"{self.base_url}/episodes/{self.id}", self.key, None)


@contextmanager
def agent_run(base_url: str, key: str, task: str = "", *, held_out: bool = False) -> Generator[AgentRun]:
    """Begins a run of an agent; the block calls the agent, and `run.reward`.

    Args:
        base_url: address of the served policy, ending in /v1.
        key: a key that is learned from, `<dir>/api-NAME.key` of the node.
        task: name of the task; runs of one task are compared with one another.
        held_out: the run is measured and never learned from; its task is measured again later, by another run.

    Raises:
        ConfigError: the node refuses the request; the message is its own.
        Unavailable: the node cannot be reached, or has no room now.

    Example:
        with swarm.agent_run("http://127.0.0.1:8300/v1", key, task="question 7") as run:
            answer = my_agent(OpenAI(base_url=run.base_url, api_key=run.key))
            run.reward(1.0 if answer == "42" else 0.0)
    """
    base_url = base_url.rstrip("/")
    body: JsonDict = ({"task": task} if task else {}) | ({"held_out": True} if held_out else {})
    opened = _ask(f"{base_url}/episodes", key, body)
    yield AgentRun(id=opened["id"], base_url=base_url, key=opened["key"], reward_key=opened["reward_key"])


def _ask(url: str, key: str, body: JsonDict | None) -> JsonDict:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"base_url: {url!r} is no address; expected http://HOST:PORT/v1")
    data = None if body is None else json.dumps(body, allow_nan=False).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    # keys for a server of this machine go to no proxy
    is_here = is_loopback(urlsplit(url).hostname or "")
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))
    try:
        with opener.open(urllib.request.Request(url, data, headers), timeout=_TIMEOUT_S) as reply:
            return json.loads(reply.read())
    except urllib.error.HTTPError as error:
        message = _message(error)
        if error.code in (429, 503):
            raise Unavailable(f"{url}: {message}") from None
        raise ConfigError(f"{url}: {message}") from None
    except OSError as error:
        raise Unavailable(f"{url}: {error}") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        told: Any = json.loads(error.read(65_536))
        return str(told["error"]["message"])
    except (OSError, ValueError, TypeError, KeyError):
        return f"status {error.code}"
