"""Traces of verifiers: what goes out comes in again, and what is no one sequence is refused."""

import copy
import json
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from swarm.config import EnvironmentConfig
from swarm.environments.load import build_environment
from swarm.environments.look_up import LookUpEnvironment
from swarm.environments.replay import replay
from swarm.extras.traces.verifiers_trace import from_verifiers_trace, to_verifiers_trace
from swarm.model.tokenizer import CharTokenizer
from swarm.testing.episodes import make_episode_group
from swarm.types import NodeId, PolicyVersion, Sampling, TokenTrace

VERSION = PolicyVersion(policy_id="a", step=3)
CONFIG = EnvironmentConfig(name="get", kind="look_up", params={"style": "char"})


def exported(task_id: int = 3) -> tuple[np.ndarray, TokenTrace, dict[str, Any]]:
    environment = cast(LookUpEnvironment, build_environment(CONFIG))
    actions = environment.demonstration(task_id)
    group = make_episode_group(
        environment, task_id, [actions], CharTokenizer(), NodeId("a"), Sampling(max_new_tokens=8)
    )
    (rollout,) = group.rollouts
    assert rollout.trace is not None
    outcome = replay(environment, task_id, rollout.actions)
    opening = environment.task(task_id).messages
    data = to_verifiers_trace("get", opening, group.prompt_ids, rollout.actions, rollout.trace, outcome)
    return group.prompt_ids, rollout.trace, json.loads(json.dumps(data))


def test_what_goes_out_comes_in_again() -> None:
    prompt_ids, trace, data = exported()
    prompt, read = from_verifiers_trace(data, VERSION)
    assert prompt == prompt_ids.tolist() and read.spans[0].version == VERSION
    for name in ("token_ids", "action_mask", "logprobs", "turn_ids"):
        np.testing.assert_array_equal(getattr(read, name), getattr(trace, name))
    assert [node["message"]["role"] for node in data["nodes"]] == ["user", "assistant"] + ["user", "assistant"] * 2
    assert data["rewards"]["outcome"] == {"score": 1.0, "weight": 1.0} and data["rewards"]["found"]["weight"] == 0.0


def test_the_package_itself_takes_it() -> None:
    library = pytest.importorskip("verifiers.v1")
    prompt_ids, trace, data = exported()
    taken = library.Trace.model_validate(data)
    (branch,) = taken.branches
    assert branch.token_ids == [*prompt_ids.tolist(), *trace.token_ids.tolist()]
    assert branch.sampled_mask == [False] * prompt_ids.size + trace.action_mask.tolist()
    assert taken.reward == 1.0
    prompt, read = from_verifiers_trace(taken.model_dump(mode="json"), VERSION)
    assert prompt == prompt_ids.tolist()
    np.testing.assert_array_equal(read.token_ids, trace.token_ids)
    assert read.logprobs is not None and trace.logprobs is not None
    np.testing.assert_allclose(read.logprobs, trace.logprobs, atol=5e-5)  # it writes four digits


def fork(data: Any) -> None:
    data["nodes"][-1]["parent"] = 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (fork, "several branches"),
        (lambda data: data["nodes"].pop(2), "several branches"),
        (lambda data: data.update(version=2), "version 2"),
        (lambda data: data.update(nodes=[]), "0 turns"),
        (lambda data: data["nodes"][1].pop("mask"), "1 fields differ"),
        (lambda data: data["nodes"][1]["logprobs"].pop(), "lacks tokens or log-probs"),
        (lambda data: data["nodes"][1]["mask"].__setitem__(-1, False), "mask leaves out"),
        (lambda data: data["nodes"][1]["mask"].append(True), "mask leaves out"),
        (lambda data: data["nodes"][0].update(token_ids=[], mask=[]), "0 tokens of a prompt"),
        (lambda data: data["nodes"][1]["token_ids"].__setitem__(0, 2**31), "ids that are none"),
        (lambda data: data["nodes"][1]["logprobs"].__setitem__(0, float("nan")), "log-probs that are none"),
        (lambda data: data.update(nodes=data["nodes"][:1] * 5000), "1 fields differ"),
        (lambda data: data["nodes"][1]["logprobs"].__setitem__(0, -1e39), "log-probs that are none"),
    ],
)
def test_what_is_no_sequence_of_the_model_is_refused(change: Any, words: str) -> None:
    data = copy.deepcopy(exported()[2])
    change(data)
    with pytest.raises(ValueError, match=words):
        from_verifiers_trace(data, VERSION)


def test_what_the_form_cannot_say_does_not_go_out() -> None:
    environment = cast(LookUpEnvironment, build_environment(CONFIG))
    prompt_ids, trace, _ = exported()
    actions = environment.demonstration(3)
    outcome = replay(environment, 3, actions)
    with pytest.raises(ValueError, match="without log-probs"):
        to_verifiers_trace("get", (), prompt_ids, actions, replace(trace, logprobs=None), outcome)
    opening = environment.task(3).messages
    as_stored = replace(outcome, transitions=tuple(replace(each, messages=()) for each in outcome.transitions))
    with pytest.raises(ValueError, match="tokens that the model read are of no message"):
        to_verifiers_trace("get", opening, prompt_ids, actions, trace, as_stored)
    with pytest.raises(ValueError, match="tokens that the model read are of no message"):
        to_verifiers_trace("get", (), prompt_ids, actions, trace, outcome)
    with pytest.raises(ValueError, match="2 transitions are not of one episode"):
        to_verifiers_trace("get", opening, prompt_ids, actions, trace, replay(environment, 3, actions[:2]))
