"""Samples of a Tinker server that nodes make: theirs where they hold the exact weights, its own where nobody does."""

import asyncio
import copy
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from waits import HANG_S

from node.pause import PAUSED
from swarm.clock import ManualClock
from swarm.config import NodeConfig
from swarm.errors import ConfigError
from swarm.extras.tinker import tinker_samplers
from swarm.extras.tinker.adapter_training import AdapterShape, adapted
from swarm.extras.tinker.tinker_node import Publish, TinkerNode
from swarm.extras.tinker.tinker_nodes import FOLLOW_WAIT_S, FORGET_S, SamplingNodes, read_nodes
from swarm.extras.tinker.tinker_requests import SampleRequest
from swarm.extras.tinker.tinker_samplers import Sampler, Samplers
from swarm.extras.tinker.v1 import tinker_pb2 as wire
from swarm.generation.http_json import JsonClient
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.model.lora import merge_adapters
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import snapshot, weights_digest
from swarm.process import write_json
from swarm.serving.openai_requests import RequestRefused
from swarm.serving.served_policy import serve
from swarm.trained.model import TrainedModel
from swarm.types import PolicyVersion

KEY = "a-key-of-a-node-1"


def version_of(network: nn.Module, step: int = 1) -> PolicyVersion:
    return PolicyVersion(policy_id="trainer", step=step, digest=weights_digest(snapshot(network)))


class ServedNode:
    """A node's engine behind its HTTP interface."""

    def __init__(self, network: nn.Module, step: int = 1, port: int = 0) -> None:
        tokenizer = CharTokenizer()
        self.engine = TransformersGenerator(copy.deepcopy(network), tokenizer, version_of(network, step), seed=0)
        self.server, self.url = serve(
            self.engine,
            tokenizer,
            name="node",
            source="tiny",
            context_tokens=128,
            listen=f"127.0.0.1:{port}",
            key=KEY,
        )

    def end(self) -> None:
        self.server.stop()
        self.engine.close()


@pytest.fixture
def network() -> nn.Module:
    return tiny_network(seed=3)


@pytest.fixture
def other() -> nn.Module:
    return tiny_network(seed=4)


@pytest.fixture
def served(network: nn.Module) -> Iterator[list[ServedNode]]:
    nodes = [ServedNode(network), ServedNode(network)]
    yield nodes
    for node in nodes:
        node.end()


def samplers_of(network: nn.Module, urls: list[str], clock: ManualClock) -> tuple[Samplers, Sampler]:
    made = Samplers(CharTokenizer(), 128, 8, SamplingNodes([(url, KEY) for url in urls], clock))
    version = version_of(network)
    sampler = Sampler(
        sampler_id="s",
        session_id="session",
        network=network,
        version=version,
        published=version,
        base_model="tiny",
        model_path=None,
        num_bytes=0,
    )
    made.add(sampler)
    return made, sampler


def request(**changes: Any) -> SampleRequest:
    plain = {
        "sampling_session_id": "s",
        "seq_id": 0,
        "num_samples": 4,
        "prompt": {"chunks": [{"tokens": [3, 4, 5]}]},
        "sampling_params": {"max_tokens": 8, "seed": 5},
    }
    return SampleRequest.model_validate({**plain, **changes})


def read(reply: bytes) -> list[tuple[list[int], list[float]]]:
    sequences = wire.TinkerSampleReply.FromString(reply).sequences
    return [
        (np.frombuffer(each.token_ids, "<i4").tolist(), np.frombuffer(each.logprobs, "<f4").tolist())
        for each in sequences
    ]


async def test_nodes_take_turns_and_their_samples_are_those_that_the_server_would_make(
    network: nn.Module, served: list[ServedNode]
) -> None:
    made, sampler = samplers_of(network, [node.url for node in served], ManualClock())
    assert made.nodes is not None
    asked = request(sampling_params={"max_tokens": 8, "seed": 5, "stop": ["a"]}, topk_sample_logprobs=2)
    theirs = [read(await made.sample(sampler, asked)) for _ in range(4)]
    assert sorted(made.nodes.num_answers.values()) == [8, 8] and made.num_made_here == 0
    sampler.published = None  # nobody follows: the server makes them
    own = read(await made.sample(sampler, asked))
    assert made.num_made_here == 4
    for answers in theirs:
        assert [ids for ids, _ in answers] == [ids for ids, _ in own]
        for (_, found), (_, expected) in zip(answers, own, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)
    made.close()


async def test_more_samples_than_a_node_takes_at_once_are_asked_for_in_parts(
    network: nn.Module, served: list[ServedNode]
) -> None:
    made, sampler = samplers_of(network, [node.url for node in served], ManualClock())
    params = {"max_tokens": 2, "seed": 5}
    theirs = read(await made.sample(sampler, request(num_samples=70, sampling_params=params)))
    assert made.nodes is not None and sorted(made.nodes.num_answers.values()) == [6, 64]
    sampler.published = None
    own = read(await made.sample(sampler, request(num_samples=70, sampling_params=params)))
    assert [ids for ids, _ in theirs] == [ids for ids, _ in own] and len({tuple(ids) for ids, _ in own}) > 20
    made.close()


async def test_a_node_with_other_weights_is_never_believed(network: nn.Module, other: nn.Module) -> None:
    nodes = [ServedNode(other), ServedNode(other, step=1)]
    made, sampler = samplers_of(network, [node.url for node in nodes], ManualClock())
    await made.sample(sampler, request())
    assert made.num_made_here == 4, "same policy and step, other weights"
    assert made.nodes is not None
    # one that says it has them, and then answers with others: its weights changed in between
    nodes[0].engine.load(version_of(network), snapshot(network))
    await made.nodes._ask(made.nodes._nodes[0])
    nodes[0].engine.load(version_of(other), snapshot(other))
    assert made.nodes._nodes[0].digest == version_of(network).digest.hex()
    await made.sample(sampler, request())
    assert made.num_made_here == 8 and set(made.nodes.num_answers.values()) == {0}
    made.close()
    for node in nodes:
        node.end()


async def test_nodes_have_a_while_to_take_what_was_published(network: nn.Module, other: nn.Module) -> None:
    node, clock = ServedNode(other, step=0), ManualClock()
    made, sampler = samplers_of(network, [node.url], clock)
    assert made.nodes is not None and sampler.published is not None
    made.nodes.note_published(sampler.published)
    asked = asyncio.create_task(made.sample(sampler, request()))
    await asyncio.sleep(0.3)
    assert not asked.done()
    await asyncio.to_thread(node.engine.load, version_of(network), snapshot(network))
    assert len(read(await asked)) == 4 and made.num_made_here == 0
    node.engine.load(version_of(other, 2), snapshot(other))  # it goes on: the older weights are the server's to sample
    clock.advance(FOLLOW_WAIT_S)
    await made.sample(sampler, request())
    assert made.num_made_here == 4
    made.close()
    node.end()


async def test_who_is_gone_costs_no_sample_and_comes_back(network: nn.Module) -> None:
    clock, nodes = ManualClock(), [ServedNode(network), ServedNode(network)]
    made, sampler = samplers_of(network, [node.url for node in nodes], clock)
    nodes[0].end()
    for _ in range(2):
        await made.sample(sampler, request())
    assert made.nodes is not None
    assert list(made.nodes.num_answers.values()) == [0, 8] and made.num_made_here == 0
    nodes[1].end()
    await made.sample(sampler, request())
    assert made.num_made_here == 4
    port = int(nodes[0].url.removesuffix("/v1").rpartition(":")[2])
    nodes[0] = ServedNode(network, port=port)
    await made.sample(sampler, request())
    assert made.num_made_here == 8, "it is not asked again at once"
    clock.advance(FORGET_S)
    await made.sample(sampler, request())
    assert made.num_made_here == 8 and list(made.nodes.num_answers.values()) == [4, 8]
    made.close()
    nodes[0].end()


async def test_all_requests_of_a_client_are_with_the_nodes_at_once(
    network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, version = 64, version_of(network)
    all_there = threading.Barrier(count, timeout=HANG_S)

    def call(_: JsonClient, method: str, path: str, body: object = None, *, attempts: int) -> Any:
        digest = version.digest.hex()
        if method == "GET":
            return {"data": [{"policy_version": {"digest": digest}}]}
        all_there.wait()
        tokens = {"token_ids": [3], "logprobs": {"content": [{"logprob": -1.0, "top_logprobs": []}]}}
        return {"choices": [{**tokens, "finish_reason": "length", "policy_versions": [{"digest": digest}]}]}

    monkeypatch.setattr(JsonClient, "call", call)
    nodes = SamplingNodes([("http://127.0.0.1:1/v1", KEY)], ManualClock())
    answers = await asyncio.gather(*(nodes.sample(version, {}, 1) for _ in range(count)))
    assert all(each is not None and each[0].token_ids == [3] for each in answers)
    nodes.close()


async def test_the_end_waits_for_no_node(network: nn.Module) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nodes = SamplingNodes([(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", KEY)], ManualClock())
        asked = asyncio.create_task(nodes.sample(version_of(network), {}, 1))
        connection, _ = await asyncio.to_thread(silent.accept)
        nodes.close()
        assert await asked is None
        connection.close()


async def test_a_sampler_that_is_asked_for_again_takes_the_place_of_the_first(network: nn.Module) -> None:
    made, sampler = samplers_of(network, [], ManualClock())
    sampler.published = None
    await made.sample(sampler, request(num_samples=1))
    assert sampler.engine is not None
    ended = asyncio.Event()
    loop, close = asyncio.get_running_loop(), sampler.engine.close
    sampler.engine.close = lambda: (close(), loop.call_soon_threadsafe(ended.set))[0]
    made.add(replace_id(sampler, "s"))
    await ended.wait()
    assert made.get("s") is not sampler
    made.close()


async def test_the_sampler_that_was_not_used_for_longest_makes_room(
    network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sampler = samplers_of(network, [], ManualClock())
    sampler.published = None
    await made.sample(sampler, request(num_samples=1))
    monkeypatch.setattr(tinker_samplers, "MAX_SAMPLERS", 2)
    made.add(replace_id(sampler, "t"))
    assert made.get("s") is sampler
    made.add(replace_id(sampler, "u"))
    with pytest.raises(RequestRefused, match="'t' is unknown, its session ended, or it made room"):
        made.get("t")
    monkeypatch.setattr(tinker_samplers, "MAX_ADAPTER_BYTES", 10)
    heavy = replace_id(sampler, "v")
    heavy.num_bytes = 11
    made.add(heavy)
    assert made.get("v") is heavy, "the newest stays, however large"
    with pytest.raises(RequestRefused):
        made.get("s")
    made.close()


def replace_id(sampler: Sampler, sampler_id: str) -> Sampler:
    return Sampler(
        sampler_id=sampler_id,
        session_id=sampler.session_id,
        network=sampler.network,
        version=sampler.version,
        published=None,
        base_model=sampler.base_model,
        model_path=None,
        num_bytes=0,
    )


def test_a_file_of_nodes_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "samplers.txt"
    path.write_text("# ours\nhttp://127.0.0.1:1/v1 key-1\n\nhttps://a.example:2 key-2 # far away\n")
    assert read_nodes(path) == [("http://127.0.0.1:1/v1", "key-1"), ("https://a.example:2", "key-2")]
    for text, needle in (("", "no node in it"), ("http://a\n", "line 1 is not"), ("ftp://a key\n", "line 1 is not")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=needle):
            read_nodes(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_nodes(tmp_path / "missing")


async def test_what_is_saved_becomes_a_version_of_the_node_and_equal_weights_are_one_version(tmp_path: Path) -> None:
    config = NodeConfig.model_validate(
        {
            "dir": tmp_path / "node",
            "roles": ["trainer"],
            "environments": [{"name": "sort", "kind": "char", "dataset": "sort"}],
            "model": {"source": "tiny", "dtype": "float32"},
            "weights": {"publish": True},
            "directory": {"kind": "none"},
        }
    )
    started: asyncio.Queue[tuple[TrainedModel, Publish]] = asyncio.Queue()
    ended: list[str] = []
    loop = asyncio.get_running_loop()
    config.dir.mkdir()
    write_json(config.dir / PAUSED, {"since_s": 1.0})

    def start(model: TrainedModel, publish: Publish) -> str:
        assert not node.agent.is_paused, "it loads no model while it is paused"
        loop.call_soon_threadsafe(started.put_nowait, (model, publish))
        return "serving"

    async with TinkerNode(config, start, ended.append) as node:
        running = asyncio.create_task(node.run())
        assert node.agent.is_paused
        (config.dir / PAUSED).unlink()
        model, publish = await started.get()
        network = adapted(model.network, AdapterShape(rank=2, alpha=4.0, seed=0, has_attention=True, has_mlp=True))
        with torch.no_grad():
            for name, factor in network.named_parameters():
                factor += 0.01 if name.endswith("lora_b") else 0.0
        adapter = snapshot(network)
        first, second, again, back = [await publish(each, 2.0) for each in ({}, adapter, adapter, {})]
        assert first is not None and second is not None and back is not None
        assert first.digest == model.base_digest == back.digest and (first.step, back.step) == (0, 2)
        merge_adapters(network)
        assert second == again and second.digest == weights_digest(snapshot(network)) and second.step == 1
        assert second.policy_id == node.agent.node_id and node.agent.weight_server.head_step(node.agent.node_id) == 2
        assert node.agent.local.capacity() == 0, "nobody gets credit to generate groups"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert ended == ["serving"]
