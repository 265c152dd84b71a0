"""Remote servers that fail, refuse, say less than is needed, or serve something else than they were given."""

import resource
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import PROMPTS, START, canaries_of, full_forward, sharp_network
from model_server import (
    NEXT,
    TOKENIZER,
    Server,
    engine_on,
    newer_of,
    serving,
)

from swarm.config import EngineConfig, ModelConfig, NodeConfig
from swarm.errors import ConfigError, Unavailable, WeightsRefused
from swarm.generation import http_json
from swarm.generation.openai_engine import OpenAIGenerator
from swarm.identity import Identity
from swarm.model.network import load_model
from swarm.model.version_digest import snapshot
from swarm.types import Canary, FinishReason, FloatArray, PolicyVersion, Rollout, Sampling

SHORT = Sampling(max_new_tokens=6)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_json, "FIRST_BACKOFF_S", 0.001)


@pytest.fixture
def vllm() -> Iterator[Server]:
    with serving("vllm") as server:
        yield server


@pytest.fixture
def sglang() -> Iterator[Server]:
    with serving("sglang") as server:
        yield server


def logprobs_of(rollout: Rollout) -> FloatArray | None:
    assert rollout.trace is not None
    return rollout.trace.logprobs


def claimed(rollout: Rollout) -> FloatArray:
    found = logprobs_of(rollout)
    assert found is not None
    return found


def ids_of(rollout: Rollout) -> list[int]:
    assert rollout.trace is not None
    return rollout.trace.token_ids.tolist()


def wrong(dialect: str) -> list[Canary]:
    return canaries_of(sharp_network(11)) if dialect == "sglang" else canaries_of(sharp_network(0))


def test_a_server_that_fails_for_a_while_is_asked_again(vllm: Server, tmp_path: Path) -> None:
    engine = engine_on(vllm, tmp_path)
    expected = engine.generate(PROMPTS, 2, SHORT, [1, 2, 3])
    vllm.failures = [503, 500, 429]
    again = engine.generate(PROMPTS, 2, SHORT, [1, 2, 3])
    assert not vllm.failures
    assert [[ids_of(r) for r in group] for group in again] == [[ids_of(r) for r in group] for group in expected]


def test_a_server_that_goes_on_failing_is_unavailable(vllm: Server, tmp_path: Path) -> None:
    engine = engine_on(vllm, tmp_path)
    vllm.failures = [500] * 1000
    with pytest.raises(Unavailable, match=r"status 500: .*as told"):
        engine.generate(PROMPTS[:1], 1, SHORT)
    with pytest.raises(Unavailable):
        engine.score(PROMPTS)
    vllm.failures = []
    assert len(engine.generate(PROMPTS[:1], 1, SHORT)) == 1


def test_a_server_that_is_gone_is_unavailable(tmp_path: Path) -> None:
    with serving("vllm") as server:
        engine = engine_on(server, tmp_path)
    with pytest.raises(Unavailable, match="refused"):
        engine.generate(PROMPTS[:1], 1, SHORT)


def test_a_request_that_is_refused_is_not_sent_again(vllm: Server, tmp_path: Path) -> None:
    engine = engine_on(vllm, tmp_path)
    vllm.never.add("/v1/completions")
    vllm.seen.clear()
    with pytest.raises(ConfigError, match=r"status 400: .*refused as told"):
        engine.generate(PROMPTS[:1], 1, SHORT)
    assert len(vllm.seen) == 1


def test_a_server_without_token_ids_is_refused_at_the_start(vllm: Server, tmp_path: Path) -> None:
    vllm.lacks.add("token_ids")
    with pytest.raises(ConfigError, match="returns no token ids"):
        engine_on(vllm, tmp_path)


def test_without_logprobs_none_are_claimed(vllm: Server, tmp_path: Path) -> None:
    vllm.lacks.add("logprobs")
    rollout = engine_on(vllm, tmp_path).generate(PROMPTS[:1], 1, SHORT)[0][0]
    assert logprobs_of(rollout) is None and len(ids_of(rollout)) > 0


def test_logprobs_at_another_temperature_are_claimed_only_where_the_server_scales_them(
    vllm: Server, tmp_path: Path
) -> None:
    warm = Sampling(temperature=0.7, max_new_tokens=6)
    rollout = engine_on(vllm, tmp_path / "a").generate(PROMPTS[:1], 1, warm)[0][0]
    with torch.no_grad():
        ids = torch.tensor([[*PROMPTS[0], *ids_of(rollout)]])
        logits = vllm.network(input_ids=ids, use_cache=False).logits[0, len(PROMPTS[0]) - 1 : -1] / 0.7
    picked = torch.log_softmax(logits, -1).gather(-1, ids[0, len(PROMPTS[0]) :, None])[:, 0]
    np.testing.assert_allclose(claimed(rollout), picked.numpy(), atol=1e-4)
    vllm.is_raw = True
    engine = engine_on(vllm, tmp_path / "b")
    assert logprobs_of(engine.generate(PROMPTS[:1], 1, warm)[0][0]) is None
    plain = engine.generate(PROMPTS[:1], 1, SHORT)[0][0]
    expected = full_forward(vllm.network, [*PROMPTS[0], *ids_of(plain)])[len(PROMPTS[0]) :]
    np.testing.assert_allclose(claimed(plain), expected, atol=1e-4)
    assert logprobs_of(engine.generate(PROMPTS[:1], 1, Sampling(top_p=0.5, max_new_tokens=6))[0][0]) is None


def test_every_parameter_of_sampling_is_sent_and_the_prompt_as_ids(vllm: Server, tmp_path: Path) -> None:
    engine = engine_on(vllm, tmp_path)
    vllm.seen.clear()
    engine.generate(PROMPTS[:1], 2, SHORT)
    bodies = [body for path, body in vllm.seen if path == "/v1/completions"]
    assert len({body["seed"] for body in bodies}) == 2 and all(0 <= body["seed"] < 2**63 for body in bodies)
    for body in bodies:
        assert body["prompt"] == PROMPTS[0] and body["n"] == 1 and body["return_token_ids"] is True
        assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 1.0, -1, 0.0)
        assert (body["repetition_penalty"], body["presence_penalty"], body["frequency_penalty"]) == (1.0, 0.0, 0.0)
        assert body["stop_token_ids"] == [TOKENIZER.eos_id] and body["max_tokens"] == 6


def test_every_parameter_of_sampling_is_sent_to_sglang_too(sglang: Server, tmp_path: Path) -> None:
    engine_on(sglang, tmp_path).generate(PROMPTS[:1], 1, SHORT)
    how = sglang.seen[-1][1]["sampling_params"]
    assert (how["temperature"], how["top_p"], how["top_k"], how["min_p"]) == (1.0, 1.0, -1, 0.0)
    assert (how["repetition_penalty"], how["presence_penalty"], how["frequency_penalty"]) == (1.0, 0.0, 0.0)
    assert how["stop_token_ids"] == [TOKENIZER.eos_id] and how["max_new_tokens"] == 6


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "logit_bias", "sampling_params", "weight_dir"])
def test_no_option_changes_what_is_asked_of_the_server(dialect: str, name: str, tmp_path: Path) -> None:
    with serving(dialect) as server:
        config = NodeConfig(dir=tmp_path, engine=EngineConfig(kind="openai", url=server.url, options={name: 0.5}))
        with pytest.raises(ConfigError, match=rf"engine\.options\.{name}: .*api_key_env.*weights_dir"):
            OpenAIGenerator.from_config(config, TOKENIZER, START)
        assert not server.seen


def test_a_key_comes_from_the_environment_and_stands_in_no_message(
    vllm: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.key = "not-for-logs"
    options = {"api_key_env": "MODEL_SERVER_KEY"}
    config = NodeConfig(dir=tmp_path, engine=EngineConfig(kind="openai", url=vllm.url, options=options))
    monkeypatch.delenv("MODEL_SERVER_KEY", raising=False)
    with pytest.raises(ConfigError, match="MODEL_SERVER_KEY"):
        OpenAIGenerator.from_config(config, TOKENIZER, START)
    monkeypatch.setenv("MODEL_SERVER_KEY", "another")
    with pytest.raises(ConfigError, match="401") as caught:
        OpenAIGenerator.from_config(config, TOKENIZER, START)
    assert "another" not in str(caught.value)
    monkeypatch.setenv("MODEL_SERVER_KEY", "not-for-logs")
    engine = OpenAIGenerator.from_config(config, TOKENIZER, START)
    assert len(engine.generate(PROMPTS[:1], 1, SHORT)[0]) == 1


def test_an_adapter_name_is_never_used_twice_and_the_one_before_is_given_back(vllm: Server, tmp_path: Path) -> None:
    newer = newer_of("vllm")
    for folder in (tmp_path / "a", tmp_path / "b"):  # the second engine follows a restart of both processes
        engine = engine_on(vllm, folder)
        with pytest.raises(WeightsRefused, match="canary"):
            engine.load(NEXT, snapshot(newer), canaries=wrong("vllm"))
        assert set(vllm.engines) == {"tiny"} and engine.version == START
        engine.load(NEXT, snapshot(newer), canaries=canaries_of(newer))
        (name,) = set(vllm.engines) - {"tiny"}
        assert [path.name for path in folder.iterdir()] == [name]
        engine.load(START, snapshot(newer))  # the same weights under another name
        assert len(vllm.engines) == 2 and name not in vllm.engines
        vllm.engines = {"tiny": vllm.engines["tiny"]}
        with pytest.raises(Unavailable, match="lost an adapter"):
            engine.generate(PROMPTS[:1], 1, SHORT)
    names = [body["lora_name"] for path, body in vllm.seen if path == "/v1/load_lora_adapter"]
    assert len(names) == len(set(names)) == 6


def test_adapters_only_fit_where_adapters_are_carried(vllm: Server, tmp_path: Path) -> None:
    engine = engine_on(vllm, tmp_path)
    with pytest.raises(ConfigError, match="lora_rank"):
        engine.load(NEXT, snapshot(sharp_network(7)))
    vllm.never.add("/v1/load_lora_adapter")
    with pytest.raises(WeightsRefused, match="refused as told"):
        engine.load(NEXT, snapshot(newer_of("vllm")))
    assert engine.version == START and not list(tmp_path.iterdir())


def test_refused_weights_leave_the_server_with_those_before(sglang: Server, tmp_path: Path) -> None:
    engine = engine_on(sglang, tmp_path)
    newer = sharp_network(7)
    engine.load(NEXT, snapshot(newer), canaries=canaries_of(newer))
    kept = sglang.weight_version
    later = PolicyVersion(policy_id="a", step=6)
    with pytest.raises(WeightsRefused, match="canary"):
        engine.load(later, snapshot(sharp_network(8)), canaries=wrong("sglang"))
    assert sglang.weight_version == kept and engine.version == NEXT
    assert [path.name for path in tmp_path.iterdir()] == [kept]  # no folder is left of what is not served
    rollout = engine.generate(PROMPTS[:1], 1, SHORT)[0][0]
    expected = full_forward(newer, [*PROMPTS[0], *ids_of(rollout)])[len(PROMPTS[0]) :]
    np.testing.assert_allclose(claimed(rollout), expected, atol=1e-4)


def test_a_server_that_does_not_go_back_generates_nothing_until_it_takes_a_version(
    sglang: Server, tmp_path: Path
) -> None:
    engine = engine_on(sglang, tmp_path)
    newer = sharp_network(7)
    sglang.never.add("/update_weights_from_disk")
    with pytest.raises(WeightsRefused):
        engine.load(NEXT, snapshot(newer))
    assert engine.version == START
    with pytest.raises(Unavailable, match="other weights"):
        engine.generate(PROMPTS[:1], 1, SHORT)
    assert len(list(tmp_path.iterdir())) == 1  # what it is to go back to
    sglang.never.clear()
    engine.load(NEXT, snapshot(newer), canaries=canaries_of(newer))
    assert engine.generate(PROMPTS[:1], 1, SHORT)[0][0].finish is not FinishReason.ABORTED


def test_whatever_fails_while_the_server_takes_weights_nobody_generates_with_unknown_ones(
    sglang: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(sglang, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(http_json, "MAX_REPLY_BYTES", 1)  # the server has loaded them, and its answer is not read
        with pytest.raises(WeightsRefused):
            engine.load(NEXT, snapshot(sharp_network(7)))
    with pytest.raises(Unavailable, match="other weights"):
        engine.generate(PROMPTS[:1], 1, SHORT)


def test_weights_that_somebody_else_gave_the_server_are_noticed(sglang: Server, tmp_path: Path) -> None:
    engine = engine_on(sglang, tmp_path)
    assert sglang.weight_version != "default"  # it was given the run's base first
    engine.generate(PROMPTS[:1], 1, SHORT)
    sglang.weight_version = "default"
    with pytest.raises(Unavailable, match="restarted"):
        engine.generate(PROMPTS[:1], 1, SHORT)
    with pytest.raises(Unavailable, match="restarted"):
        engine.score(PROMPTS)


@contextmanager
def full_disk() -> Generator[None]:
    """No file of this process may become larger than 2 KiB, which fails as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_full_disk_refuses_a_version_and_leaves_nothing_of_it(dialect: str, tmp_path: Path) -> None:
    with serving(dialect) as server:
        engine, newer = engine_on(server, tmp_path), snapshot(newer_of(dialect))
        left = set(tmp_path.iterdir())
        with full_disk(), pytest.raises(WeightsRefused, match="safetensors"):
            engine.load(NEXT, newer)
        assert set(tmp_path.iterdir()) == left and engine.version == START
        engine.generate(PROMPTS[:1], 1, SHORT)
        engine.load(NEXT, newer)
        assert engine.version == NEXT


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_an_engine_that_starts_again_deletes_what_the_one_before_left(dialect: str, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with serving(dialect) as server:
        for _ in range(2):
            engine_on(server, tmp_path).load(NEXT, snapshot(newer_of(dialect)))
            assert len(list(tmp_path.iterdir())) == 2 and (tmp_path / "notes").is_dir()


def test_a_node_starts_on_a_server_and_gives_it_the_base_of_the_run(tmp_path: Path) -> None:
    shipped = load_model(ModelConfig(source="tiny", dtype="float32")).network
    options = {"weights": "sglang_disk", "weights_dir": str(tmp_path / "shared")}
    identity = Identity.create()
    identity.save(tmp_path / "identity.key")
    with serving("sglang", sharp_network(0)) as server:
        config = NodeConfig(
            dir=tmp_path,
            model=ModelConfig(source="tiny", dtype="float32"),
            engine=EngineConfig(kind="openai", url=server.url, options=options),
        )
        engine = OpenAIGenerator.from_config(config, TOKENIZER, START)
        np.testing.assert_allclose(engine.score(PROMPTS[2:])[0][1:], full_forward(shipped, PROMPTS[2])[1:], atol=1e-4)
        engine.generate(PROMPTS[:1], 1, SHORT)
        assert [path.name for path in (tmp_path / "shared").iterdir()] == [identity.node_id]
        assert not options.keys() & server.seen[-1][1].keys()
        engine.close()
        for url, changed, message in (
            (server.url, {"weights": "vllm_lora"}, "use sglang_disk"),
            (server.url, {"weights": "by_post"}, "by_post"),
            (server.url, {"model": "other"}, "the server at .* has"),
            ("ftp://x", {}, "engine.url"),
            ("", {}, "engine.url"),
        ):
            given = config.model_copy(update={"engine": EngineConfig(kind="openai", url=url, options=changed)})
            with pytest.raises(ConfigError, match=message):
                OpenAIGenerator.from_config(given, TOKENIZER, START)
        plain = config.model_copy(update={"engine": EngineConfig(kind="openai", url=server.url)})
        with pytest.raises(ConfigError, match="sglang_disk or vllm_lora"):
            OpenAIGenerator.from_config(plain, TOKENIZER, START).load(NEXT, snapshot(shipped))
