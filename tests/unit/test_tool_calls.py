"""Tool calls in the text of a turn: what is read, what is malformed, and that no text takes long or raises."""

import hashlib
import json
import time

import pytest

from swarm.environments.tool_calls import CLOSING, MAX_CALLS, OPENING, parse_action, render_call
from swarm.episode import TOOL_SYNTAX, ToolCall

ADD = ToolCall(name="add", arguments={"a": 1, "b": [2.5, "x", None, True]})


def test_a_rendered_call_is_read_back_with_text_around_it() -> None:
    text = f"I add.\n{render_call(ADD)} and {render_call(ADD)}"
    action = parse_action(text)
    assert action.calls == (ADD, ADD) and action.text == text and not action.is_malformed


@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_an_object_alone_is_a_call(key: str) -> None:
    assert parse_action(f' {{"name": "add", "{key}": {{"a": 1}}}}\n').calls == (
        ToolCall(name="add", arguments={"a": 1}),
    )


@pytest.mark.parametrize("text", ["", "12", "{", '{"a": 1}', "{x}", '{"name": 3, "arguments": {}}', CLOSING])
def test_other_text_is_no_call_and_not_malformed(text: str) -> None:
    action = parse_action(text)
    assert action.calls == () and not action.is_malformed


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"name": "add"}',
        '{"name": "", "arguments": {}}',
        '{"name": "add", "arguments": "a"}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": 1}',
        "[" * 100_000,
        '{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}",
    ],
)
def test_a_tagged_call_that_cannot_be_read_is_malformed_as_a_whole(body: str) -> None:
    action = parse_action(f"{render_call(ADD)}{OPENING}{body}{CLOSING}")
    assert action.calls == () and action.is_malformed


def test_what_is_read_changes_only_with_its_version() -> None:
    """Nodes of equal digests read the same calls: raise TOOL_SYNTAX with whatever turns this red, then pin both."""
    bodies = ('{"name": "add", "arguments": {"a": 1}}', '{"name": "x", "parameters": {}}', '{"name": "x"}', "[1]", "{")
    tagged = [f"{before}{OPENING}{body}{after}" for body in bodies for before in ("", "a") for after in ("", CLOSING)]
    texts = [*tagged, *(body + after for body in bodies for after in ("", "\n", "b")), OPENING * 17, CLOSING, ""]
    actions = [parse_action(text) for text in texts]
    read = [[a.is_malformed, [[call.name, dict(call.arguments)] for call in a.calls]] for a in actions]
    found = hashlib.sha256(json.dumps(read).encode()).hexdigest()
    assert (TOOL_SYNTAX, found[:16]) == (2, "426c55ea94119018")


def test_a_call_without_its_end_and_too_many_calls_are_malformed() -> None:
    assert parse_action(render_call(ADD)[: -len(CLOSING)]).is_malformed
    assert not parse_action(render_call(ADD) * MAX_CALLS).is_malformed
    assert parse_action(render_call(ADD) * (MAX_CALLS + 1)).is_malformed


def test_reading_takes_time_linear_in_the_text() -> None:
    def cpu_s(text: str) -> float:
        began_s = time.process_time()
        parse_action(text)
        return time.process_time() - began_s

    for unit in (
        OPENING,
        OPENING + CLOSING,
        render_call(ADD),
        OPENING + json.dumps({"name": "a", "arguments": {}}),
        "[]",
        '"[',
        '\\"[',
    ):
        assert cpu_s(unit * 20_000) < 1.0, unit


def read_below(depth: int, text: str) -> bool:
    """True if a call is malformed while so many others wait on the stack."""
    return read_below(depth - 1, text) if depth else parse_action(text).is_malformed


WHERE = {
    "in arguments": '{"name": "x", "arguments": {"a": %s}}',
    "beside them": '{"a": [%s], "name": "x", "arguments": {}}',
    "in arguments that others replace": '{"arguments": {"a": %s}, "name": "x", "arguments": {}}',
}


@pytest.mark.parametrize("where", WHERE)
def test_what_a_text_means_does_not_depend_on_who_reads_it(where: str) -> None:
    """A call of 33 levels is read, and one of more nowhere; the interpreter's own bound moves with the stack."""
    lists = {n: "[" * n + "]" * n for n in (*range(1, 40), *range(600, 1100, 50), 2000, 12_000)}
    nested = {n: f"{OPENING}{WHERE[where] % each}{CLOSING}" for n, each in lists.items()}
    found = {n: (read_below(0, text), read_below(300, text)) for n, text in nested.items()}
    assert [n for n, each in found.items() if not any(each)] == list(range(1, 32))
    assert all(here == there for here, there in found.values())


def test_brackets_inside_of_strings_nest_nothing() -> None:
    text = {"a": "[{" * 60, 'b"[\\': '\\"[' * 60, "c": [{}] * 60, "d": ["\u2028]"]}
    call = ToolCall(name="x", arguments=text)
    assert parse_action(render_call(call)).calls == (call,)
    deep = json.dumps({"name": "x", "arguments": {"a": '"]' * 60, "b": json.loads("[" * 32 + "]" * 32)}})
    assert parse_action(f"{OPENING}{deep}{CLOSING}").is_malformed
