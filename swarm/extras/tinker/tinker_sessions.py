"""Sessions of a Tinker server: its clients, and the models that each of them trains, with the order of requests.

Invariant: both tables are bounded; a session whose client falls silent ends with all that it held.
"""

import logging
import secrets
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from swarm.clock import Clock
from swarm.extras.tinker.adapter_training import AdapterTraining
from swarm.extras.tinker.tinker_futures import RequestOrder
from swarm.serving.openai_requests import RequestRefused

logger = logging.getLogger(__name__)

MAX_SESSIONS: Final = 64
MAX_MODELS: Final = 8  # in training at once, of all sessions
IDLE_S: Final = 300.0  # a session without a heartbeat ends; the SDK sends one every 10 s
AWAY_S: Final = 60.0  # and after so long where another one needs its room


@dataclass(eq=False, slots=True)
class ModelInTraining:
    """A model that a client trains."""

    model_id: str
    session_id: str
    state: AdapterTraining
    notes: Mapping[str, str]  # of its client
    turns: RequestOrder = field(default_factory=RequestOrder)


@dataclass(eq=False, slots=True)
class _Session:
    seen_at_s: float
    models: dict[str, ModelInTraining] = field(default_factory=dict[str, ModelInTraining])


class TinkerSessions:
    """All open sessions.

    Args:
        clock: clock by which a session is silent.
        on_end: called with the id of each session that ended.
    """

    def __init__(self, clock: Clock, on_end: Callable[[str], None]) -> None:
        self._clock, self._on_end = clock, on_end
        self._sessions: dict[str, _Session] = {}
        self._num_creating = 0

    def begin(self) -> str:
        """Opens a session and returns its id. Raises RequestRefused if MAX_SESSIONS are open."""
        self.end_silent()
        if len(self._sessions) >= MAX_SESSIONS:
            raise RequestRefused(f"{len(self._sessions)} sessions are open, of at most {MAX_SESSIONS}", status=429)
        session_id = f"session-{secrets.token_hex(8)}"
        self._sessions[session_id] = _Session(self._clock.monotonic_s())
        return session_id

    def note_seen(self, session_id: str, status: int = 404) -> None:
        """Notes a sign of life of a session. Raises RequestRefused with this status if the session is unknown."""
        self._seen(session_id, status)

    def end(self, session_id: str) -> None:
        """Ends an open session, with all that it held."""
        logger.info("session ended", extra={"session": session_id})
        del self._sessions[session_id]
        self._on_end(session_id)

    def end_silent(self) -> None:
        """Ends all sessions that were silent for more than IDLE_S."""
        least_s = self._clock.monotonic_s() - IDLE_S
        for session_id in [each for each, session in self._sessions.items() if session.seen_at_s < least_s]:
            self.end(session_id)

    def model(self, model_id: str) -> ModelInTraining:
        """Returns a model and notes a sign of life of its session. Raises RequestRefused if either is unknown."""
        session = self._seen(model_id.partition(":")[0])
        if model_id not in session.models:
            raise RequestRefused(f"model_id: {model_id[:80]!r} is unknown", status=404)
        return session.models[model_id]

    def add(self, training: ModelInTraining) -> None:
        """Adds a model to its session. Raises RequestRefused if the session has ended."""
        self._seen(training.session_id).models[training.model_id] = training

    @contextmanager
    def room_for_model(self) -> Generator[None]:
        """Keeps room for a model until the `with` ends.

        If there are MAX_MODELS, the session with a model that is silent for longest ends, if it is silent for AWAY_S.

        Raises:
            RequestRefused: there are MAX_MODELS, and no session with a model is silent for that long.
        """
        self.end_silent()
        held = sum(len(each.models) for each in self._sessions.values()) + self._num_creating
        if held >= MAX_MODELS:
            away_s = self._clock.monotonic_s() - AWAY_S
            silent = [each for each, own in self._sessions.items() if own.models and own.seen_at_s < away_s]
            if not silent:
                raise RequestRefused(
                    f"{held} models are in training, of at most {MAX_MODELS}; end a client that is done"
                )
            self.end(min(silent, key=lambda each: self._sessions[each].seen_at_s))
        self._num_creating += 1
        try:
            yield
        finally:
            self._num_creating -= 1

    def _seen(self, session_id: str, status: int = 404) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise RequestRefused(
                f"session_id: {session_id[:80]!r} is unknown, or it ended after {IDLE_S:g} s of silence", status=status
            )
        session.seen_at_s = self._clock.monotonic_s()
        return session
