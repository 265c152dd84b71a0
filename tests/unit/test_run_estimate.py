"""Arithmetic of memory and bytes against real networks, real groups, and what workers were measured to take."""

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from node.expectations import measure
from node.run_estimate import (
    Lengths,
    ModelShape,
    estimate_memory,
    group_bytes,
    lengths_of,
    pass_tokens,
    patch_bytes,
    read_shape,
    version_bytes,
)
from swarm.config import EnvironmentConfig, ModelConfig, NodeConfig
from swarm.generation.kv_entries import prefill
from swarm.model.lora import add_adapters, is_adapter_name
from swarm.model.network import tiny_network
from swarm.model.source import TINY_SHAPE, model_folder
from swarm.model.tokenizer import ALPHABET, CharTokenizer
from swarm.testing.builders import make_group, make_sealed
from swarm.types import Sampling
from swarm.wire.envelopes import sealed_to_bytes

SMALL = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
MIB = 2**20


def network_of(kind: str, **changes: Any) -> tuple[nn.Module, ModelShape]:
    from transformers import AutoConfig, AutoModelForCausalLM

    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **changes))
    shape = ModelShape.of({"model_type": kind, **SMALL, **changes})
    assert shape is not None
    return network.eval(), shape


def num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("mistral", {"head_dim": 16, "tie_word_embeddings": False}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 12, "tie_word_embeddings": False}),
        ("smollm3", {"tie_word_embeddings": True, "pad_token_id": 0}),
    ],
)
def test_parameters_and_adapters_are_those_of_the_real_network(kind: str, changes: dict[str, Any]) -> None:
    network, shape = network_of(kind, **changes)
    assert shape.num_parameters == num_parameters(network)
    add_adapters(network, 4, targets=("q_proj", "down_proj"))
    adapters = [parameter for name, parameter in network.named_parameters() if is_adapter_name(name)]
    assert shape.num_adapter_parameters(4, ("q_proj", "down_proj")) == sum(each.numel() for each in adapters)


def test_the_models_that_ship_have_as_many_parameters_as_their_files() -> None:
    tiny, small = read_shape(ModelConfig(source="tiny")), read_shape(ModelConfig(source="smollm2"))
    assert tiny is not None and tiny.num_parameters == num_parameters(tiny_network())
    with (model_folder("smollm2") / "model.safetensors").open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    counts = [int(np.prod(each["shape"])) for name, each in header.items() if name != "__metadata__"]
    assert small is not None and small.num_parameters == sum(counts) == 134_515_008


@pytest.mark.parametrize("settings", [{"model_type": "gpt2"}, {"model_type": "llama"}, {**SMALL, "model_type": "moe"}])
def test_another_architecture_is_not_guessed(settings: dict[str, Any]) -> None:
    assert ModelShape.of(settings) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "tiny"])
def test_activations_are_what_autograd_keeps(kind: str, dtype: torch.dtype) -> None:
    network, shape = network_of(kind) if kind != "tiny" else (tiny_network(), ModelShape.of(TINY_SHAPE))
    assert shape is not None
    network = network.to(dtype)
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, int] = {}
    ids = torch.randint(shape.vocab_size, (4, 16))
    mask = torch.zeros(4, 1, 16, 16, dtype=dtype)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = network.base_model(input_ids=ids, attention_mask=mask, use_cache=False)  # pyright: ignore[reportCallIssue]
    assert hidden is not None
    estimate = ids.numel() * shape.activation_bytes(dtype.itemsize)
    assert estimate == pytest.approx(sum(kept.values()), rel=0.1)


def test_the_cache_is_as_large_as_the_engines() -> None:
    shape = ModelShape.of(TINY_SHAPE)
    assert shape is not None
    entries, _ = prefill(tiny_network(), [[3] * 7, [4] * 7])
    assert entries.size_bytes == 14 * shape.cache_bytes(4)


def node(**changes: Any) -> NodeConfig:
    return NodeConfig.model_validate({"replay": {"local_groups": 4, "external_groups": 0}, **changes})


# Highest VmHWM of a worker process, MiB, of deploy/configs/node.toml and laptop.toml on a CPU; docs/operating.md
TAKEN = {
    "all weights": (4425, {"generator": {"max_new_tokens": 6}}),
    "long answers": (4959, {"generator": {"max_new_tokens": 64}}),
    "adapters": (1883, {"generator": {"max_new_tokens": 6}, "model": {"lora_rank": 16}}),
    "tiny": (463, {"generator": {"max_new_tokens": 9}, "model": {"source": "tiny", "dtype": "float32"}}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_memory_is_within_a_quarter_of_what_workers_took(name: str) -> None:
    taken, changes = TAKEN[name]
    config = node(**changes)
    shape = read_shape(config.model)
    assert shape is not None
    memory = estimate_memory(config, shape, lengths_of(config, 48, has_turns=False))
    assert memory.peak / MIB == pytest.approx(taken, rel=0.25)
    assert memory.held < memory.peak


def test_a_gpu_holds_the_models_and_the_host_what_passes_through() -> None:
    config = node(**TAKEN["tiny"][1])
    shape = ModelShape.of(TINY_SHAPE)
    assert shape is not None
    memory = estimate_memory(config, shape, lengths_of(config, 9, has_turns=False))
    held = memory.held - memory.process
    assert held + memory.engine_weights < memory.device_peak, "the step itself takes nothing"
    assert memory.beside_device == memory.process + memory.checkpoint < memory.peak


def test_a_pass_is_a_step_up_to_the_budget_and_never_less_than_an_answer() -> None:
    config, lengths = node(), Lengths(prompt=48, response=8)
    assert pass_tokens(config, lengths) == 4 * (48 + 8 * 8)
    assert pass_tokens(node(learner={"token_budget": 100}), lengths) == 100
    assert pass_tokens(node(learner={"token_budget": 10}), lengths) == 56


def test_what_a_node_does_not_do_takes_no_memory() -> None:
    shape = ModelShape.of(TINY_SHAPE)
    assert shape is not None
    generator = node(roles=["generator"], model={"source": "tiny"})
    idle = estimate_memory(generator, shape, lengths_of(generator, 9, has_turns=False))
    assert idle.masters == idle.moments == idle.gradients == idle.activations == idle.checkpoint == 0 < idle.kv_cache
    trainer = node(roles=["trainer"], model={"source": "tiny"}, weights={"publish": True})
    lengths = lengths_of(trainer, 9, has_turns=False)
    learned = estimate_memory(trainer, shape, lengths)
    assert learned.checkpoint == learned.masters + learned.moments == 12 * shape.num_parameters
    assert learned.kv_cache == learned.engine_weights == 0 and learned.masters == 4 * shape.num_parameters
    saving = node(roles=["trainer"], weights={"publish": True}, learner={"gradient_checkpointing": True})
    assert estimate_memory(saving, shape, lengths).activations < learned.activations
    assert estimate_memory(trainer, shape, lengths, has_reference=True).reference == learned.weights
    assert lengths_of(trainer, 9, has_turns=True).response == 128, "the context of the tiny model"


def test_agents_that_call_a_served_policy_may_fill_all_rows_with_long_episodes() -> None:
    shape, key = ModelShape.of(TINY_SHAPE), {"name": "agents", "learn": True}
    assert shape is not None
    served = node(
        model={"source": "tiny", "dtype": "float32"},
        serve={"listen": "127.0.0.1:8300", "keys": [key]},
        engine={"max_rows": 5},
    )
    memory = estimate_memory(served, shape, lengths_of(served, 9, served.may_have_turns))
    assert served.may_have_turns and memory.kv_cache == 5 * (9 + 128) * shape.cache_bytes(4)


def test_a_group_is_no_larger_than_said_and_not_by_far_smaller() -> None:
    source, config = random.Random(0), node(generator={"max_new_tokens": 60})
    texts = ["".join(source.choice(ALPHABET) for _ in range(60)) for _ in range(8)]
    group = make_group(texts=texts, tokenizer=CharTokenizer(), env="sort", sampling=Sampling(max_new_tokens=60))
    rollouts = []
    for rollout in group.rollouts:
        assert rollout.trace is not None
        drawn = np.array([-source.expovariate(1.0) for _ in rollout.trace.token_ids], np.float32)
        rollouts.append(replace(rollout, trace=replace(rollout.trace, logprobs=drawn)))
    size = len(sealed_to_bytes(make_sealed(replace(group, rollouts=tuple(rollouts)))))
    said = group_bytes(config, Lengths(prompt=len(group.prompt_ids), response=61), 47)
    assert 0.6 * said < size <= said


@pytest.mark.parametrize(("rate", "measured_bytes"), [(1e-6, 0.433e6), (3e-6, 269e6 / 363), (1e-5, 1.35e6)])
def test_a_patch_is_about_as_large_as_those_that_were_measured(rate: float, measured_bytes: float) -> None:
    config = node(learner={"learning_rate": rate})
    shape = read_shape(config.model)
    assert shape is not None and version_bytes(config, shape) == 2 * 134_515_008
    assert patch_bytes(config, shape) == pytest.approx(measured_bytes, rel=0.1)
    assert patch_bytes(node(model={"dtype": "float32"}), shape) is None


def test_a_measurement_makes_real_steps_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environment = EnvironmentConfig(name="sort", kind="char", dataset="sort")
    config = node(worker="inline", environments=[environment], model={"source": "tiny", "dtype": "float32"})
    measured = asyncio.run(measure(config))
    assert measured.num_groups == 4 and measured.generate_s > 0 and measured.learn_s > 0 and measured.num_tokens >= 4
    assert measured.peak_bytes == 0 and not list(tmp_path.glob("swarm-check-*")) and not config.dir.exists()
