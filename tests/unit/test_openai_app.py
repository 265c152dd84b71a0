"""A policy behind OpenAI's HTTP interface, over real connections to a real engine."""

import gc
import json
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from engines import sharp_network
from pydantic import BaseModel, ValidationError
from waits import HANG_S

from swarm.generation.continuous_batching import Decoding
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import snapshot
from swarm.serving import http_server
from swarm.serving.http_server import HttpServer
from swarm.serving.openai_app import OpenAiApp, ServedModel
from swarm.serving.openai_requests import ChatRequest, DetokenizeRequest, TextRequest
from swarm.types import PolicyVersion
from tests.worlds.api_client import ApiClient

KEY = "a-key-of-the-tests"
TOKENIZER = CharTokenizer()
VERSION = PolicyVersion(policy_id="ada", step=3, digest=b"\x01" * 32)
CHAT = {"messages": [{"role": "user", "content": "sort:cab="}], "max_tokens": 6}


class Served(ApiClient):
    """A server, and a client of it."""

    def __init__(self, max_open: int = 64) -> None:
        self.engine = TransformersGenerator(sharp_network(), TOKENIZER, VERSION, 0, max_rows=8)
        model = ServedModel(name="tiny", completer=self.engine, tokenizer=TOKENIZER, context_tokens=128, source="tiny")
        self.app = OpenAiApp(model, KEY, max_open=max_open)
        self._server = HttpServer(self.app.routes)
        super().__init__(self._server.start("127.0.0.1", 0), KEY)

    def close(self) -> None:
        self._server.stop()
        self.engine.close()

    def whole(self, path: str, body: object = None) -> dict[str, Any]:
        status, reply = self.ask(path, body)
        assert status == 200, reply
        return reply

    def refusal(self, path: str, body: object) -> tuple[int, dict[str, Any]]:
        status, reply = self.ask(path, body)
        return status, reply["error"]


@contextmanager
def serving(max_open: int = 64, is_slow: bool = True) -> Generator[tuple[Served, threading.Semaphore]]:
    """A server of its own, whose engine makes a token for each release."""
    one = Served(max_open)
    go = slow(one.engine) if is_slow else threading.Semaphore()
    try:
        yield one, go
    finally:
        go.release(10_000)
        one.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(is_slow=False) as (one, _):
        yield one


def test_a_chat_answer_is_the_engines_and_names_the_version_that_made_it(served: Served) -> None:
    reply = served.whole("/v1/chat/completions", CHAT | {"temperature": 0, "return_token_ids": True, "logprobs": True})
    (choice,) = reply["choices"]
    prompt = [2 + "abcdefghijklmnopqrstuvwxyz".index(letter) for letter in "sort"]
    assert reply["prompt_token_ids"][:4] == prompt
    (greedy,) = served.engine.greedy([reply["prompt_token_ids"]], 6)
    assert choice["message"]["content"] == greedy[0]
    assert TOKENIZER.decode(choice["token_ids"]) == greedy[0]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(
        served.engine.score([[*reply["prompt_token_ids"], *choice["token_ids"]]])[0][len(reply["prompt_token_ids"]) :],
        abs=1e-4,
    )
    assert choice["policy_versions"] == [{"start": 0, "policy_id": "ada", "step": 3, "digest": "01" * 32}]
    assert reply["system_fingerprint"] == "ada-3-0101010101010101" and reply["model"] == "tiny"
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"])
    (card,) = served.whole("/v1/models")["data"]
    assert card["id"] == "tiny" and card["max_model_len"] == 128 and card["policy_version"]["step"] == 3


def assert_nearly(given: Any, expected: Any) -> None:
    """Equal but for the last bits of figures: those follow from which rows a batch happened to hold."""
    if isinstance(expected, dict):
        assert given.keys() == expected.keys()
        for key in expected:
            assert_nearly(given[key], expected[key])
    elif isinstance(expected, list):
        assert len(given) == len(expected)
        for one, other in zip(given, expected, strict=True):
            assert_nearly(one, other)
    else:
        assert given == (pytest.approx(expected, abs=1e-4) if isinstance(expected, float) else expected)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_says_what_the_whole_answer_says(served: Served, path: str) -> None:
    prompt = {"messages": CHAT["messages"]} if "chat" in path else {"prompt": "sort:cab="}
    body = prompt | {"max_tokens": 9, "n": 3, "seed": 5, "return_token_ids": True}
    body |= {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2}
    whole = served.whole(path, body)
    events = served.events(path, body | {"stream_options": {"include_usage": True}})
    assert events[-1]["usage"] == whole["usage"] and events[-1]["choices"] == []
    for choice in whole["choices"]:
        parts = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        if "chat" in path:
            assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
            logprobs = [entry for part in parts for entry in (part.get("logprobs") or {"content": []})["content"]]
            assert_nearly(logprobs, choice["logprobs"]["content"])
        else:
            assert "".join(part["text"] for part in parts) == choice["text"]
            told = [part["logprobs"] for part in parts if part.get("logprobs")]
            for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                assert_nearly([value for one in told for value in one[field]], choice["logprobs"][field])
        assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert all(part["finish_reason"] is None for part in parts[:-1])


def test_a_seed_gives_the_same_answers_again_and_n_different_ones(served: Served) -> None:
    body = CHAT | {"n": 4, "seed": 11, "max_tokens": 10}
    first, again = (served.whole("/v1/chat/completions", body)["choices"] for _ in range(2))
    assert_nearly(first, again)
    assert len({choice["message"]["content"] for choice in first}) > 1


def test_token_prompts_and_scores_of_them(served: Served) -> None:
    body = {"prompt": [[5, 6, 7], [9]], "max_tokens": 3, "prompt_logprobs": 0, "return_token_ids": True}
    one, other = served.whole("/v1/completions", body)["choices"]
    assert one["prompt_token_ids"] == [5, 6, 7] and other["prompt_token_ids"] == [9]
    scores = served.engine.score([[5, 6, 7]])[0]
    assert one["prompt_logprobs"][0] is None
    assert [one["prompt_logprobs"][1]["6"]["logprob"], one["prompt_logprobs"][2]["7"]["logprob"]] == pytest.approx(
        scores[1:].tolist(), abs=1e-5
    )
    assert other["prompt_logprobs"] == [None]


def test_token_ids_in_token_ids_out(served: Served) -> None:
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "logprobs": 1, "seed": 3}}
    (choice,) = served.whole("/inference/v1/generate", body)["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
    by_text = {"prompt": [5, 6], "max_tokens": 4, "seed": 3, "return_token_ids": True}
    assert served.whole("/v1/completions", by_text)["choices"][0]["token_ids"] == choice["token_ids"]


def test_stop_strings_and_stop_tokens_end_an_answer(served: Served) -> None:
    greedy = {"prompt": [5, 6], "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    (whole,) = served.whole("/v1/completions", greedy)["choices"]
    text, ids = whole["text"], whole["token_ids"]
    stop = text[3:5]
    at = text.index(stop)
    for body in (greedy, greedy | {"stop": [stop]}):
        (ended,) = served.whole("/v1/completions", body | {"stop": stop})["choices"]
        assert ended["text"] == text[:at] and ended["stop_reason"] == stop and ended["finish_reason"] == "stop"
        assert ended["token_ids"] == ids[: at + 2]
    (by_token,) = served.whole("/v1/completions", greedy | {"stop_token_ids": [ids[2]]})["choices"]
    assert by_token["token_ids"] == ids[: ids.index(ids[2]) + 1] and by_token["finish_reason"] == "stop"
    streamed = served.events("/v1/completions", greedy | {"stop": stop})
    assert "".join(each["text"] for event in streamed for each in event["choices"]) == text[:at]


def test_a_conversation_goes_on_with_the_tokens_that_were_sampled(served: Served) -> None:
    messages: list[dict[str, str]] = []
    before: list[int] = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"turn {turn}="})
        body = {"messages": messages, "max_tokens": 5, "seed": turn, "return_token_ids": True}
        reply = served.whole("/v1/chat/completions", body)
        assert reply["prompt_token_ids"][: len(before)] == before
        (choice,) = reply["choices"]
        before = [*reply["prompt_token_ids"], *choice["token_ids"]]
        messages.append(choice["message"])
    assert len(before) > 30


def test_tokenize_says_what_a_chat_would_be_asked(served: Served) -> None:
    ids = served.whole("/tokenize", {"messages": CHAT["messages"]})["tokens"]
    reply = served.whole("/v1/chat/completions", CHAT | {"return_token_ids": True})
    assert ids == reply["prompt_token_ids"]
    assert served.whole("/tokenize", {"prompt": "abc"}) == {"tokens": [2, 3, 4], "count": 3, "max_model_len": 128}
    assert served.whole("/detokenize", {"tokens": [2, 3, 4]}) == {"prompt": "abc"}


WRONG: dict[str, tuple[str, object, str]] = {
    "no JSON": ("/v1/completions", b"{", "not JSON"),
    "a list": ("/v1/completions", [1], "must be a JSON object"),
    "no prompt": ("/v1/completions", {}, "prompt: Field required"),
    "an empty prompt": ("/v1/completions", {"prompt": []}, "none of them empty"),
    "an unknown token": ("/v1/completions", {"prompt": [10**6]}, "1000000 is outside the vocabulary of 47"),
    "a negative token": ("/v1/completions", {"prompt": [-1]}, "prompt"),
    "too long": (
        "/v1/completions",
        {"prompt": [5] * 120, "max_tokens": 9},
        "120 tokens and an answer of 9 exceed the 128",
    ),
    "no room": ("/v1/completions", {"prompt": [5] * 128}, "exceed the 128"),
    "too many": ("/v1/completions", {"prompt": [5], "n": 65}, "n: Input should be less than or equal to 64, got 65"),
    "many prompts": ("/v1/completions", {"prompt": [[5]] * 33, "n": 2}, "33 prompts x 2 answers exceed 64"),
    "a temperature": ("/v1/completions", {"prompt": [5], "temperature": -0.1}, "temperature"),
    "nearly greedy": ("/v1/completions", {"prompt": [5], "temperature": 1e-9}, "must be 0 (greedy) or at least 0.01"),
    "not a number": ("/v1/completions", b'{"prompt": [5], "temperature": NaN}', "temperature"),
    "min_p": ("/v1/completions", {"prompt": [5], "min_p": 0.1}, "min_p: 0.1 is not supported; leave it out"),
    "penalty": ("/v1/completions", {"prompt": [5], "presence_penalty": 1}, "presence_penalty: 1 is not supported"),
    "nested": ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"min_p": 0.1}}, "min_p: 0.1 is not"),
    "tools": ("/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}, "tools.0.function: Field required"),
    "functions": ("/v1/chat/completions", CHAT | {"functions": [{"name": "a"}]}, "functions: [{'name': 'a'}] is not"),
    "no messages": ("/v1/chat/completions", {"messages": []}, "messages"),
    "a role": ("/v1/chat/completions", {"messages": [{"role": "bot", "content": "a"}]}, "messages.0.role"),
    "the assistant's": (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "content": "a"}]},
        "the last one is",
    ),
    "an image": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content: Input should be a text or a list of text parts",
    ),
    "a system message": (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]},
        "messages: the tiny model has no system message",
    ),
    "a letter": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\u00e9"}]}, "\u00e9"),
    "a stop": (
        "/v1/completions",
        {"prompt": [5], "stop": [""]},
        "stop: Input should be a string, or a list of at most",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_answered_is_refused_with_field_value_and_bound(served: Served, name: str) -> None:
    path, body, message = WRONG[name]
    status, error = served.refusal(path, body)
    assert status == 400 and message in error["message"] and error["type"] == "invalid_request_error"


MANY: dict[str, tuple[type[BaseModel], object]] = {
    "empty lists": (TextRequest, {"prompt": [[]] * 999}),
    "texts beyond the bound": (TextRequest, {"prompt": [""] * 999}),
    "one text among tokens": (TextRequest, {"prompt": [5] * 999 + ["x"]}),
    "parts": (ChatRequest, {"messages": [{"role": "user", "content": [1] * 999}]}),
    "messages": (ChatRequest, {"messages": [{"role": "bot"}] * 999}),
    "stop tokens": (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "stop_token_ids": ["x"] * 999}),
    "tokens": (DetokenizeRequest, {"tokens": ["x"] * 999}),
}


@pytest.mark.parametrize("name", MANY)
def test_one_wrong_item_of_a_list_is_enough(name: str) -> None:
    kind, body = MANY[name]
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(body)
    assert raised.value.error_count() <= 5  # each takes microseconds and a kilobyte, once for each kind of prompt


def test_a_model_of_another_name_is_not_found(served: Served) -> None:
    status, error = served.refusal("/v1/completions", {"prompt": [5], "model": "gpt-4"})
    assert status == 404 and error["code"] == "model_not_found" and "'tiny' is" in error["message"]


@pytest.mark.parametrize(("method", "body"), [("POST /v1/embeddings", {"input": "a"}), ("GET /v1/completions", None)])
def test_an_address_that_is_not_served_is_refused_as_clients_read_it(served: Served, method: str, body: object) -> None:
    status, error = served.refusal(method.split()[1], body)
    assert status == 404 and error["message"] == f"{method} is not served here"
    assert error["type"] == "invalid_request_error" and error["code"] is None


@pytest.mark.parametrize("key", ["", "wrong", KEY + "x", KEY[:-1], "\u00fc"])
def test_without_the_key_nothing_is_told_but_health(served: Served, key: str) -> None:
    sent = key.encode("latin-1").decode("latin-1")
    for path, body in (("/v1/models", None), ("/v1/chat/completions", CHAT), ("/tokenize", {"prompt": "a"})):
        assert served.send(path, body, key=sent)[0] == 401
    assert served.send("/health", key=sent)[0] == 200


def test_unknown_fields_that_change_nothing_are_taken(served: Served) -> None:
    served.whole(
        "/v1/chat/completions", CHAT | {"user": "me", "metadata": {"a": "b"}, "presence_penalty": 0, "tools": None}
    )


def test_a_body_beyond_the_bound_is_refused(served: Served) -> None:
    for path, num_prompts in (("/tokenize", 1), ("/detokenize", 1), ("/v1/completions", 64)):
        most = 256 * 1024 + 64 * num_prompts * 128
        status, error = served.refusal(path, b'{"prompt": "' + b"a" * most + b'"}')
        assert status == 413 and f"{most} bytes" in error["message"]


def test_half_requests_keep_nobody_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SILENT_PER_SUBNET", 8)
    monkeypatch.setattr(http_server, "HEAD_S", 0.5)
    with ExitStack() as held:
        half = [held.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(40)]
        for each in half:
            with suppress(OSError):  # it made room already
                each.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        assert served.send("/health", key="")[0] == 200
        assert len(served.whole("/v1/completions", {"prompt": [5], "max_tokens": 2})["choices"]) == 1
        for each in half:  # the newest of them, too, has an end
            each.settimeout(HANG_S)
            with suppress(ConnectionResetError):
                assert each.recv(1) == b""


def test_half_bodies_keep_nobody_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_SENDING", 8)
    monkeypatch.setattr(http_server, "BODY_S", 0.5)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9\r\n\r\n{{"
    with ExitStack() as held:
        half = [held.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(40)]
        for each in half:
            each.sendall(head.encode())
        long = {"prompt": "a" * 20, "user": "x" * 150_000, "max_tokens": 2}  # its body comes in several parts
        assert len(served.whole("/v1/completions", long)["choices"]) == 1
        for each in half:
            each.settimeout(HANG_S)
            with suppress(ConnectionResetError):
                assert each.recv(1) == b""


def slow(engine: TransformersGenerator) -> threading.Semaphore:
    """The engine makes a token for each release."""
    go = threading.Semaphore(0)
    step = engine._completions.step

    def held(decoding: Decoding) -> None:
        go.acquire()
        step(decoding)

    engine._completions.step = held
    engine._tokenizer = CharTokenizer()
    engine._tokenizer.eos_ids = frozenset()  # no answer ends by itself
    return go


def begin(one: Served, body: dict[str, Any]) -> socket.socket:
    content = json.dumps(body).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {KEY}",
        f"Content-Length: {len(content)}",
    ]
    connection = socket.create_connection(("127.0.0.1", one.port), timeout=HANG_S)
    connection.sendall("\r\n".join([*head, "", ""]).encode() + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_caller_went_away_leaves_the_engine(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with serving() as (one, go):
        connection = begin(one, {"prompt": [5], "max_tokens": 100, "stream": stream})
        go.release(3)
        while not one.engine._completions._calls:
            pass
        connection.close()
        while one.engine._completions._calls:  # the test's own time limit ends a wait for ever
            go.release()
        assert one.app._num_open == 0
    gc.collect()  # asyncio logs what nobody looked at when it is gone
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_more_than_the_bound_wait_elsewhere() -> None:
    with serving(max_open=3) as (one, go):
        connection = begin(one, {"prompt": [5], "max_tokens": 50, "n": 3})
        while one.app._num_open < 3:
            pass
        for body in ({"prompt": [5]}, {"prompt": [5], "stream": True}):
            status, error = one.refusal("/v1/completions", body)
            assert status == 429 and error["message"] == "3 answers are under way, of at most 3"
        go.release(10_000)
        assert b"200 OK" in connection.recv(4096)
        connection.close()
        one.whole("/v1/completions", {"prompt": [5]})


def test_an_engine_that_fails_is_told_with_a_status_or_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Decoding.step

    def broken(decoding: Decoding, version: PolicyVersion) -> None:
        raise RuntimeError("out of memory")

    with serving(is_slow=False) as (one, _):
        monkeypatch.setattr(Decoding, "step", broken)
        status, error = one.refusal("/v1/completions", {"prompt": [5]})
        assert status == 503 and "out of memory" in error["message"]
        status, content = one.send("/v1/completions", {"prompt": [5], "stream": True})
        assert b"out of memory" in content and b"[DONE]" not in content
        monkeypatch.setattr(Decoding, "step", step)
        one.whole("/v1/completions", {"prompt": [5]})


def test_new_weights_in_the_middle_are_named_token_by_token() -> None:
    with serving() as (one, go):
        body = {"prompt": [5], "max_tokens": 12, "return_token_ids": True}
        replies: list[dict[str, Any]] = []
        asking = threading.Thread(target=lambda: replies.append(one.whole("/v1/completions", body)))
        asking.start()
        go.release(4)
        while not (calls := list(one.engine._completions._calls.values())) or len(calls[0].row.tokens) < 5:
            pass
        newer = PolicyVersion(policy_id="ada", step=4, digest=b"\x02" * 32)
        one.engine.load(newer, snapshot(tiny_network(1)))
        go.release(10_000)
        asking.join(HANG_S)
        (choice,) = replies[0]["choices"]
        assert [(span["start"], span["step"]) for span in choice["policy_versions"]] == [(0, 3), (5, 4)]
        assert replies[0]["system_fingerprint"].startswith("ada-4-02")
