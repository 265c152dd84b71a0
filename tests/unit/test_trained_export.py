"""Exported models: what other tools load is what the node trained, and its provenance cannot be changed unnoticed."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from typer.testing import CliRunner

from swarm.cli.main import app
from swarm.config import ModelConfig, NodeConfig
from swarm.environments.load import build_environments
from swarm.errors import ConfigError
from swarm.events import GroupsDrawn, GroupUse, StepMade
from swarm.generation.produce import evaluate
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.identity import DOMAIN_EXPORT, Identity
from swarm.learn.checkpoint_state import CHECKPOINTS, CHECKSUM, STATE, checksum_of, newest_first, read_state
from swarm.model.lora import add_adapters
from swarm.model.network import load_model, tiny_network
from swarm.model.source import model_folder
from swarm.model.tokenizer import CharTokenizer
from swarm.printable import printable
from swarm.telemetry import EventLog
from swarm.testing.tiny_models import KINDS, model_source, write_small_tokenizer
from swarm.testing.trained_node import OTHER, TASKS, make_trained_node
from swarm.trained.chat import Conversation
from swarm.trained.export import export_model
from swarm.trained.formats import write_peft
from swarm.trained.gguf import write_file
from swarm.trained.model import TrainedModel, load_target, load_trained
from swarm.trained.provenance import CARD, PROVENANCE, exported_version, verify_export
from swarm.types import PolicyVersion, Role
from swarm.wire.run_manifest import write_toml


def problems() -> list[Any]:
    environments = build_environments(NodeConfig.model_validate({"environments": TASKS}).environments)
    return [environments[name].task(number) for name in ("reverse", "sort") for number in range(20)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An export of the node in `tmp_path / "node"`."""
    make_trained_node(tmp_path / "node")
    export_model(tmp_path / "node", tmp_path / "out", "hf", None, 0.0)
    return tmp_path / "out"


def own_greedy(config: NodeConfig, directory: Path) -> list[str]:
    model = load_trained(directory)
    engine = TransformersGenerator(model.network, model.tokenizer, PolicyVersion(policy_id="x", step=0), seed=0)
    return [actions[-1] for actions in evaluate(engine, model.tokenizer, problems(), config.generator.episode_limits)]


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_an_export_and_answers_greedily_as_the_node_does(tmp_path: Path, kind: str) -> None:
    config = make_trained_node(tmp_path / "node", source=model_source(kind, tmp_path / "model"))
    export_model(tmp_path / "node", tmp_path / "out", "hf", None, 0.0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    network: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    answers = []
    for task in problems():
        chat = [{"role": each.role, "content": each.content} for each in task.messages]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        made = network.generate(**ids, do_sample=False, max_new_tokens=8)[0, ids["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(made, skip_special_tokens=True))
    expected = own_greedy(config, tmp_path / "node")
    assert answers == expected
    assert len(set(expected)) > 10  # they say something


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_is_a_source_that_a_run_can_go_on_from(tmp_path: Path, kind: str) -> None:
    make_trained_node(tmp_path / "node", source=model_source(kind, tmp_path / "model"))
    done = export_model(tmp_path / "node", tmp_path / "out", "hf", None, 0.0)
    loaded = load_model(ModelConfig(source=str(tmp_path / "out"), dtype="float32"))
    assert loaded.digest == done.version.digest
    assert loaded.tokenizer.digest == CharTokenizer().digest


def test_the_exported_tokenizer_of_the_tiny_model_gives_its_ids(out: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(out), CharTokenizer()
    for task in problems():
        text = task.messages[-1].content
        assert theirs(text)["input_ids"] == ours.encode_prompt(task)
        assert theirs.decode(ours.encode_prompt(task)) == text
    turns = [("user", "find a?"), ("assistant", "b"), ("user", "b is c"), ("assistant", "c")]
    rendered = theirs.apply_chat_template([{"role": r, "content": c} for r, c in turns], return_dict=True)["input_ids"]
    expected = ours.encode_response("find a?")[:-1]
    for (_, answer), (_, observation) in ((turns[1], turns[2]), (turns[3], ("", ""))):
        expected += ours.encode_response(answer) + ours.encode_response(observation)[:-1]
    assert rendered == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_export_scores_as_the_adapted_network(tmp_path: Path, dtype: str, kind: str) -> None:
    source = model_source(kind, tmp_path / "model")
    make_trained_node(tmp_path / "node", lora_rank=4, dtype=dtype, source=source)
    ids = torch.arange(2, 42).reshape(2, 20)
    with torch.no_grad():
        adapted = load_trained(tmp_path / "node").network(input_ids=ids).logits
        initial = (
            load_model(ModelConfig.model_validate({"source": source, "dtype": dtype})).network(input_ids=ids).logits
        )
    export_model(tmp_path / "node", tmp_path / "out", "hf", None, 0.0)
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    with torch.no_grad():
        merged = network(input_ids=ids).logits
    assert (adapted - initial).abs().max() > 0.1  # the adapters matter
    # A merged weight is rounded once more: 2^-9 of it in bfloat16, and logits are sums of 96 products.
    assert (merged - adapted).abs().max() < (1e-4 if dtype == "float32" else 0.15)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
@pytest.mark.parametrize("kind", KINDS)
def test_peft_puts_an_exported_adapter_on_the_initial_model(tmp_path: Path, kind: str) -> None:
    from peft import PeftModel

    source = model_source(kind, tmp_path / "model")
    make_trained_node(tmp_path / "node", lora_rank=4, source=source)
    export_model(tmp_path / "node", tmp_path / "out", "peft", None, 0.0)
    ids = torch.arange(2, 42).reshape(2, 20)
    base: Any = load_model(ModelConfig(source=source, dtype="float32")).network
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    with torch.no_grad():
        difference = adapted(input_ids=ids).logits - load_trained(tmp_path / "node").network(input_ids=ids).logits
    assert difference.abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["llama", "llama untied", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gguf_file_read_back_has_the_same_weights_and_tokens(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    from transformers import GgufConfig

    digits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    split = pre_tokenizers.ByteLevel(add_prefix_space=False) if kind == "qwen3" else pre_tokenizers.Sequence(digits)
    shape: dict[str, Any] = {
        "vocab_size": write_small_tokenizer(tmp_path / "source", split)[0] + 5,  # padded, as embeddings often are
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128 if kind == "qwen3" else 16,  # of Qwen3 transformers reads this one, whatever the file says
        "tie_word_embeddings": kind != "llama untied",
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
    }
    made: Any = Qwen3ForCausalLM(Qwen3Config(**shape)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**shape))
    network = copy.deepcopy(made).to(dtype)
    write_file(network, tmp_path / "source", tmp_path / "model.gguf", "small")
    back = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    own = {name: tensor.float() for name, tensor in network.state_dict().items()}
    theirs = back.state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    ids = torch.arange(100, 140).reshape(2, 20)
    with torch.no_grad():
        made.load_state_dict(own)  # rotates in float32, which a network that was bfloat16 once does not
        difference = made.eval()(input_ids=ids).logits - back(input_ids=ids).logits
    assert difference.abs().max() < 1e-5  # the file holds rms_norm_eps in float32
    read = gguf.GGUFReader(tmp_path / "model.gguf")
    assert read.fields["general.name"].contents() == "small"
    assert read.fields["tokenizer.ggml.pre"].contents() == ("gpt-2" if kind == "qwen3" else "smollm")
    text = "the cat said caf\u00e9 12345\n\n<|im_start|>the"
    tokens = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    expected = tokenizers.Tokenizer.from_file(str(tmp_path / "source" / "tokenizer.json")).encode(text).ids
    assert tokens(text)["input_ids"] == expected and len(expected) > 12


def test_rows_of_a_gguf_bias_are_in_the_order_of_its_matrix(tmp_path: Path) -> None:
    size, _ = write_small_tokenizer(tmp_path / "source", pre_tokenizers.ByteLevel(add_prefix_space=False))
    shape: dict[str, Any] = {"vocab_size": size, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    network: Any = LlamaForCausalLM(
        LlamaConfig(**shape, num_hidden_layers=1, num_key_value_heads=2, attention_bias=True)
    )
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            layer = getattr(network.model.layers[0].self_attn, name)
            layer.bias.copy_(torch.arange(len(layer.bias)))
            layer.weight[:, 0] = layer.bias
    write_file(network, tmp_path / "source", tmp_path / "model.gguf", "small")
    tensors = {each.name: each.data for each in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    for name in "qkv":
        bias = tensors[f"blk.0.attn_{name}.bias"]
        assert (bias == tensors[f"blk.0.attn_{name}.weight"][:, 0]).all()
        assert (bias == sorted(bias)).all() == (name == "v"), "llama.cpp rotates neighbours"


def test_nothing_but_the_tokenizer_is_taken_from_the_folder_of_the_base_model(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    write_small_tokenizer(base, pre_tokenizers.ByteLevel(add_prefix_space=False))
    for name in ("config.json", "adapter_config.json", "credentials.json"):
        (base / name).write_text("{}")
    out.mkdir()
    network = tiny_network()
    add_adapters(network, 2)
    write_peft(TrainedModel(network=network, tokenizer=CharTokenizer(), source=str(base), base_digest=b""), out)
    names = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {each.name for each in out.iterdir()} == names
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"


@pytest.mark.parametrize("name", [".", "link"])
def test_an_empty_folder_is_taken_whatever_it_is_called(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trained_node(tmp_path / "node")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.chdir(tmp_path / "empty" if name == "." else tmp_path)
    export_model(tmp_path / "node", Path(name), "hf", None, 0.0)
    assert verify_export(tmp_path / "empty").step == 0


def test_gguf_refuses_what_it_cannot_say(tmp_path: Path) -> None:
    make_trained_node(tmp_path / "node")
    with pytest.raises(ConfigError, match="tiny model's tokenizer has no form in GGUF"):
        export_model(tmp_path / "node", tmp_path / "out", "gguf", None, 0.0)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*.part"))
    folder = tmp_path / "odd"
    shutil.copytree(model_folder("smollm2"), folder, ignore=lambda _, names: [n for n in names if "safe" in n])
    words = json.loads((folder / "tokenizer.json").read_text())
    words["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ConfigError, match=r"convert_hf_to_gguf\.py"):
        write_file(tiny_network(), folder, tmp_path / "model.gguf", "odd")


def test_peft_is_refused_where_all_weights_are_trained(tmp_path: Path) -> None:
    make_trained_node(tmp_path / "node")
    with pytest.raises(ConfigError, match="no adapters"):
        export_model(tmp_path / "node", tmp_path / "out", "peft", None, 0.0)


def test_provenance_names_teachers_scores_and_the_version_and_verifies(tmp_path: Path) -> None:
    make_trained_node(tmp_path / "node")
    done = export_model(tmp_path / "node", tmp_path / "out", "hf", None, 86400.0)
    found = verify_export(tmp_path / "out")
    node_id = Identity.load(tmp_path / "node" / "identity.key").node_id
    assert found.node_id == node_id == found.statement["node_id"]
    assert found.statement["groups_learned_from"] == [
        {"producer": OTHER, "groups": 2},
        {"producer": node_id, "groups": 1},
    ]
    assert found.statement["version_digest"] == done.version.digest.hex()
    assert (
        found.statement["base_model"]["digest"] == load_model(ModelConfig(source="tiny", dtype="float32")).digest.hex()
    )
    assert found.statement["evaluations"][0]["first"] == {"step": 0, "success": 0.25}
    card = (tmp_path / "out" / CARD).read_text()
    assert "**not known whether it learned: held out 0.25 of 8 problems at step 0, and not evaluated since**" in card
    assert "| sort | 8 | 0.25 (step 0) | - | - | 0.00 | not evaluated |" in card
    assert "1970-01-02" in card and "| node `bbbbbbbb` | 2 | 67% |" in card
    for path in (tmp_path / "out").iterdir():
        assert str(tmp_path) not in path.read_bytes().decode(errors="replace")  # no path of this machine


def test_an_export_says_of_which_step_it_is_unless_its_statement_was_changed(tmp_path: Path) -> None:
    make_trained_node(tmp_path / "node")
    done = export_model(tmp_path / "node", tmp_path / "out", "hf", None, 0.0)
    digest = load_target(str(tmp_path / "out")).base_digest
    assert exported_version(tmp_path / "out", digest) == replace(done.version, digest=digest)
    path = tmp_path / "out" / PROVENANCE
    for text in (path.read_text().replace('"step": 0', '"step": 9'), "[]", "{"):
        path.write_text(text)
        assert exported_version(tmp_path / "out", digest) is None
    assert exported_version(tmp_path, digest) is None


def test_groups_that_no_step_learned_from_taught_nothing(tmp_path: Path) -> None:
    make_trained_node(tmp_path / "node")
    log = EventLog(tmp_path / "node" / "events.jsonl")

    def log_step(draw_step: int, step: int, was_skipped: bool) -> None:
        made = StepMade(step=step, draw_step=draw_step, digest="", loss=0.0, grad_norm=0.0, num_tokens=1)
        log.write(replace(made, was_skipped=was_skipped))

    log_step(0, 0, was_skipped=True)  # the draw of make_trained_node
    for number, step in ((1, 0), (2, 1)):  # of this version, and of a later one
        use = GroupUse(digest="9", producer=f"{number}" * 64, policy_id="a", age_steps=0, is_own_policy=False)
        log.write(GroupsDrawn(draw_step=number, groups=(use,), max_age_steps=4, max_reuse=1))
        log_step(number, step, was_skipped=False)
    log.close()
    export_model(tmp_path / "node", tmp_path / "out", "hf", None, 0.0)
    learned = verify_export(tmp_path / "out").statement["groups_learned_from"]
    assert learned == [{"producer": "1" * 64, "groups": 1}]


def sign_as_somebody_else(folder: Path, **changes: Any) -> None:
    kept, signer = json.loads((folder / PROVENANCE).read_text()), Identity.create()
    statement = {**kept["statement"], "node_id": signer.node_id, **changes}
    text = json.dumps(statement, sort_keys=True, separators=(",", ":"))
    signature = signer.sign(DOMAIN_EXPORT, text.encode()).hex()
    made = {"statement": statement, "public_key": signer.public_key.hex(), "signature": signature}
    (folder / PROVENANCE).write_text(json.dumps(made))


def test_a_node_cannot_sign_in_the_name_of_another(out: Path, tmp_path: Path) -> None:
    sign_as_somebody_else(out, step=7)
    assert verify_export(out).step == 7  # its own name: a reader compares it
    victim = Identity.load(tmp_path / "node" / "identity.key").node_id
    sign_as_somebody_else(out, node_id=victim)
    with pytest.raises(ConfigError, match=f"it says that node {victim} made this model, but .* signed it"):
        verify_export(out)


def test_what_is_not_in_the_folder_does_not_verify(out: Path, tmp_path: Path) -> None:
    card, code = out / CARD, tmp_path / "elsewhere"
    code.mkdir()
    (code / "custom.py").write_text("")
    (out / "code").symlink_to(code)
    with pytest.raises(ConfigError, match="code: a link or a device, no file or folder: put a copy"):
        verify_export(out)
    (out / "code").unlink()
    card.rename(code / CARD)
    card.symlink_to(code / CARD)  # the same bytes, today
    with pytest.raises(ConfigError, match=r"README\.md: a link or a device"):
        verify_export(out)


@pytest.mark.parametrize("statement", [{"base_model": "tiny"}, {"files": 3}, {"recipe": None}, {"step": "three"}])
def test_a_signed_statement_without_sense_is_refused(out: Path, statement: dict[str, Any]) -> None:
    sign_as_somebody_else(out, **statement)
    with pytest.raises(ConfigError, match=r"provenance\.json: cannot be read: .*ask for another copy"):
        verify_export(out)


def test_text_of_others_does_not_reach_the_terminal_as_it_is(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sign_as_somebody_else(out, run_id="\x1b[2Jletters")
    done = CliRunner().invoke(app, ["verify", str(out)])
    assert "\x1b" not in done.stdout and r"\x1b[2Jletters" in done.stdout
    (out / "\x1b[2J.py").write_text("")
    done = CliRunner().invoke(app, ["verify", str(out)])
    assert "\x1b[2J" not in done.stderr and r"\x1b[2J.py: is not signed" in done.stderr
    monkeypatch.setattr(Conversation, "ask", lambda _, text, show: show(f"{text}\x1b[2J"))  # pyright: ignore
    assert CliRunner().invoke(app, ["chat", "tiny", "-m", "a"]).stdout == "a\\x1b[2J\n"
    assert printable("a\tb\nc\rd\x9b\ud800") == "a\tb\nc\\rd\\x9b\\ud800"


def test_the_key_of_another_node_signs_nothing(tmp_path: Path) -> None:
    make_trained_node(tmp_path / "node")
    (tmp_path / "node" / "identity.key").unlink()
    Identity.create().save(tmp_path / "node" / "identity.key")
    with pytest.raises(ConfigError, match="put the key back with which it was trained"):
        export_model(tmp_path / "node", tmp_path / "out", "hf", None, 0.0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["changed", "added", "removed", "statement", "signature", "absent"])
def test_a_changed_export_does_not_verify(out: Path, change: str) -> None:
    path, kept = out / PROVENANCE, json.loads((out / PROVENANCE).read_text())
    match change:
        case "changed":
            with (out / "model.safetensors").open("r+b") as file:
                file.seek(-1, 2)
                file.write(b"\x01")
            expected = r"model\.safetensors: was changed"
        case "added":
            (out / "extra.py").write_text("")
            expected = r"extra\.py: is not signed"
        case "removed":
            (out / CARD).unlink()
            expected = "README.md: is missing"
        case "statement":
            kept["statement"]["step"] = 7
            path.write_text(json.dumps(kept))
            expected = "the signature does not fit"
        case "signature":
            path.write_text("{")
            expected = "cannot be read"
        case _:
            path.unlink()
            expected = "`swarm export` of a node writes one"
    with pytest.raises(ConfigError, match=expected):
        verify_export(out)


def test_what_cannot_be_exported_is_said_with_its_fix(tmp_path: Path) -> None:
    make_trained_node(tmp_path / "node")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    with pytest.raises(ConfigError, match="not empty: name another folder"):
        export_model(tmp_path / "node", tmp_path / "used", "hf", None, 0.0)
    with pytest.raises(ConfigError, match=r"--step 7: .* holds steps 0"):
        export_model(tmp_path / "node", tmp_path / "out", "hf", 7, 0.0)
    shutil.rmtree(tmp_path / "node" / "checkpoints")
    with pytest.raises(ConfigError, match="--keep-checkpoints"):
        export_model(tmp_path / "node", tmp_path / "out", "hf", None, 0.0)
    (tmp_path / "node" / "events.jsonl").unlink()
    with pytest.raises(ConfigError, match="has not run yet"):
        export_model(tmp_path / "node", tmp_path / "out", "hf", None, 0.0)
    config = NodeConfig.model_validate(
        {"dir": str(tmp_path / "follower"), "environments": TASKS, "roles": ["generator"]}
    )
    (tmp_path / "follower").mkdir()
    write_toml(config.model_dump(mode="json"), tmp_path / "follower" / "node.toml")
    assert config.roles == (Role.GENERATOR,)
    with pytest.raises(ConfigError, match="export from the trainer's directory"):
        export_model(tmp_path / "follower", tmp_path / "out", "hf", None, 0.0)
    with pytest.raises(ConfigError, match="neither a node's directory"):
        load_target(str(tmp_path))
    assert not (tmp_path / "out").exists()


def test_a_disk_that_takes_no_weights_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_trained_node(tmp_path / "node")

    def refuse(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", refuse)
    result = CliRunner().invoke(app, ["export", str(tmp_path / "node"), str(tmp_path / "out")], env={"COLUMNS": "400"})
    assert result.exit_code == 2 and "out: cannot be written: " in result.stderr and "No space" in result.stderr


def test_another_model_in_the_configuration_is_not_exported_as_this_one(tmp_path: Path) -> None:
    config = make_trained_node(tmp_path / "node")
    for changes, expected in (
        ({"lora_rank": 2}, "checkpoint of another model"),
        ({"dtype": "bfloat16"}, "gives weights"),
    ):
        model = config.model.model_copy(update=changes)
        write_toml(config.model_copy(update={"model": model}).model_dump(mode="json"), tmp_path / "node" / "node.toml")
        with pytest.raises(ConfigError, match=expected):
            load_trained(tmp_path / "node")
    write_toml(config.model_dump(mode="json"), tmp_path / "node" / "node.toml")
    (folder,) = newest_first(tmp_path / "node" / CHECKPOINTS)[:1]
    state = read_state(folder)
    del state["digest"], state["policy_id"]
    (folder / STATE).write_text(json.dumps(state | {CHECKSUM: checksum_of(state)}))
    with pytest.raises(ConfigError, match="its node had none"):
        load_trained(tmp_path / "node")


def test_a_conversation_is_what_the_engine_would_answer_and_remembers(tmp_path: Path) -> None:
    config = make_trained_node(tmp_path / "node")
    tasks, expected = problems()[:5], own_greedy(config, tmp_path / "node")[:5]
    talk = Conversation(load_trained(tmp_path / "node"), max_new_tokens=8)
    for task, answer in zip(tasks, expected, strict=True):
        shown: list[str] = []
        assert talk.ask(task.messages[-1].content, shown.append) == answer == "".join(shown)
        assert [each.role for each in talk.messages] == ["user", "assistant"]
        talk.reset()
    whole = talk.ask("rev:abcd=dc")
    talk.reset()
    begun = Conversation(load_trained(tmp_path / "node"), max_new_tokens=8, prefill="dc")
    assert begun.ask("rev:abcd=") == whole and begun.messages[-1].content == f"dc{whole}"
    with pytest.raises(ConfigError, match="cannot read character 'A'"):
        talk.ask("A")
    assert talk.messages == ()
    with pytest.raises(ConfigError, match="the conversation has 128 tokens, and the model has 128 positions"):
        talk.ask("a" * 128)
    talk = Conversation(load_trained(tmp_path / "node"), max_new_tokens=9_999, temperature=9.0)
    assert len(talk.ask("a" * 120)) <= 8, "no token stands beyond the last position"
    with pytest.raises(ConfigError, match="the tiny model has no system message"):
        Conversation(load_trained(tmp_path / "node"), max_new_tokens=8, system="be brief")
