"""Events as JSON: every kind is read back as it was, and nothing that is read can stop a reader."""

import dataclasses
import json
import math
from typing import Any

import pytest
from logged_events import example

from swarm.events import (
    KINDS,
    GroupRefused,
    NodeFinished,
    PolicyEvaluated,
    UnknownEvent,
    from_json,
    kind_of,
    to_json,
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_back_as_it_was_written(kind: str) -> None:
    event = example(KINDS[kind])
    data = json.loads(json.dumps(to_json(event), allow_nan=False))
    assert list(data)[:2] == ["kind", "at_s"] and data["kind"] == kind_of(event) == kind
    assert from_json(data) == event


def test_a_figure_that_is_not_finite_is_null_in_the_file_and_nan_after_it() -> None:
    event = example(PolicyEvaluated)
    data = json.loads(json.dumps(to_json(dataclasses.replace(event, accuracy=math.inf)), allow_nan=False))
    assert data["accuracy"] is None
    read = from_json(data)
    assert isinstance(read, PolicyEvaluated) and math.isnan(read.accuracy)


def test_what_a_newer_release_adds_is_dropped_and_what_it_invents_is_kept_as_it_is() -> None:
    assert from_json({"kind": "finished", "at_s": 1.0, "step": 3, "mood": "new"}) == NodeFinished(at_s=1.0, step=3)
    data = {"kind": "danced", "at_s": 1.0, "steps": [1, 2]}
    assert from_json(data) == UnknownEvent(kind="danced", at_s=1.0, fields={"steps": [1, 2]})
    assert to_json(from_json(data)) == data


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"kind": "finished"},
        {"kind": "draw", "draw_step": 1, "groups": [3], "max_age_steps": 1, "max_reuse": 1},
        {"kind": "restored", "held": [["d"]]},
        {"kind": "step", "seconds": 3},
    ],
)
def test_a_damaged_event_is_unknown_and_stops_nobody(data: dict[str, Any]) -> None:
    assert isinstance(from_json(data), UnknownEvent)


def test_a_refusal_counts_once_unless_it_says_more() -> None:
    assert from_json({"kind": "refused", "reason": "too_old"}) == GroupRefused(reason="too_old")
