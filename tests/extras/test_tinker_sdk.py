"""The tinker SDK, unchanged, as client of a Tinker server: make nightly has it in an environment of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.extras.tinker.serve_tinker import StartedTinker, TinkerSettings, end_tinker, start_tinker
from swarm.trained.model import load_target
from tests.extras.tinker_world import write_model

tinker: Any = pytest.importorskip("tinker", reason="the tinker SDK: make nightly installs it")

pytestmark = [
    # of the SDK's own, about what it imports and about calls that it renames
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
KEY = "tml-a-key-of-a-test"
NAME = "owner/tiny"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedTinker]:
    folder: Path = tmp_path_factory.mktemp("tinker")
    write_model(folder / "tiny")
    settings = TinkerSettings(
        name=NAME, listen="127.0.0.1:0", key=KEY, max_rows=8, device="cpu", store=folder / "weights"
    )
    started = start_tinker(load_target(str(folder / "tiny")), settings)
    yield started
    end_tinker(started)


@pytest.fixture
def service(server: StartedTinker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    made = tinker.ServiceClient(base_url=server.url)
    yield made
    made.close("success").result()


def datum(length: int = 6, **inputs: Any) -> Any:
    ids = list(range(3, 4 + length))
    plain = {"target_tokens": ids[1:], "weights": [1.0] * length}
    return tinker.types.Datum(model_input=tinker.types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs or plain)


def prompt() -> Any:
    return tinker.types.ModelInput.from_ints([3, 4, 5])


def test_a_loop_trains_saves_samples_and_goes_on_from_what_it_saved(service: Any) -> None:
    client = service.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    info = client.get_info()
    assert info.is_lora and info.lora_rank == 4 and info.model_data.model_name == NAME
    losses: list[float] = []
    for _ in range(3):  # both are sent before either is waited for
        future = client.forward_backward([datum(), datum(3)], "cross_entropy")
        step = client.optim_step(tinker.types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0))
        result = future.result()
        assert [len(each["logprobs"].data) for each in result.loss_fn_outputs] == [6, 3]
        losses.append(result.metrics["loss:sum"])
        assert step.result().metrics["grad_norm"] > 0
    assert losses[2] < losses[1] < losses[0]
    params = tinker.types.SamplingParams(max_tokens=5, seed=1)
    sampler = client.save_weights_and_get_sampling_client().result()
    made = sampler.sample(prompt(), 3, params, topk_sample_logprobs=2).result()
    assert len({each.sequence_id for each in made.sequences}) == 3
    assert [len(each.tokens) == len(each.logprobs) for each in made.sequences] == [True] * 3
    path = client.save_state("middle").result().path
    named = client.save_weights_for_sampler("end").result().path
    other = service.create_training_client_from_state_with_optimizer(path).result()
    future = [each.forward_backward([datum()], "cross_entropy") for each in (client, other)]
    first, second = (each.result() for each in future)
    assert first.loss_fn_outputs[0]["logprobs"].data == second.loss_fn_outputs[0]["logprobs"].data
    again = service.create_sampling_client(model_path=named).result()
    assert [each.tokens for each in again.sample(prompt(), 3, params).result().sequences] == [
        each.tokens for each in made.sequences
    ]
    scores = again.compute_logprobs(prompt()).result()
    assert scores[0] is None and all(score < 0 for score in scores[1:])


def test_losses_of_its_own_run_in_the_client(service: Any) -> None:
    client = service.create_lora_training_client(base_model=NAME, rank=4).result()

    def loss(data: Any, logprobs: Any) -> Any:
        return -sum(each.sum() for each in logprobs), {"own:mean": 2.0}

    own = client.forward_backward_custom([datum()], loss).result()
    assert own.metrics["own:mean"] == 2.0
    client.optim_step(tinker.types.AdamParams(learning_rate=1e-2)).result()
    after = client.forward_backward([datum()], "cross_entropy").result()
    assert after.metrics["loss:sum"] < own.metrics["loss:sum"]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_every_loss_of_rl_takes_what_the_sdk_sends(service: Any, loss: str) -> None:
    client = service.create_lora_training_client(base_model=NAME, rank=4).result()
    inputs: dict[str, Any] = {
        "target_tokens": list(range(4, 10)),
        "logprobs": [-6.0] * 6,
        "advantages": [0.0, 0.0, 1.0, 1.0, -1.0, 0.5],
    }
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    result = client.forward_backward([datum(6, **inputs)], loss).result()
    assert len(result.loss_fn_outputs[0]["logprobs"].data) == 6
    assert client.optim_step(tinker.types.AdamParams()).result().metrics["grad_norm"] > 0


def test_refusals_reach_the_caller_with_their_reason_and_a_client_goes_on(service: Any) -> None:
    with pytest.raises(tinker.NotFoundError, match="'owner/other' is not served; 'owner/tiny' is"):
        service.create_lora_training_client(base_model="owner/other").result()
    client = service.create_lora_training_client(base_model=NAME, rank=4).result()
    with pytest.raises(tinker.RequestFailedError, match=r"data\.0\.loss_fn_inputs\.logprobs: missing"):
        client.forward_backward([datum()], "ppo").result()
    with pytest.raises(tinker.RequestFailedError, match="formula is not public"):
        client.forward_backward([datum()], "stable_reinforce").result()
    with pytest.raises(tinker.RequestFailedError, match="there is no gradient"):
        client.optim_step(tinker.types.AdamParams()).result()
    assert client.forward_backward([datum()], "cross_entropy").result().metrics["loss:sum"] > 0
    sampler = service.create_sampling_client(base_model=NAME).result()
    with pytest.raises(tinker.BadRequestError, match="the context has 1021 left"):
        sampler.sample(prompt(), 1, tinker.types.SamplingParams(max_tokens=5000)).result()


def test_another_key_is_refused(server: StartedTinker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-another-key-of-a-test")
    with pytest.raises(tinker.AuthenticationError, match="set TINKER_API_KEY to what the server printed"):
        tinker.ServiceClient(base_url=server.url).create_lora_training_client(base_model=NAME).result()
