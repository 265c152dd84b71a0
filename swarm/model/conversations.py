"""Conversations of an episode: the token ids that each turn continues.

Most episodes are one conversation. An environment may open others: one that goes on from a summary, or the private view
of another role. All tokens stand in one row in the order of time; each token sees only its own conversation, and the
prompt of the task belongs to the first one.

Invariant: a conversation is only appended to; the appended tokens follow from tokenizer, actions and replay.
Shape letters: T response tokens.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from swarm.episode import Transition
from swarm.interfaces import Observation, Tokenizer
from swarm.types import BoolArray, Task


class Conversations:
    """Observations of one episode as token ids, turn by turn.

    Example:
        conversations = Conversations(tokenizer, "sums")
        conversations.observe(transition, is_ended=True).token_ids
    """

    def __init__(self, tokenizer: Tokenizer, env: str) -> None:
        self._tokenizer = tokenizer
        self._env = env
        self._newest = 0
        self._are_ended: list[bool] = [False]  # whether the newest action of each has its end token

    def observe(self, transition: Transition, is_ended: bool) -> Observation:
        """Tokens of an observation, which come before the next action.

        Args:
            transition: outcome of the newest action, which does not end the episode.
            is_ended: True if that action has an end token.

        Raises:
            ConfigError: the tokenizer cannot encode the messages.
        """
        self._are_ended[self._newest] = is_ended
        self._newest = transition.conversation
        if transition.conversation < len(self._are_ended):
            is_ended = self._are_ended[transition.conversation]
            ids = self._tokenizer.encode_observation(transition.messages, is_ended)
        else:
            self._are_ended.append(False)
            ids = self._tokenizer.encode_prompt(Task(env=self._env, task_id=0, messages=transition.messages))
        return Observation(ids, transition.conversation)


def conversation_ids(
    of_turns: Sequence[int], turn_ids: NDArray[np.integer], action_mask: BoolArray
) -> NDArray[np.int64]:
    """[T] conversation of each token; an observation belongs to the conversation of the action after it.

    Args:
        of_turns: conversation of each action.
        turn_ids: [T], number of each token's action; those of observations do not count.
        action_mask: [T], True for the tokens of actions; an observation may come before the first.
    """
    turns, num_tokens = np.array(of_turns, np.int64), action_mask.size
    if not action_mask.any():
        return np.zeros(num_tokens, np.int64)
    places = np.where(action_mask, np.arange(num_tokens), num_tokens)
    following = np.minimum.accumulate(places[::-1])[::-1]  # index of the next action token; its own for an action
    after = np.where(following < num_tokens, turn_ids[following.clip(max=num_tokens - 1)], len(turns) - 1)
    return turns[after.clip(max=len(turns) - 1)]
