"""Model families: random two-layer models of each, taken through all that a node does with a model.

Invariant: the independent form of every log-prob is a forward pass of plain transformers, without a mask, a cache, a
batch or code of this project. `python -m benchmarks.model_families` prints the table of docs/models.md.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from swarm.config import LearnerConfig, ModelConfig, ReplayConfig
from swarm.errors import ConfigError
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.identity import Identity
from swarm.interfaces import CompletionRequest
from swarm.learn.learner import PolicyLearner
from swarm.learn.logprobs import score_tokens
from swarm.learn.packing import pack
from swarm.model.network import LoadedModel, load_model
from swarm.model.version_digest import snapshot
from swarm.objectives.draw_batch import make_batch
from swarm.objectives.methods import load_recipe
from swarm.testing.builders import make_group, make_scored, toy_task
from swarm.testing.tiny_models import write_small_tokenizer
from swarm.trained.formats import write_hf, write_peft
from swarm.trained.model import TrainedModel
from swarm.types import Digest, Draw, DrawnGroup, PolicyVersion, RolloutGroup, Sampling, SealedManifest
from swarm.weights.apply import Applier, VerifiedVersion
from swarm.weights.manifest import seal_body
from swarm.weights.publish import Publisher
from swarm.weights.tensors import TorchWeights

WINDOW: Final = 6  # tokens: shorter than most answers, which have 16 at most
MOST_NATS: Final = 1e-4  # between log-probs of float32 passes in another order; the largest seen is 1e-5
_OWNER: Final = Identity.from_seed(b"f" * 32)
_SAMPLING: Final = Sampling(max_new_tokens=16)
_SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_EVERY: Final[dict[str, Any]] = {"sliding_window": WINDOW}
_SOME: Final[dict[str, Any]] = {**_EVERY, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_LINEAR: Final[dict[str, Any]] = {"layer_types": ["linear_attention", "full_attention"]}

_TURNS: Final = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_OPENS: Final = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES: Final[Mapping[str, str]] = {
    "plain": _TURNS + _OPENS,
    "prefills": _TURNS + _OPENS.replace("assistant\n", "assistant\n<think>\n"),
    "opens no turn": _TURNS,
    "writes bos": "{{ bos_token }}" + _TURNS + _OPENS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Options of one family's two-layer model, with the habits of its tokenizer."""

    kind: str  # model_type of transformers
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_tied: bool = False
    template: str = "plain"  # key of TEMPLATES
    num_ends: int = 1  # end tokens in generation_config.json
    has_null_tokens: bool = False  # "bos_token": null, as in Qwen2.5

    @property
    def window(self) -> str:
        """Attention window of the model, in words."""
        if "sliding_window" not in self.options:
            return "none"
        return "some layers" if "layer_types" in self.options or "max_window_layers" in self.options else "all layers"


FAMILIES: Final[Mapping[str, Family]] = {
    "Llama": Family(kind="llama", template="writes bos", num_ends=3),
    "SmolLM3": Family(kind="smollm3", options={"no_rope_layers": [1, 0]}, is_tied=True, template="prefills"),
    "Qwen2": Family(kind="qwen2", options={**_EVERY, "use_sliding_window": True, "max_window_layers": 1}),
    "Qwen2.5": Family(kind="qwen2", is_tied=True, template="writes bos", num_ends=2, has_null_tokens=True),
    "Qwen3": Family(kind="qwen3", options={"head_dim": 16}, is_tied=True, template="prefills", has_null_tokens=True),
    "Qwen3-MoE": Family(kind="qwen3_moe", options={**_EXPERTS, "head_dim": 16}, has_null_tokens=True),
    "Qwen3-Next": Family(kind="qwen3_next", options={**_EXPERTS, **_LINEAR}),
    "Qwen3.5": Family(kind="qwen3_5_text", options=_LINEAR),
    "Gemma 2": Family(kind="gemma2", options={**_SOME, "head_dim": 8}, is_tied=True, template="writes bos", num_ends=2),
    "Gemma 3": Family(kind="gemma3_text", options={**_SOME, "head_dim": 8}, is_tied=True, template="writes bos"),
    "Mistral": Family(kind="mistral", options=_EVERY, template="opens no turn"),
    "Mixtral": Family(kind="mixtral", options={**_EVERY, **_EXPERTS, "router_jitter_noise": 0.1}),
    "Phi-3": Family(kind="phi3", options=_EVERY, num_ends=3),
    "OLMo 2": Family(kind="olmo2"),
    "OLMo 3": Family(kind="olmo3", options=_SOME),
    "Granite": Family(kind="granite", options={"logits_scaling": 3.0, "embedding_multiplier": 2.0}, is_tied=True),
    "GPT-NeoX": Family(kind="gpt_neox", template="opens no turn"),
    "GPT-2": Family(kind="gpt2", is_tied=True, template="opens no turn"),
    "OPT": Family(kind="opt", options={"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.1}, is_tied=True),
    "Falcon": Family(kind="falcon", options={"hidden_dropout": 0.1}, is_tied=True),
    "Falcon, alibi": Family(kind="falcon", options={"alibi": True}, is_tied=True),
    "gpt-oss": Family(kind="gpt_oss", options={**_SOME, **_EXPERTS, "head_dim": 8}),
    "LFM2": Family(kind="lfm2", options={"layer_types": ["conv", "full_attention"]}),
    "GPT-Neo": Family(kind="gpt_neo", options={"attention_types": [[["global", "local"], 1]], "num_layers": 2}),
    "Bloom": Family(kind="bloom"),
    "Mamba": Family(kind="mamba"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Surveyed:
    """Results of one family."""

    family: Family
    refused: str = ""  # message of the refusal before the weights were loaded
    lora: str = ""  # message of a refusal of adapters alone
    engine_nats: float = 0.0  # largest difference of a sampled token's log-prob from plain transformers, float32
    exact_nats: float = 0.0  # from plain transformers in float64
    learner_nats: float = 0.0  # of the learner's packed log-prob from the engine's


def survey(family: Family, folder: Path) -> Surveyed:
    """Takes a random model of a family through everything, in an empty folder.

    Raises:
        AssertionError: a result is wrong; names the stage.
    """
    source = folder / "model"
    write_model(family, source)
    config = ModelConfig(source=str(source), dtype="float32")
    try:
        loaded = load_model(config)
    except ConfigError as error:
        return Surveyed(family=family, refused=str(error).partition("): ")[2])
    group = _generated(loaded)
    plain = {dtype: _plain(source, dtype) for dtype in (torch.float32, torch.float64)}
    found = Surveyed(
        family=family,
        engine_nats=max(_differences(group, plain[torch.float32])),
        exact_nats=max(_differences(group, plain[torch.float64])),
        learner_nats=_packed_difference(loaded, group),
    )
    draw = _draw(group)
    _learn_and_follow(config, folder, draw)
    _serve(loaded, group, plain[torch.float32])
    try:
        _adapt(config, folder, draw)
    except ConfigError as error:
        found = replace(found, lora=str(error))
    return found


def write_model(family: Family, folder: Path) -> None:
    """Writes a random model of a family with a small tokenizer, whose ids the embeddings exceed by some."""
    from transformers import AutoConfig, AutoModelForCausalLM

    end = "<|im_end|>"
    tokens = {"bos_token": None if family.has_null_tokens else "<|endoftext|>", "pad_token": None, "eos_token": end}
    tokens["tokenizer_class"] = "PreTrainedTokenizerFast"  # or transformers takes that of the family
    adds = "<|endoftext|>" if family.template == "writes bos" else None  # as Llama's does: bos must not come twice
    size, ids = write_small_tokenizer(folder, adds=adds, chat_template=TEMPLATES[family.template], **tokens)
    shape = _SHAPE | {"vocab_size": size + 13, "eos_token_id": ids[end], "tie_word_embeddings": family.is_tied}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family.kind, **{**shape, **family.options})
        )
        with torch.no_grad():
            for parameter in network.parameters():  # so that answers depend on everything, also on norms
                parameter.normal_(0.0, 0.3) if parameter.dim() > 1 else parameter.add_(
                    torch.randn_like(parameter) * 0.1
                )
    network.save_pretrained(folder)
    ends = [ids[end], ids["<|endoftext|>"], ids["<|im_start|>"]][: family.num_ends]
    defaults = {"temperature": 0.1, "top_k": 1, "top_p": 0.1, "repetition_penalty": 5.0}  # no effect
    (folder / "generation_config.json").write_text(json.dumps(defaults | {"eos_token_id": ends}))


def _generated(loaded: LoadedModel) -> RolloutGroup:
    """A group of the engine's own answers."""
    version = PolicyVersion(policy_id=_OWNER.node_id, step=0)
    engine = TransformersGenerator(loaded.network, loaded.tokenizer, version, seed=0, max_rows=3)
    group = make_group(_OWNER.node_id, tokenizer=loaded.tokenizer)
    (rollouts,) = engine.generate([group.prompt_ids.tolist()], 6, _SAMPLING)
    engine.close()
    return replace(group, rollouts=tuple(rollouts))


def _plain(folder: Path, dtype: torch.dtype) -> Callable[[Sequence[int]], Tensor]:
    """Log-probs [T, V] of the next token after each of a text, by transformers alone."""
    from transformers import AutoModelForCausalLM

    # the default way of experts has no float64
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()

    def logprobs(ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return torch.log_softmax(network(torch.tensor([ids])).logits[0].double(), dim=-1)

    return logprobs


def _differences(group: RolloutGroup, plain: Callable[[Sequence[int]], Tensor]) -> list[float]:
    prompt = group.prompt_ids.tolist()
    found: list[float] = []
    for rollout in group.rollouts:
        assert rollout.trace is not None and rollout.trace.logprobs is not None
        ids = rollout.trace.token_ids.tolist()
        expected = plain([*prompt, *ids])[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]
        found.append(float(np.abs(rollout.trace.logprobs - expected.numpy()).max()))
    return found


def _draw(group: RolloutGroup) -> Draw:
    scored = make_scored(group, rewards=[float(index % 2) for index in range(len(group.rollouts))])
    return Draw(step=1, groups=(DrawnGroup(scored=scored, age_steps=0, use=1),), num_zero_variance=0)


def _packed_difference(loaded: LoadedModel, group: RolloutGroup) -> float:
    batch = make_batch(_draw(group), loaded.tokenizer)
    largest = 0.0
    for packed in pack(batch, 4096):
        scores = score_tokens(loaded.network, packed).logprobs
        largest = max(largest, float((scores - batch.behavior_logprobs[packed.rollouts, packed.positions]).abs().max()))
    return largest


def _learner(loaded: LoadedModel, folder: Path, **config: Any) -> PolicyLearner:
    settings = LearnerConfig.model_validate({"learning_rate": 1e-2, "warmup_steps": 0, **config})
    recipe = load_recipe("grpo")
    return PolicyLearner(
        loaded.network, loaded.tokenizer, recipe, settings, ReplayConfig(), _OWNER.node_id, folder
    ).resume()


def _learn_and_follow(config: ModelConfig, folder: Path, draw: Draw) -> None:
    """Two steps, published as a whole and as a patch, taken by a follower; the second again after a resume."""
    loaded = load_model(config)
    learner = _learner(loaded, folder / "checkpoints")
    chunks: dict[Digest, bytes] = {}
    scorer = TransformersGenerator(loaded.network, loaded.tokenizer, learner.version, seed=0)
    canaries = [draw.groups[0].scored.group.prompt_ids.tolist()]
    publisher = Publisher(chunks.__setitem__, canaries, scorer.score)
    other = load_model(config)
    weights = snapshot(other.network)
    follower = Applier(
        TransformersGenerator(other.network, other.tokenizer, learner.version, seed=0),
        VerifiedVersion(version=learner.version, weights=TorchWeights(weights)),
        chunks.get,
    )
    versions: list[PolicyVersion] = []
    for step in (1, 2):
        report = learner.step(replace(draw, step=step))
        assert not report.was_skipped and report.grad_norm > 0, "learn"
        if step == 1:
            learner.save()
        version, tensors = learner.snapshot()
        sealed: SealedManifest = seal_body(publisher.publish(version, TorchWeights(tensors))[0], _OWNER)
        applied = follower.apply((sealed,))
        assert not applied.error and applied.mismatch_nats < MOST_NATS, f"follow: {applied}"
        versions.append(version)
    assert follower.version == versions[1] != versions[0], "follow"
    again = _learner(load_model(config), folder / "checkpoints")
    assert again.version == versions[0], "resume"
    again.step(replace(draw, step=2))
    assert again.version == versions[1], "resume: the same step has other weights"
    _export(loaded, config, folder / "exported")


def _export(loaded: LoadedModel, config: ModelConfig, folder: Path) -> None:
    """Writes a trained model, whose logits plain transformers repeats, and which loads here again."""
    from transformers import AutoTokenizer

    folder.mkdir()
    ids = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    with torch.no_grad():
        before = torch.log_softmax(cast(Any, loaded.network)(torch.tensor([ids])).logits[0].double(), dim=-1)
    source = config.source
    write_hf(TrainedModel(network=loaded.network, tokenizer=loaded.tokenizer, source=source, base_digest=b""), folder)
    assert float((_plain(folder, torch.float32)(ids) - before).abs().max()) < MOST_NATS, "export"
    back = load_model(ModelConfig(source=str(folder), dtype="float32"))
    assert back.tokenizer.digest == loaded.tokenizer.digest, "export: another tokenizer"
    messages = [{"role": "user", "content": "7="}]
    theirs = cast(Any, AutoTokenizer.from_pretrained(folder)).apply_chat_template(messages, add_generation_prompt=True)
    ours = back.tokenizer.encode_prompt(toy_task("a", 7))
    assert ours == (theirs if isinstance(theirs, list) else theirs["input_ids"]), "export: another prompt"


def _serve(loaded: LoadedModel, group: RolloutGroup, plain: Callable[[Sequence[int]], Tensor]) -> None:
    """A greedy completion as a client asks for it: the likeliest token each time, by plain transformers."""
    engine = TransformersGenerator(loaded.network, loaded.tokenizer, PolicyVersion(policy_id="a", step=0), seed=0)
    ids: list[int] = group.prompt_ids.tolist()
    sampling = Sampling(temperature=0.0, max_new_tokens=12)
    answer = engine.complete(CompletionRequest(prompt_ids=ids, sampling=sampling, seed=0)).result(60).token_ids
    engine.close()
    for token in answer:
        assert plain(ids)[-1].argmax() == token, "serve"
        ids = [*ids, token]
    assert len(answer) == 12 or answer[-1] in loaded.tokenizer.eos_ids, "serve"


def _adapt(config: ModelConfig, folder: Path, draw: Draw) -> None:
    """A step of adapters in train mode, exported for PEFT and merged. Raises ConfigError if a family takes none."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded = load_model(config.model_copy(update={"lora_rank": 2}))
    learner = _learner(loaded, folder / "adapters", gradient_checkpointing=True)
    assert learner.step(draw).grad_norm > 0, "LoRA"
    made = TrainedModel(network=loaded.network, tokenizer=loaded.tokenizer, source=config.source, base_digest=b"")
    (folder / "peft").mkdir()
    write_peft(made, folder / "peft")
    base: Any = AutoModelForCausalLM.from_pretrained(config.source, dtype=torch.float32)
    adapted: nn.Module = PeftModel.from_pretrained(base, str(folder / "peft")).eval()
    ids = torch.arange(5, 20)[None]
    with torch.no_grad():
        ours, theirs = cast(Any, loaded.network)(ids).logits, cast(Any, adapted)(input_ids=ids).logits
    assert float((ours - theirs).abs().max()) < MOST_NATS * float(ours.abs().max()), "LoRA: PEFT has other logits"
    _export(loaded, config, folder / "merged")


_HEAD: Final = """
| family (`model_type`) | window | template, end tokens | embeddings | nats: engine, learner | trained |
|---|---|---|---|---|---|"""


def markdown(names: Sequence[str] = tuple(FAMILIES)) -> str:
    """The table of docs/models.md."""
    rows = [_HEAD.strip()]
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(name, survey(FAMILIES[name], Path(folder))))
    return "\n".join(rows)


def row(name: str, found: Surveyed) -> str:
    """The row of a family in the table of docs/models.md."""
    family = found.family
    ends = f"{family.template}, {family.num_ends}" + (", null tokens" if family.has_null_tokens else "")
    nats = f"{found.engine_nats:.0e}, {found.learner_nats:.0e}"
    kind = "weights" if found.lora else "weights, adapters"
    cells = [family.window, ends, "tied" if family.is_tied else "own", nats, kind]
    if found.refused:
        cells = ["", "", "", "", f"refused: {found.refused}"]
    return " | ".join([f"| {name} (`{family.kind}`)", *cells]) + " |"


if __name__ == "__main__":
    print(markdown(sys.argv[1:] or tuple(FAMILIES)))
