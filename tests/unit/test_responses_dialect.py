"""The Responses dialect: the same turns as in chat completions, from items and as items."""

import json
from typing import Any

import pytest

from tests.worlds.scripted_model import ScriptedServer, called

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
ASKED = {"model": "m", "instructions": "be brief", "input": "1+2?", "tools": [TOOL]}


def test_a_call_and_its_result_continue_the_tokens_that_were_sampled() -> None:
    with ScriptedServer("So. " + called(), "3") as server:
        status, first = server.ask("/v1/responses", ASKED)
        assert status == 200 and first["status"] == "completed" and first["object"] == "response"
        message, call = first["output"]
        assert message["content"][0]["text"] == "So." and call["type"] == "function_call"
        assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 1})
        items: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]}]
        items += [message, {"type": "reasoning", "summary": []}, call]
        items.append({"type": "function_call_output", "call_id": call["call_id"], "output": "3"})
        status, second = server.ask("/v1/responses", ASKED | {"input": items})
        assert status == 200 and second["output"][0]["content"][0]["text"] == "3"
        assert server.app.memory.num_continued == 1
        assert second["usage"]["output_tokens"] == 2
        cut = server.ask("/v1/responses", {"input": "a", "max_output_tokens": 1})[1]
        assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_a_stream_of_events_says_what_the_whole_response_says() -> None:
    with ScriptedServer("So. " + called()) as server:
        status, content = server.send("/v1/responses", ASKED | {"stream": True})
        assert status == 200
        blocks = [block.split("\n") for block in content.decode().split("\n\n") if block]
        events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
        assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"] and len(done) == 2
        texts = [event["delta"] for event in events if event["type"].endswith(".delta")]
        assert texts == ["So.", done[1]["arguments"]]
    with ScriptedServer("no call") as server:
        _, content = server.send("/v1/responses", ASKED | {"stream": True, "tool_choice": "required"})
        assert "event: response.failed" in content.decode() and "it calls no tool" in content.decode()


def test_a_schema_and_a_named_tool_go_where_a_chat_has_them() -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object", "required": ["n"]}}
    with ScriptedServer("{}", '{"n": 1}', ' {"a": 2}}') as server:
        made = server.ask("/v1/responses", {"input": "a", "text": {"format": schema}})[1]
        assert made["output"][0]["content"][0]["text"] == '{"n": 1}'
        named = server.ask("/v1/responses", ASKED | {"tool_choice": {"type": "function", "name": "add"}})[1]
        assert named["output"][0]["arguments"] == '{"a": 2}'


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: nothing is kept here"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: 'web_search' is not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type: 'item_reference'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "images and files are not",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]}, "must answer a call before it"),
        ({"input": []}, "input"),
        ({"input": [1]}, "input"),
        ({"text": {"format": {"type": "grammar"}}}, "response_format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with ScriptedServer("a") as server:
        status, reply = server.ask("/v1/responses", ASKED | fields)
        assert status == 400 and words in reply["error"]["message"], reply
