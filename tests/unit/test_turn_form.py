"""Tools and JSON mode of /v1/chat/completions: what a model's text becomes, and what it is shown."""

import json
import random
from typing import Any

import pytest

from swarm.serving.json_schema import misfit
from tests.worlds.scripted_model import TOOL, ScriptedServer, called, user

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0}, "of": {"$ref": "#/$defs/kind"}},
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"kind": {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}},
}
OTHER_TOOL = {"type": "function", "function": {"name": "mul", "description": "a product"}}


def test_calls_become_fields_and_a_result_continues_the_tokens_that_were_sampled() -> None:
    text = "Let me see. " + called() + called(arguments='{"b": {"c": "\u00e9"}}')
    with ScriptedServer(text, "the sum is 3") as server:
        first = server.chat(user("1+2?"), tools=[TOOL], return_token_ids=True)
        message = first["message"]
        assert first["finish_reason"] == "tool_calls" and message["content"] == "Let me see."
        names = [
            (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]
        ]
        assert names == [("add", {"a": 1}), ("add", {"b": {"c": "\u00e9"}})]
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in message["tool_calls"]]
        # as frameworks send it back: arguments written anew, null content fields dropped
        for call in message["tool_calls"]:
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        second = server.chat(user("1+2?"), {k: v for k, v in message.items() if v}, *results, tools=[TOOL])
        assert second["message"] == {"role": "assistant", "content": "the sum is 3", "refusal": None}
        before = [*server.engine.requests[0].prompt_ids, *first["token_ids"]]
        assert server.engine.requests[1].prompt_ids[: len(before)] == before
        assert server.app.memory.num_continued == 1
        assert '{"type": "function", "function": {"name": "add"' in server.engine.prompts()[0]


@pytest.mark.parametrize(
    "text",
    ["plain", "<tool_call>{broken</tool_call>", called("other"), "<tool_call>" + '{"name": "add", "arguments": {}}'],
    ids=["plain", "unreadable", "an unknown tool", "not closed"],
)
def test_what_is_no_call_of_an_offered_tool_is_content(text: str) -> None:
    with ScriptedServer(text) as server:
        choice = server.chat(user("a"), tools=[TOOL])
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert choice["finish_reason"] == "stop"


def test_without_offered_tools_a_call_is_text() -> None:
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        with ScriptedServer(called()) as server:
            assert server.chat(user("a"), **fields)["message"]["content"] == called()
            assert "# Tools" not in server.engine.prompts()[0]


def test_a_needed_call_is_begun_for_the_model_and_tried_again() -> None:
    named = {"type": "function", "function": {"name": "mul"}}
    with ScriptedServer("no", ' {"b": 2}}\n</tool_call> and more') as server:
        choice = server.chat(user("a"), tools=[TOOL, OTHER_TOOL], tool_choice=named, return_token_ids=True)
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "mul", "arguments": '{"b": 2}'} and choice["message"]["content"] is None
        assert len(server.engine.requests) == 2
        assert server.engine.prompts()[1].endswith('<tool_call>\n{"name": "mul", "arguments":')
        assert choice["stop_reason"] is None
    with ScriptedServer("never") as server:
        body = {"messages": [user("a")], "tools": [TOOL], "tool_choice": "required"}
        status, reply = server.ask("/v1/chat/completions", body)
        assert status == 422 and "it calls no tool" in reply["error"]["message"]
        assert len(server.engine.requests) == 4


def test_parallel_calls_can_be_turned_off() -> None:
    with ScriptedServer(called() + called()) as server:
        assert len(server.chat(user("a"), tools=[TOOL])["message"]["tool_calls"]) == 2
        one = server.chat(user("a"), tools=[TOOL], parallel_tool_calls=False)["message"]
        assert len(one["tool_calls"]) == 1


def test_a_stream_of_calls_says_what_the_whole_answer_says() -> None:
    with ScriptedServer("First. " + called() + called("mul")) as server:
        body = {"messages": [user("a")], "tools": [TOOL, OTHER_TOOL], "n": 2, "logprobs": True}
        body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
        events = server.events("/v1/chat/completions", body)
        whole = server.chat(user("a"), **{k: v for k, v in body.items() if k not in ("messages", "stream_options")})
        for index in range(2):
            parts = [each for event in events for each in event["choices"] if each["index"] == index]
            deltas = [part["delta"] for part in parts]
            assert deltas[0]["role"] == "assistant" and parts[-1]["finish_reason"] == "tool_calls"
            assert "".join(delta.get("content") or "" for delta in deltas) == "First."
            made: dict[int, dict[str, str]] = {}
            for delta in deltas:
                for call in delta.get("tool_calls", []):
                    one = made.setdefault(call["index"], {"id": call.get("id", ""), "name": "", "arguments": ""})
                    one["name"] += call["function"].get("name", "")
                    one["arguments"] += call["function"].get("arguments", "")
            expected = [call["function"] for call in whole["message"]["tool_calls"]]
            assert [{"name": one["name"], "arguments": one["arguments"]} for one in made.values()] == expected
            assert all(one["id"].startswith("call_") for one in made.values())
            assert [token for part in parts for token in part.get("token_ids", [])] == whole["token_ids"]
        assert events[-1]["usage"]["completion_tokens"] == 2 * len(whole["token_ids"])


def test_json_mode_is_checked_and_tried_again() -> None:
    json_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    with ScriptedServer("{", '{"n": -1}', '{"n": 4, "of": "c"}', ' {"n": 4, "of": null} ') as server:
        assert json.loads(server.chat(user("a"), response_format=json_schema)["message"]["content"])["n"] == 4
        assert len(server.engine.requests) == 4
        assert len({request.seed for request in server.engine.requests}) == 4
        assert '"minimum": 0' in server.engine.prompts()[0]
    for answer in ("[1]", "text", "NaN"):
        with ScriptedServer(answer) as server:
            body = {"messages": [user("a")], "response_format": {"type": "json_object"}}
            status, reply = server.ask("/v1/chat/completions", body)
            assert status == 422 and reply["error"]["type"] == "invalid_request_error"


DOUBLED = {"$ref": "#/7", "0": {"$ref": "#/leaf"}} | {
    str(n): {"anyOf": [{"$ref": f"#/{n - 1}"}] * 2} for n in range(1, 8)
}


@pytest.mark.parametrize(
    ("value", "schema", "words"),
    [
        ({"n": 1}, SCHEMA, ""),
        ({"n": True}, SCHEMA, "$.n: bool is not integer"),
        ({"n": 2.0}, SCHEMA, ""),
        ({}, SCHEMA, "'n' is missing"),
        ({"n": 1, "x": 1}, SCHEMA, "$.x: nothing is allowed here"),
        ({"n": 1, "of": "c"}, SCHEMA, "$.of: none of anyOf"),
        ([1, "a"], {"items": {"type": "number"}, "maxItems": 3}, "$[1]: str is not number"),
        ([1] * 4, {"items": {"type": "number"}, "maxItems": 3}, "4 is above maxItems 3"),
        ("ab", {"minLength": 3}, "2 is below minLength 3"),
        (1, {"const": True}, "not the value True"),
        (None, {"allOf": [{"type": ["string", "null"]}, {"const": 1}]}, "not the value 1"),
        (1, {"$ref": "#"}, "its check needs more"),
        ({}, {"required": [[1]]}, "$: '[1]' is missing"),
        ([[0] * 200] * 200, {"items": {"items": {"enum": [1] * 1000}}}, "none of the 1000"),
        ([[0] * 200] * 200, {"items": {"items": {"enum": [*range(1000, 2000), 0]}}}, "its check needs more"),
    ],
)
def test_a_schema_names_the_first_misfit(value: object, schema: dict[str, Any], words: str) -> None:
    found = misfit(value, schema)
    assert words in found and bool(words) == bool(found)


@pytest.mark.parametrize("leaf", [{"type": ["null"] * 500}, {"$ref": "#" + "/x" * 2000, "type": "null"}])
def test_what_a_schema_says_at_length_counts_as_much(leaf: dict[str, Any]) -> None:
    assert "its check needs more" in misfit(1, DOUBLED | {"leaf": leaf})


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice: only allowed with `tools`"),
    "a choice of none": ({"tools": [TOOL], "tool_choice": "any"}, 'tool_choice: Input should be "none", "auto"'),
    "an unknown choice": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice: 'x' is none of `tools`",
    ),
    "a name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    "a kind": ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    "one name twice": ({"tools": [TOOL, TOOL]}, "two functions have one name"),
    "a result of no call": (
        {"messages": [user("a"), {"role": "tool", "tool_call_id": "x", "content": "1"}]},
        "messages.1: role `tool` must answer a call before it; 'x' is none",
    ),
    "a call without result": (
        {"messages": [user("a"), {"role": "assistant", "tool_calls": [CALL]}, user("b")]},
        "missing: c1",
    ),
    "functions": ({"functions": [{"name": "a"}]}, "functions"),
    "a grammar": ({"response_format": {"type": "grammar"}}, "response_format.type"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_request_that_openai_refuses_is_refused_by_its_field(name: str) -> None:
    fields, message = WRONG[name]
    with ScriptedServer("a") as server:
        status, reply = server.ask("/v1/chat/completions", {"messages": [user("a")], **fields})
        assert status == 400 and message in reply["error"]["message"], reply
        assert reply["error"]["type"] == "invalid_request_error" and reply["error"]["param"]


@pytest.mark.sweep
def test_none_of_20_000_tokens_of_earlier_turns_drifts_though_calls_are_written_anew() -> None:
    rng = random.Random(0)
    num_tokens = num_drifted = 0
    while num_tokens < 20_000:
        arguments = [
            json.dumps({"a": rng.random(), "text": "".join(rng.choices('ab "\\\u00e9{}\n', k=8))}) for _ in range(6)
        ]
        texts = [rng.choice(["", "So. ", "\n"]) + called(arguments=each) for each in arguments]
        with ScriptedServer(*texts) as server:
            messages: list[dict[str, Any]] = [user(f"{rng.random()}")]
            before: list[int] = []
            for _ in texts:
                body = {"messages": messages, "tools": [TOOL], "return_token_ids": True}
                status, reply = server.ask("/v1/chat/completions", body)
                assert status == 200
                prompt = reply["prompt_token_ids"]
                num_tokens += len(before)
                num_drifted += sum(one != other for one, other in zip(before, prompt, strict=False))
                before = [*prompt, *reply["choices"][0]["token_ids"]]
                message = reply["choices"][0]["message"]
                for call in message["tool_calls"]:  # as frameworks do
                    call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
                results = [
                    {"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in message["tool_calls"]
                ]
                messages += [{k: v for k, v in message.items() if v}, *results]
    assert num_drifted == 0
