"""Clients of others, unchanged, against a served policy: OpenAI's SDK, and the client that verifiers trains with."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.serving import KEY, VERSION, random_network
from swarm.config import ModelConfig
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import Tokenizer
from swarm.model.source import model_folder
from swarm.model.tokenizer import load_tokenizer
from swarm.serving.http_server import HttpServer
from swarm.serving.openai_app import OpenAiApp, ServedModel

openai: Any = pytest.importorskip(
    "openai", reason="needs pip install verifiers==0.4.0, which brings openai; .ci/run has an environment with both"
)


class SmallServer:
    """A random network over SmolLM2's tokens, served."""

    def __init__(self) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(ModelConfig(source="smollm2"))
        self.engine = TransformersGenerator(random_network(self.tokenizer), self.tokenizer, VERSION, 0)
        model = ServedModel(name="small", completer=self.engine, tokenizer=self.tokenizer, context_tokens=8192)
        self.http = HttpServer(OpenAiApp(model, KEY).routes)
        self.url = f"http://127.0.0.1:{self.http.start('127.0.0.1', 0)}/v1"

    def close(self) -> None:
        self.http.stop()
        self.engine.close()

    def scores(self, prompt_ids: list[int], token_ids: list[int]) -> np.ndarray:
        return self.engine.score([[*prompt_ids, *token_ids]])[0][len(prompt_ids) :]


@pytest.fixture(scope="module")
def small() -> Iterator[SmallServer]:
    server = SmallServer()
    yield server
    server.close()


def test_openais_client_chats_streams_and_completes(small: SmallServer) -> None:
    client = openai.OpenAI(base_url=small.url, api_key=KEY)
    assert [card.id for card in client.models.list()] == ["small"]
    messages: list[Any] = [{"role": "user", "content": "what is seven?"}]
    before: list[int] = []
    for turn in range(4):
        reply = client.chat.completions.create(
            model="small",
            messages=messages,
            max_tokens=20,
            seed=turn,
            logprobs=True,
            top_logprobs=3,
            extra_body={"return_token_ids": True},
        )
        (choice,) = reply.choices
        assert reply.prompt_token_ids[: len(before)] == before
        told = [entry.logprob for entry in choice.logprobs.content]
        np.testing.assert_allclose(told, small.scores(reply.prompt_token_ids, choice.token_ids), atol=1e-4)
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
        assert choice.message.content == small.tokenizer.decode(choice.token_ids)
        assert reply.usage.completion_tokens == len(choice.token_ids)
        before = [*reply.prompt_token_ids, *choice.token_ids]
        messages += [choice.message, {"role": "user", "content": f"and {turn}?"}]
    whole = client.chat.completions.create(model="small", messages=messages, max_tokens=9, seed=1, temperature=0.7)
    stream = client.chat.completions.create(
        model="small",
        messages=messages,
        max_tokens=9,
        seed=1,
        temperature=0.7,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage == whole.usage
    made = client.completions.create(model="small", prompt="Once", max_tokens=5, logprobs=2, n=2, stop=["zzz"])
    assert len(made.choices) == 2 and len(made.choices[0].logprobs.top_logprobs[0]) <= 2
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.completions.create(model="small", prompt="Once", logit_bias={"5": 3})
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="Once")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=small.url, api_key="wrong-key-entirely").models.list()


def test_verifiers_client_trains_on_the_tokens_that_were_sampled(
    small: SmallServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verifiers", reason="needs pip install verifiers==0.4.0; .ci/run has an environment with it")
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    monkeypatch.setenv("SMALL_KEY", KEY)
    config = TrainClientConfig(
        base_url=small.url, api_key_var="SMALL_KEY", renderer_model_name=str(model_folder("smollm2"))
    )

    async def turns() -> None:
        client = TrainClient(config)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "what is seven?"}]
        for turn in range(4):  # it renders the conversation itself, each time
            body = {"model": "small", "messages": messages}
            sampling = SamplingConfig(temperature=1.0, max_tokens=24, seed=turn)
            response = await client.get_response(ChatDialect(), body, sampling, session_id="a")
            tokens = response.tokens
            assert response.message.content.strip() == small.tokenizer.decode(tokens.completion_ids).strip()
            expected = small.scores(tokens.prompt_ids, tokens.completion_ids)
            np.testing.assert_allclose(tokens.completion_logprobs, expected, atol=1e-4)
            messages += [
                {"role": "assistant", "content": response.message.content},
                {"role": "user", "content": f"and {turn}?"},
            ]
        await client.close()

    asyncio.run(turns())
