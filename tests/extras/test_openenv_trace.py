"""OpenEnv's training traces: what goes out comes in again, and what is no one sequence is refused."""

import copy
import json
import sys
from dataclasses import replace
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from swarm.config import EnvironmentConfig
from swarm.environments.load import build_environment
from swarm.errors import ConfigError
from swarm.extras.traces.openenv_trace import from_training_trace, to_training_trace
from swarm.model.tokenizer import CharTokenizer
from swarm.testing.episodes import make_episode_group
from swarm.types import NodeId, PolicyVersion, Sampling, TokenTrace, VersionSpan

VERSION = PolicyVersion(policy_id="a", step=3)
ONE = (0, 0, 0)  # conversation of each action


def played() -> tuple[np.ndarray, TokenTrace]:
    environment = build_environment(EnvironmentConfig(name="get", kind="look_up", params={"style": "char"}))
    actions = environment.demonstration(3)  # type: ignore[attr-defined]
    group = make_episode_group(environment, 3, [actions], CharTokenizer(), NodeId("a"), Sampling(max_new_tokens=8))
    trace = group.rollouts[0].trace
    assert trace is not None and trace.turn_ids[-1] == 2
    return group.prompt_ids, trace


def test_what_goes_out_comes_in_again() -> None:
    prompt_ids, trace = played()
    data = json.loads(json.dumps(to_training_trace(prompt_ids, trace, ONE)))
    prompt, read = from_training_trace(data, VERSION)
    assert prompt == prompt_ids.tolist() and read.spans[0].version == VERSION
    for name in ("token_ids", "action_mask", "logprobs", "turn_ids"):
        np.testing.assert_array_equal(getattr(read, name), getattr(trace, name))


def package() -> Any:
    """The module of the installed package with its traces; its parents would load a web server and Gradio."""
    try:
        file = metadata.distribution("openenv").locate_file("openenv/core/harness/training.py")
    except metadata.PackageNotFoundError:
        pytest.skip("needs openenv==0.10.0; .ci/run has an environment with it")
    parent = ModuleType("openenv_harness")
    parent.__path__ = [str(Path(str(file)).parent)]
    sys.modules[parent.__name__] = parent
    return import_module("openenv_harness.training")


def test_the_package_itself_takes_it() -> None:
    training = package()
    data = to_training_trace(*played(), ONE)
    taken = training.TrainingTrace.model_validate(data)
    assert len(taken.turns) == 3
    _, read = from_training_trace(taken.model_dump(mode="json"), VERSION)
    np.testing.assert_array_equal(read.token_ids, played()[1].token_ids)


def test_an_environment_of_the_package_is_refused_by_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package()
    folder = Path(str(metadata.distribution("openenv").locate_file("openenv")))
    for name in ("openenv", "openenv.core", "openenv.core.env_server"):  # themselves they need fastmcp
        parent = ModuleType(name)
        parent.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, parent)
    code = "from openenv.core.env_server.interfaces import Environment\nclass Echo(Environment): ...\n"
    (tmp_path / "echo.py").write_text(code)
    with pytest.raises(ConfigError, match=r"Echo is an Environment of OpenEnv"):
        build_environment(EnvironmentConfig(name="echo", kind="plugin", dataset=f"{tmp_path / 'echo.py'}:Echo"))


def rendered_again(data: Any) -> None:
    data["turns"][1]["prompt_token_ids"][len(data["turns"][0]["prompt_token_ids"])] += 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rendered_again, "does not begin with"),
        (lambda data: data["turns"].pop(0) and data["turns"].append(data["turns"][0]), "does not begin with"),
        (lambda data: data.update(schema_version=2), "version 2"),
        (lambda data: data.update(turns=[]), "0 turns"),
        (lambda data: data["turns"][0].pop("loss_mask"), "1 fields differ"),
        (lambda data: data["turns"][0]["per_token_logps"].pop(), "lacks tokens or log-probs"),
        (lambda data: data["turns"][0]["loss_mask"].__setitem__(-1, 0), "mask leaves out"),
        (lambda data: data["turns"][-1]["completion_token_ids"].__setitem__(0, -1), "ids that are none"),
        (lambda data: data["turns"][0]["per_token_logps"].__setitem__(0, float("nan")), "log-probs that are none"),
        (lambda data: data["turns"][0]["per_token_logps"].__setitem__(0, -1e39), "log-probs that are none"),
        (lambda data: data["turns"][0]["per_token_logps"].__setitem__(0, 0.01), "log-probs that are none"),
    ],
)
def test_what_is_no_sequence_of_the_model_is_refused(change: Any, words: str) -> None:
    data = copy.deepcopy(to_training_trace(*played(), ONE))
    change(data)
    with pytest.raises(ValueError, match=words):
        from_training_trace(data, VERSION)


def test_an_episode_without_log_probs_does_not_go_out() -> None:
    prompt_ids, trace = played()
    with pytest.raises(ValueError, match="without log-probs"):
        to_training_trace(prompt_ids, replace(trace, logprobs=None), ONE)


def test_what_that_form_cannot_say_does_not_go_out() -> None:
    prompt_ids, trace = played()
    with pytest.raises(ValueError, match="2 conversations"):
        to_training_trace(prompt_ids, trace, (0, 1, 0))
    spans = (*trace.spans, VersionSpan(start=3, version=VERSION))
    with pytest.raises(ValueError, match="2 policy versions"):
        to_training_trace(prompt_ids, replace(trace, spans=spans), ONE)


def test_a_log_prob_that_is_rounded_above_0_is_0() -> None:
    data = to_training_trace(*played(), ONE)
    data["turns"][0]["per_token_logps"][0] = 1e-7
    _, read = from_training_trace(data, VERSION)
    assert read.logprobs is not None and read.logprobs[0] == 0.0
