"""Episodes of one call of an engine: the environment's side of every rollout.

Invariant: between two actions, an engine gets exactly the tokens of the environment's answer, in the conversation of
that answer. An episode ends when its environment ends it, or when no whole action would fit any more (`EpisodeLimits`),
which every consumer can decide from the tokens alone. An episode whose environment fails ends, too.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Final

from swarm.episode import Actions, EpisodeOutcome
from swarm.errors import ConfigError, RolloutFailed, Unavailable
from swarm.interfaces import Observation, Observe, Tokenizer
from swarm.model.conversations import Conversations
from swarm.types import EpisodeLimits, Task

logger = logging.getLogger(__name__)

WARN_EVERY_S: Final = 60.0
_warned_at_s: dict[str, float] = {}  # environment -> time of the last warning; shared by all players of the process

Step = Callable[[str, int, Actions], "Future[EpisodeOutcome]"]
"""(environment, task id, all actions of an episode) -> its outcome so far; may be called from any thread."""


class EpisodePlayer:
    """Plays the environments of a batch of tasks; an engine calls `observe` after each action.

    Example:
        player = EpisodePlayer(tokenizer, limits, step, tasks, num_samples=8)
        rollouts = engine.generate(prompts, 8, sampling, observe=player.observe)
    """

    def __init__(
        self, tokenizer: Tokenizer, limits: EpisodeLimits, step: Step, tasks: Sequence[Task], num_samples: int
    ) -> None:
        """`num_samples`: episodes of each task; rollout r of the engine plays `tasks[r // num_samples]`."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._step = step
        self._tasks = [task for task in tasks for _ in range(num_samples)]
        self._actions: list[Actions] = [()] * len(self._tasks)
        self._num_tokens = [0] * len(self._tasks)
        self._conversations = [Conversations(tokenizer, task.env) for task in self._tasks]

    def observe(self, rollout: int, action_ids: Sequence[int], is_ended: bool) -> "Future[Observation | None]":
        """Plays the newest action of a rollout in its environment, as `interfaces.Observe` describes."""
        task = self._tasks[rollout]
        answer: Future[Observation | None] = Future()
        self._num_tokens[rollout] += len(action_ids)
        if task.max_turns == 1:  # an answer ends its episode, whatever it says
            answer.set_result(None)
            return answer
        self._actions[rollout] += (self._tokenizer.decode(action_ids),)
        stepped = self._step(task.env, task.task_id, self._actions[rollout])
        stepped.add_done_callback(lambda done: answer.set_result(self._observation(rollout, done, is_ended)))
        return answer

    def _observation(self, rollout: int, stepped: "Future[EpisodeOutcome]", is_ended: bool) -> Observation | None:
        try:
            outcome = stepped.result()
            if outcome.is_ended:
                return None
            observation = self._conversations[rollout].observe(outcome.transitions[-1], is_ended)
        except (RolloutFailed, Unavailable, LookupError) as error:
            # The episode breaks off; its group will be dropped unscored, which is logged then.
            logger.debug("an environment failed in the middle of an episode", extra={"error": str(error)})
            return None
        except CancelledError:  # the node stops
            return None
        except Exception as error:  # the engine waits for an answer: after any error it gets None
            _warn(self._tasks[rollout], error)
            return None
        if not self._limits.has_room(self._num_tokens[rollout], len(observation.token_ids)):
            return None
        self._num_tokens[rollout] += len(observation.token_ids)
        return observation


def _warn(task: Task, error: Exception) -> None:
    """Logs the reason why an episode broke off, at most once per WARN_EVERY_S for each environment."""
    now_s = time.monotonic()
    if now_s - _warned_at_s.get(task.env, -WARN_EVERY_S) < WARN_EVERY_S:
        return
    _warned_at_s[task.env] = now_s
    fields = {"environment": task.env, "task": task.task_id, "error": str(error)}
    is_ours = not isinstance(error, ConfigError)  # else the message says all
    logger.error("an episode could not go on", extra=fields, exc_info=error if is_ours else None)


def player_of(
    tokenizer: Tokenizer, limits: EpisodeLimits, step: Step | None, tasks: Sequence[Task], num_samples: int
) -> Observe | None:
    """The function `observe` for an engine that answers these tasks; None if every task has one turn."""
    if all(task.max_turns == 1 for task in tasks):
        return None
    assert step is not None, "tasks of several turns, and nobody who plays their environments"
    return EpisodePlayer(tokenizer, limits, step, tasks, num_samples).observe
