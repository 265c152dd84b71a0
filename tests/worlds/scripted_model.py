"""A model that says what a test scripts, served over HTTP with SmolLM2's tokens."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

from swarm.config import ModelConfig
from swarm.interfaces import Completion, CompletionRequest, OnTokens, Prompts, Tokenizer
from swarm.model.tokenizer import load_tokenizer
from swarm.serving.http_server import HttpServer
from swarm.serving.openai_app import OpenAiApp, ServedModel
from swarm.types import FinishReason, FloatArray, PolicyVersion, VersionSpan
from tests.worlds.api_client import ApiClient

KEY = "a-key-of-the-tests"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@cache
def tokenizer() -> Tokenizer:
    """SmolLM2's."""
    return load_tokenizer(ModelConfig(source="smollm2"))


class ScriptedCompleter:
    """Completer that gives texts in the order of the script, each token with log-prob -0.5; then repeats the last.

    Its texts are cut into single characters, as no tokenizer cuts them: rendered again, they would be other tokens.
    """

    def __init__(self, texts: Sequence[str], step: int = 3) -> None:
        self.texts = list(texts)
        self.version = PolicyVersion(policy_id="ada", step=step, digest=b"\x01" * 32)
        self.requests: list[CompletionRequest] = []
        self._lock = threading.Lock()

    def complete(self, request: CompletionRequest, on_tokens: OnTokens | None = None) -> "Future[Completion]":
        """A finished completion with the next text."""
        with self._lock:
            self.requests.append(request)
            text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        (*_, end), finish = tokenizer().encode_response(text), FinishReason.STOP
        ids = [*itertools.chain.from_iterable(tokenizer().encode_response(char)[:-1] for char in text), end]
        if len(ids) > request.sampling.max_new_tokens:
            ids, finish = ids[: request.sampling.max_new_tokens], FinishReason.LENGTH
        if on_tokens is not None:
            for place, token in enumerate(ids):
                if not on_tokens([token], [-0.5], []):
                    ids = ids[: place + 1]
                    break
        made: Future[Completion] = Future()
        spans = [VersionSpan(start=0, version=self.version)]
        made.set_result(Completion(token_ids=ids, logprobs=[-0.5] * len(ids), top=(), spans=spans, finish=finish))
        return made

    def score(self, sequences: Prompts) -> list[FloatArray]:
        """Nothing that a test asks for."""
        raise NotImplementedError

    def prompts(self) -> list[str]:
        """Text of each prompt so far."""
        return [tokenizer().decode(request.prompt_ids) for request in self.requests]


class ScriptedServer(ApiClient):
    """The model behind OpenAI's interface, and a client of it."""

    def __init__(self, *texts: str, make: Callable[..., OpenAiApp] = OpenAiApp, **options: Any) -> None:
        self.engine = ScriptedCompleter(texts)
        model = ServedModel(name="m", completer=self.engine, tokenizer=tokenizer(), context_tokens=4096)
        self.app = make(model, KEY, **options)
        self._server = HttpServer(self.app.routes)
        super().__init__(self._server.start("127.0.0.1", 0), KEY)
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> "ScriptedServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def chat(self, *messages: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        """The choice of a reply to a chat."""
        status, reply = self.ask("/v1/chat/completions", {"messages": messages, **fields})
        assert status == 200, reply
        return reply["choices"][0]


def user(text: str) -> dict[str, str]:
    """A message of the user."""
    return {"role": "user", "content": text}


def called(name: str = "add", arguments: str = '{"a": 1}') -> str:
    """A call in the model's own syntax."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
