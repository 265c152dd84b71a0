"""Conversation with a model, whose answers are shown while they are generated.

Invariant: the model reads its own chat template over the messages so far, as in training.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig

from swarm.episode import Message
from swarm.errors import ConfigError
from swarm.interfaces import Tokenizer
from swarm.model.compute_dtype import place
from swarm.model.device import pick_device
from swarm.model.network import most_tokens
from swarm.model.tokenizer import require_no_system_message
from swarm.trained.model import TrainedModel
from swarm.types import Task

_PARTIAL = "\ufffd"  # the last token may be a part of a character


class Conversation:
    """Messages so far, and a model that answers them.

    Example:
        talk = Conversation(load_target("my-node"), max_new_tokens=64)
        print(talk.ask("what is 2 + 2?"))
    """

    def __init__(
        self,
        model: TrainedModel,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        system: str = "",
        prefill: str = "",
        device: str = "auto",
    ) -> None:
        """Moves the network to the device.

        Args:
            model: model that answers.
            max_new_tokens: most tokens of an answer.
            temperature: sampling temperature; 0 takes the likeliest token.
            system: system message; empty for none.
            prefill: beginning of each answer, which the model goes on from; no part of what `ask` returns.
            device: device of the network; auto picks one.

        Raises:
            ConfigError: the model cannot read the system message, or there is no such device.
        """
        self._model = model
        self._device = pick_device(device)
        place(model.network, self._device)
        self._network: Any = model.network
        self._network.generation_config = GenerationConfig()  # as in training, whatever the model's own file asks for
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature
        self._system = (Message(role="system", content=system),) if system else ()
        self._prefill = (Message(role="assistant", content=prefill),) if prefill else ()
        require_no_system_message(model.tokenizer, self._system)
        self.messages: tuple[Message, ...] = self._system

    def reset(self) -> None:
        """Forgets all messages but the system message."""
        self.messages = self._system

    def ask(self, text: str, show: Callable[[str], None] | None = None) -> str:
        """Returns the answer to a message (blocking); calls `show` with each piece of the answer as it is made.

        If the answer is interrupted (KeyboardInterrupt), the question is forgotten as well.

        Raises:
            ConfigError: the tokenizer cannot read the text, or the conversation is as long as the model's positions.
        """
        messages = (*self.messages, Message(role="user", content=text))
        prompt = self._model.tokenizer.encode_prompt(Task(env="chat", task_id=0, messages=(*messages, *self._prefill)))
        positions = most_tokens(self._model.network)
        room = positions - len(prompt) if positions else self._max_new_tokens
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(prompt):,} tokens, and the model has {positions:,} positions; begin a new "
                "one (/new), or ask less"
            )
        pieces = _Pieces(self._model.tokenizer, show or (lambda _: None))
        is_greedy = self._temperature == 0
        chosen: dict[str, Any] = {} if is_greedy else {"temperature": self._temperature, "top_k": 0, "top_p": 1.0}
        ids = torch.tensor([prompt], device=self._device)
        with torch.no_grad():
            self._network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=not is_greedy,
                max_new_tokens=min(self._max_new_tokens, room),
                eos_token_id=sorted(self._model.tokenizer.eos_ids),
                pad_token_id=min(self._model.tokenizer.eos_ids),
                streamer=pieces,
                **chosen,
            )
        begun = "".join(each.content for each in self._prefill)
        self.messages = (*messages, Message(role="assistant", content=begun + pieces.text))
        return pieces.text


class _Pieces:
    """A streamer for transformers: decodes the answer as it grows, and shows whole characters only."""

    def __init__(self, tokenizer: Tokenizer, show: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._show = show
        self._ids: list[int] | None = None  # None: the prompt did not come yet
        self.text = ""  # shown so far

    def put(self, value: Tensor) -> None:
        """Ignores the first call, which has the prompt; decodes the tokens of each later call."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += cast("list[int]", value.reshape(-1).tolist())
        text = self._tokenizer.decode(self._ids)
        if not text.endswith(_PARTIAL):
            self._show_new(text)

    def end(self) -> None:
        """Shows the text that `put` held back."""
        self._show_new(self._tokenizer.decode(self._ids or []))

    def _show_new(self, text: str) -> None:
        new = text[len(self.text) :]
        if new:
            self._show(new)
        self.text = text
