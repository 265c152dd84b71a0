"""A Tinker server over HTTP: its numbers against plain torch and PEFT, the order of requests, bounds and refusals."""

import http.client
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from waits import HANG_S

from swarm.extras.tinker import prompt_scores, tinker_http, tinker_sessions
from swarm.extras.tinker.serve_tinker import TinkerSettings, end_tinker, start_tinker
from swarm.extras.tinker.v1 import tinker_pb2 as wire
from swarm.model.version_digest import published_state, weights_digest
from swarm.trained.model import TrainedModel, load_target
from tests.extras.tinker_world import write_model

KEY = "tml-a-key-of-a-test"
NAME = "owner/tiny"
RNG = np.random.default_rng(7)
Datum = dict[str, Any]  # tokens, and tensors of the loss by name
Reply = tuple[int, Any]


class Client:
    """The calls of the SDK, made by hand."""

    def __init__(self, port: int, store: Path, key: str = KEY) -> None:
        self.port, self.store, self.key = port, store, key
        self.seq_id = 0
        self.session_ids: list[str] = []

    def folder(self, path: str) -> Path:
        """The folder of a checkpoint that the server names by a path."""
        return self.store / path.removeprefix("tinker://")

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, content, **headers)

    def ask(self, verb: str, path: str, content: bytes = b"", **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        try:
            connection.request(verb, f"/api/v1/{path}", content, {"X-API-Key": self.key, **headers})
            response = connection.getresponse()
            read = response.read()
            return response.status, json.loads(read) if "json" in response.headers["content-type"] else read
        finally:
            connection.close()

    def result(self, path: str, body: Any) -> Any:
        """The result of a request that is answered later."""
        status, promise = self.post(path, body)
        assert status == 200, promise
        return self.retrieve(promise["request_id"])

    def retrieve(self, request_id: str) -> Any:
        while True:
            status, reply = self.post("retrieve_future", {"request_id": request_id})
            if status != 408:
                return reply

    def refusal(self, path: str, body: Any) -> str:
        """Why a request is refused, at once or later."""
        status, reply = self.post(path, body)
        return str(reply["detail"] if status != 200 else self.retrieve(reply["request_id"])["error"])

    def sampler(self, session_id: str, number: int = 0, **weights: str) -> str:
        """A sampler of the base model, or of other weights."""
        body = {"session_id": session_id, "sampling_session_seq_id": number, **(weights or {"base_model": NAME})}
        status, made = self.post("create_sampling_session", body)
        assert status == 200, made
        return str(made["sampling_session_id"])

    def session(self) -> str:
        status, reply = self.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"})
        assert status == 200, reply
        self.session_ids.append(str(reply["session_id"]))
        return self.session_ids[-1]

    def model(self, session_id: str, number: int = 0, rank: int = 4, **lora: Any) -> str:
        made = self.result(
            "create_model",
            {
                "session_id": session_id,
                "model_seq_id": number,
                "base_model": NAME,
                "lora_config": {"rank": rank, "seed": 5, **lora},
            },
        )
        assert "model_id" in made, made
        return str(made["model_id"])

    def forward_backward(self, model_id: str, data: Sequence[Datum], loss: str, **more: Any) -> Any:
        """Log-probs of each datum and metrics, or the error."""
        self.seq_id += 1
        reply = self.result("forward_backward", message_of(model_id, self.seq_id, data, loss, **more))
        if not isinstance(reply, bytes):
            return reply
        read = wire.TinkerForwardBackwardReply.FromString(reply)
        logprobs: list[Any] = []
        for record in read.outputs:
            column = record.columns["logprobs"]
            ends = np.frombuffer(column.offsets, "<i8") // 4
            flat = np.frombuffer(column.data, "<f4")
            logprobs += [flat[a:b].reshape(-1, *column.trailing_shape) for a, b in itertools.pairwise(ends)]
        return logprobs, dict(read.metrics)

    def in_order(self, endpoint: str, model_id: str, **body: Any) -> Any:
        self.seq_id += 1
        return self.result(endpoint, {"model_id": model_id, "seq_id": self.seq_id, **body})


def message_of(
    model_id: str, seq_id: int, data: Sequence[Datum], loss: str, *, config: dict[str, float] | None = None, **more: Any
) -> bytes:
    message = wire.TinkerForwardBackward(model_id=model_id, seq_id=seq_id, loss=loss, numbers=config or {}, **more)
    for datum in data:
        added = message.data.add()
        added.model_input.add().text.token_ids = np.asarray(datum["tokens"], "<i4").tobytes()
        for name, values in datum.items():
            if name != "tokens":
                array = np.asarray(values)
                kind = 2 if array.dtype.kind == "i" else 1
                tensor = added.loss_inputs[name]
                tensor.element_type, tensor.dense = kind, array.astype("<i8" if kind == 2 else "<f4").tobytes()
                tensor.shape.extend(array.shape)
    return message.SerializeToString()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny"
    write_model(made)
    return made


@contextmanager
def served(folder: Path, store: Path) -> Generator[Client]:
    model: TrainedModel = load_target(str(folder))
    settings = TinkerSettings(name=NAME, listen="127.0.0.1:0", key=KEY, max_rows=8, device="cpu", store=store)
    started = start_tinker(model, settings)
    try:
        yield Client(int(started.url.rpartition(":")[2]), store)
    finally:
        end_tinker(started)


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with served(folder, tmp_path_factory.mktemp("store") / "weights") as made:
        yield made


@pytest.fixture
def fresh(client: Client) -> Iterator[Client]:
    made = Client(client.port, client.store)
    yield made
    for session_id in made.session_ids:
        assert made.post(f"sessions/{session_id}/finish", {})[0] == 200


# --- the same numbers as plain torch and PEFT ------------------------------------------------------


def rl_data(loss: str) -> list[Datum]:
    """Three sequences of other lengths; two begin with a prompt that is not learned."""
    data: list[Datum] = []
    for length, prompt in ((9, 3), (14, 0), (5, 2)):
        tokens = RNG.integers(0, 500, length)
        is_learned = np.arange(length) >= prompt
        datum: Datum = {"tokens": tokens, "target_tokens": np.where(is_learned, RNG.integers(0, 500, length), 0)}
        if loss == "cross_entropy":
            datum["weights"] = np.where(is_learned, RNG.uniform(0.1, 1, length), 0.0)
        else:
            datum["advantages"] = np.where(is_learned, RNG.normal(size=length), 0.0)
            datum["logprobs"] = np.where(is_learned, RNG.normal(-6.2, 0.3, length), 0.0)
        if loss == "gspo":
            datum["sequence_ratio_mask"] = is_learned.astype(float)
        data.append(datum)
    return data


def of(datum: Datum, name: str) -> torch.Tensor:
    return torch.tensor(np.asarray(datum[name], np.float32))


def importance_sampling(new: torch.Tensor, datum: Datum) -> torch.Tensor:
    return -((new - of(datum, "logprobs")).exp() * of(datum, "advantages")).sum()


def clipped(new: torch.Tensor, datum: Datum) -> torch.Tensor:
    ratio, advantages = (new - of(datum, "logprobs")).exp(), of(datum, "advantages")
    return -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.3) * advantages).sum()


def detached(new: torch.Tensor, datum: Datum) -> torch.Tensor:
    ratio = (new - of(datum, "logprobs")).exp().clamp(0.8, 1.2).detach()
    return -(ratio * new * of(datum, "advantages")).sum()


def quadratic(new: torch.Tensor, datum: Datum) -> torch.Tensor:
    return -(new * of(datum, "advantages") - 0.5 * 0.1 * (new - of(datum, "logprobs")) ** 2).sum()


def by_sequence(new: torch.Tensor, datum: Datum) -> torch.Tensor:
    is_in = of(datum, "sequence_ratio_mask") != 0
    mean = (new.detach() - of(datum, "logprobs"))[is_in].mean()
    ratio, advantages = (mean + new - new.detach()).exp(), of(datum, "advantages")
    return -torch.minimum(ratio * advantages, ratio.clamp(0.95, 1.05) * advantages).sum()


LOSSES: dict[str, tuple[Callable[[torch.Tensor, Datum], torch.Tensor], dict[str, float]]] = {
    "cross_entropy": (lambda new, datum: -(new * of(datum, "weights")).sum(), {}),
    "importance_sampling": (importance_sampling, {}),
    "ppo": (clipped, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}),
    "cispo": (detached, {}),
    "dro": (quadratic, {"beta": 0.1}),
    "gspo": (by_sequence, {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}),
}


def own_logprobs(model: Any, datum: Datum) -> torch.Tensor:
    """Of the targets, one sequence alone, without anything of ours."""
    logits = model(input_ids=torch.tensor(np.asarray(datum["tokens"]))[None], use_cache=False).logits[0]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(np.asarray(datum["target_tokens"]))[:, None])[:, 0]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks transformers
@pytest.mark.parametrize("loss", list(LOSSES))
def test_logprobs_and_the_adapter_after_two_steps_are_those_of_torch_and_peft(
    fresh: Client, folder: Path, loss: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    rule, config = LOSSES[loss]
    session_id = fresh.session()
    model_id = fresh.model(session_id)
    adam = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01}
    adam["grad_clip_norm"] = 1.0 if loss == "ppo" else 0.0
    start = fresh.in_order("save_weights_for_sampler", model_id, path="start")["path"]
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference: Any = PeftModel.from_pretrained(base, str(fresh.folder(start)), is_trainable=True).eval()
    weights = [each for each in reference.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for _ in range(2):
        total = 0.0
        for data in (rl_data(loss), rl_data(loss)):  # the gradients of two requests add up
            found, metrics = fresh.forward_backward(model_id, data, loss, config=config)
            own_loss = torch.zeros(())
            for datum, logprobs in zip(data, found, strict=True):
                new = own_logprobs(reference, datum)
                np.testing.assert_allclose(logprobs, new.detach().numpy(), atol=1e-5, rtol=0)
                own_loss = own_loss + rule(new, datum)
            own_loss.backward()
            assert metrics["loss:sum"] == pytest.approx(float(own_loss.detach()), rel=1e-4)
            total += float(own_loss.detach())
        if adam["grad_clip_norm"]:
            torch.nn.utils.clip_grad_norm_(weights, adam["grad_clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        stepped = fresh.in_order("optim_step", model_id, adam_params=adam)
        assert stepped["metrics"]["grad_norm"] > 0 and math.isfinite(total), stepped
    end = fresh.in_order("save_weights_for_sampler", model_id, path="end")["path"]
    served_adapter = load_file(fresh.folder(end) / "adapter_model.safetensors")
    own = {
        name.replace(".default", ""): each.detach() for name, each in reference.named_parameters() if each.requires_grad
    }
    assert served_adapter.keys() == own.keys() and len(own) == 2 * 7 * 2
    first = load_file(fresh.folder(start) / "adapter_model.safetensors")
    for name, tensor in served_adapter.items():
        torch.testing.assert_close(tensor, own[name], atol=1e-5, rtol=0)
        assert float((tensor - first[name]).abs().max()) > 5e-4, f"{name} was not trained"


def test_several_targets_of_a_token_count_with_their_weights(fresh: Client, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model_id = fresh.model(fresh.session())
    tokens, targets = RNG.integers(0, 500, 6), RNG.integers(0, 500, (6, 3))
    weights = RNG.uniform(0, 1, (6, 3))
    datum = {"tokens": tokens, "target_tokens": targets, "weights": weights}
    (found,), metrics = fresh.forward_backward(model_id, [datum], "cross_entropy")
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        own = torch.log_softmax(base(input_ids=torch.tensor(tokens)[None]).logits[0], -1).gather(
            1, torch.tensor(targets)
        )
    np.testing.assert_allclose(found, own.numpy(), atol=1e-5, rtol=0)
    assert metrics["loss:sum"] == pytest.approx(-float((own.numpy() * weights).sum()), rel=1e-5)


# --- order, and once -------------------------------------------------------------------------------


def datum_of(length: int = 6) -> Datum:
    return {"tokens": RNG.integers(0, 500, length), "target_tokens": RNG.integers(0, 500, length)}


def test_requests_are_done_in_the_order_of_their_numbers_and_each_once(fresh: Client) -> None:
    session_id = fresh.session()
    data = [datum_of()]
    norms: list[float] = []
    for number, seq_ids in enumerate(((1, 2), (2, 1), (2, 1, 1, 2))):  # as sent; of the last each twice
        model_id = fresh.model(session_id, number)
        promised = dict[int, str]()
        for seq_id in seq_ids:
            body: Any = message_of(model_id, seq_id, data, "cross_entropy")
            if seq_id == 2:
                body = {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.0}}
            status, promise = fresh.post("optim_step" if seq_id == 2 else "forward_backward", body)
            assert status == 200 and promised.setdefault(seq_id, promise["request_id"]) == promise["request_id"]
        norms.append(fresh.retrieve(promised[2])["metrics"]["grad_norm"])
    assert norms[0] > 0 and norms == [norms[0]] * 3


def test_a_request_that_fails_changes_nothing_and_the_next_one_goes_on(fresh: Client) -> None:
    session_id = fresh.session()
    data = [datum_of(), datum_of()]
    norms: list[float] = []
    model_id = ""
    for number in range(2):
        model_id, fresh.seq_id = fresh.model(session_id, number), 0
        if number:
            bad = [*data, {**datum_of(), "weights": np.full(6, np.inf)}]
            error = fresh.forward_backward(model_id, bad, "cross_entropy")
            assert error == {
                "error": "data.2.loss_fn_inputs.weights: a value is not finite",
                "category": "user",
            }
        fresh.forward_backward(model_id, data, "cross_entropy")
        norms.append(fresh.in_order("optim_step", model_id, adam_params={})["metrics"]["grad_norm"])
    assert norms[0] == norms[1]
    error = fresh.in_order("optim_step", model_id, adam_params={})
    assert error["error"] == "optim_step: there is no gradient; call forward_backward first"


def test_no_refusal_leaves_a_gap_in_the_order_of_a_model(fresh: Client) -> None:
    model_id = fresh.model(fresh.session())
    refused: tuple[tuple[str, Any, str], ...] = (
        ("forward_backward", message_of(model_id, 1, [{**datum_of(2), "tokens": [1, 9999]}], "cross_entropy"), "9999"),
        ("optim_step", {"adam_params": {"beta1": 2.0}}, "adam_params.beta1"),
        ("save_weights", {"path": "../x"}, "is no name of weights"),
        ("save_weights", {}, "give the weights a name"),
        ("save_weights_for_sampler", {}, "give a path, or a sampling_session_seq_id"),
        ("save_weights_for_sampler", {"path": "x", "ttl_seconds": -1}, "ttl_seconds"),
        ("load_weights", {"path": 3, "optimizer": False}, "path"),
    )
    for seq_id, (endpoint, body, needle) in enumerate(refused, 1):
        numbered = body if isinstance(body, bytes) else {"model_id": model_id, "seq_id": seq_id, **body}
        refusal = fresh.refusal(endpoint, numbered)
        assert needle in refusal, refusal
    fresh.seq_id = len(refused)
    assert "no gradient" in fresh.in_order("optim_step", model_id, adam_params={})["error"]


def test_a_request_beyond_the_bound_is_refused_in_its_turn(fresh: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_http, "MAX_BODY_BYTES", 100_000)
    model_id = fresh.model(fresh.session())
    error = fresh.forward_backward(model_id, [datum_of(20_000)], "cross_entropy")
    assert error == {"error": "body: more than 100000 bytes", "category": "user"}
    assert fresh.forward_backward(model_id, [datum_of()], "cross_entropy")[1]["loss:sum"] > 0, "the next one goes on"
    for body in (b"\x00" * 200_000, b"\n" + bytes([120]) + b"\xff" * 200_000, b"\n\x00\x10" + b"\xff" * 200_000):
        assert fresh.post("forward_backward", body)[0] in (404, 413)


def test_a_forward_pass_alone_leaves_no_gradient(fresh: Client) -> None:
    model_id, data = fresh.model(fresh.session()), [datum_of()]
    only, loss = fresh.forward_backward(model_id, data, "cross_entropy", is_forward_only=True)
    assert "no gradient" in fresh.in_order("optim_step", model_id, adam_params={})["error"]
    both, same = fresh.forward_backward(model_id, data, "cross_entropy")
    np.testing.assert_allclose(only[0], both[0], atol=1e-6)
    assert loss["loss:sum"] == pytest.approx(same["loss:sum"], rel=1e-6)


# --- saved weights, samples ------------------------------------------------------------------------


def train(client: Client, model_id: str, data: Sequence[Datum]) -> None:
    client.forward_backward(model_id, data, "cross_entropy")
    client.in_order("optim_step", model_id, adam_params={"learning_rate": 1e-2})


def adapter_of(client: Client, model_id: str, name: str) -> dict[str, torch.Tensor]:
    path = client.in_order("save_weights_for_sampler", model_id, path=name)["path"]
    return load_file(client.folder(path) / "adapter_model.safetensors")


@pytest.mark.parametrize("optimizer", [True, False])
def test_training_goes_on_from_saved_weights_as_if_it_had_not_stopped(fresh: Client, optimizer: bool) -> None:
    session_id, first, second = fresh.session(), [datum_of()], [datum_of()]
    model_id = fresh.model(session_id)
    train(fresh, model_id, first)
    path = fresh.in_order("save_weights", model_id, path="middle")["path"]
    assert "already" in fresh.in_order("save_weights", model_id, path="middle")["error"]
    train(fresh, model_id, second)
    whole = adapter_of(fresh, model_id, "whole")
    loaded = fresh.result(
        "load_weights", {"session_id": session_id, "model_seq_id": 1, "path": path, "optimizer": optimizer}
    )
    fresh.seq_id = 0
    train(fresh, loaded["model_id"], second)
    resumed = adapter_of(fresh, loaded["model_id"], "resumed")
    is_same = all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    assert is_same is optimizer
    status, info = fresh.post("weights_info", {"tinker_path": path})
    assert status == 200 and info["lora_rank"] == 4 and info["train_unembed"] is False


def sampled(client: Client, sampler_id: str, seq_id: int, prompt: Sequence[int], **params: Any) -> Any:
    body = {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "num_samples": params.pop("num_samples", 3),
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
        "prompt_logprobs": params.pop("prompt_logprobs", None),
        "sampling_params": {"max_tokens": 6, "seed": 11, **params},
    }
    reply = client.result("asample", body)
    return wire.TinkerSampleReply.FromString(reply) if isinstance(reply, bytes) else reply


def ids_of(reply: Any) -> list[list[int]]:
    return [np.frombuffer(each.token_ids, "<i4").tolist() for each in reply.sequences]


def test_samples_are_of_the_weights_that_were_saved_with_the_logprobs_that_training_has(fresh: Client) -> None:
    session_id = fresh.session()
    model_id = fresh.model(session_id)
    train(fresh, model_id, [datum_of()])
    saved = fresh.in_order("save_weights_for_sampler", model_id, sampling_session_seq_id=0)["sampling_session_id"]
    prompt = [7, 8, 9]
    before = sampled(fresh, saved, 0, prompt, prompt_logprobs=True)
    answer = ids_of(before)[0]
    tokens = [*prompt, *answer]
    datum = {"tokens": tokens[:-1], "target_tokens": np.array(tokens[1:])}
    (found,), _ = fresh.forward_backward(model_id, [datum], "cross_entropy")
    scores = np.frombuffer(before.prompt_logprobs, "<f4")
    assert np.isnan(scores[0])
    np.testing.assert_allclose([*scores[1:], *np.frombuffer(before.sequences[0].logprobs, "<f4")], found, atol=1e-5)
    train(fresh, model_id, [datum_of()])
    assert ids_of(sampled(fresh, saved, 1, prompt)) == ids_of(before), "a sampler's weights do not change"
    newer = fresh.in_order("save_weights_for_sampler", model_id, sampling_session_seq_id=1)["sampling_session_id"]
    assert ids_of(sampled(fresh, newer, 0, prompt, num_samples=16)) != ids_of(
        sampled(fresh, saved, 2, prompt, num_samples=16)
    )
    assert len(ids_of(sampled(fresh, fresh.sampler(session_id, 2), 0, prompt))) == 3
    path = fresh.in_order("save_weights_for_sampler", model_id, path="named")["path"]
    named = fresh.sampler(session_id, 3, model_path=path)
    assert ids_of(sampled(fresh, named, 0, prompt, num_samples=16)) == ids_of(
        sampled(fresh, newer, 1, prompt, num_samples=16)
    )


def prompt_reply(client: Client, sampler: str, number: int, tokens: list[int], **asked: Any) -> Any:
    body = {"sampling_session_id": sampler, "seq_id": number, "prompt": {"chunks": [{"tokens": tokens}]}}
    reply = client.result("asample", {**body, "sampling_params": {"max_tokens": 1}, **asked})
    assert isinstance(reply, bytes), reply
    return wire.TinkerSampleReply.FromString(reply)


def test_the_likeliest_and_the_named_tokens_of_a_prompt_have_the_log_probs_of_torch(
    fresh: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scores, "PLACES", 4)
    tokens = list(range(3, 14))
    with torch.no_grad():
        network: Any = load_target(str(folder)).network
        logprobs = torch.log_softmax(network(input_ids=torch.tensor([tokens])).logits[0].float(), dim=-1)
    sampler = fresh.sampler(fresh.session())
    top = prompt_reply(fresh, sampler, 0, tokens, topk_prompt_logprobs=3, prompt_logprobs_last_n=9).prompt_top
    ids, values = (
        np.frombuffer(each, kind).reshape(11, 3) for each, kind in ((top.token_ids, "<i4"), (top.logprobs, "<f4"))
    )
    assert (ids[:2] == 0).all() and (values[:2] == -99999.0).all()
    likeliest = logprobs[1:-1].topk(3)
    np.testing.assert_array_equal(ids[2:], likeliest.indices.numpy())
    np.testing.assert_allclose(values[2:], likeliest.values.numpy(), atol=1e-5)
    named = {(0, 1): 7, (5, 0): 9, (5, 1): 11, (9, 0): 20}
    wanted = [float(logprobs[row, token]) for (row, _), token in named.items()]
    dense = np.full((10, 2), -1)
    for cell, token in named.items():
        dense[cell] = token
    target: dict[str, Any] = {"dtype": "int64", "shape": [10, 2], "data": dense.reshape(-1).tolist()}
    tensor = prompt_reply(fresh, sampler, 1, tokens, target_prompt_logprobs=target).prompt_targets
    scores = np.frombuffer(tensor.dense, "<f4").reshape(tensor.shape)
    np.testing.assert_allclose([scores[cell] for cell in named], wanted, atol=1e-5)
    assert (scores[dense < 0] == 0).all() and tensor.element_type == 1
    starts = [0, 1, 1, 1, 1, 1, 3, 3, 3, 3, 4]
    sparse = {"data": list(named.values()), "sparse_crow_indices": starts, "sparse_col_indices": [1, 0, 1, 0]}
    tensor = prompt_reply(fresh, sampler, 2, tokens, target_prompt_logprobs={**target, **sparse}).prompt_targets
    np.testing.assert_allclose(np.frombuffer(tensor.sparse.values, "<f4"), wanted, atol=1e-5)
    assert np.frombuffer(tensor.sparse.row_starts, "<i8").tolist() == starts
    for wrong in (
        {"shape": [9, 2]},
        {"shape": [10, 3]},
        {**sparse, "sparse_crow_indices": [0, 9]},
        {"data": [10**6] * 20},
    ):
        body = {"sampling_session_id": sampler, "seq_id": 3, "prompt": {"chunks": [{"tokens": tokens}]}}
        refusal = fresh.refusal("asample", {**body, "target_prompt_logprobs": {**target, **wrong}})
        assert "this prompt has 10 rows" in refusal, refusal


def test_a_run_is_described_by_what_it_saved_until_that_is_deleted(fresh: Client) -> None:
    notes = {"renderer_name": "role_colon"}
    body = {"session_id": fresh.session(), "model_seq_id": 0, "base_model": NAME, "user_metadata": notes}
    run = fresh.result("create_model", {**body, "lora_config": {"rank": 4}})["model_id"]
    assert fresh.ask("GET", f"training_runs/{run}")[0] == 404
    path = fresh.in_order("save_weights_for_sampler", run, path="end")["path"]
    status, about = fresh.ask("GET", f"training_runs/{run}")
    assert status == 200 and about["base_model"] == NAME and about["lora_rank"] == 4
    assert about["user_metadata"] == notes
    assert fresh.ask("DELETE", f"training_runs/{run}/checkpoints/sampler_weights/end")[0] == 200
    assert not fresh.folder(path).exists()
    for verb, wrong in (("GET", run), ("GET", "*"), ("DELETE", f"{run}/checkpoints/sampler_weights/end")):
        assert fresh.ask(verb, f"training_runs/{wrong}")[0] == 404


def test_a_stop_string_and_a_stop_token_end_an_answer(fresh: Client) -> None:
    sampler_id, prompt = fresh.sampler(fresh.session()), [5]
    whole = sampled(fresh, sampler_id, 0, prompt, num_samples=1, max_tokens=40)
    (ids,) = ids_of(whole)
    at = next(place for place, token in enumerate(ids) if token > 256)  # the first \boxed{}
    assert ids_of(sampled(fresh, sampler_id, 1, prompt, num_samples=1, max_tokens=40, stop=["}"])) == [ids[: at + 1]]
    ended = sampled(fresh, sampler_id, 2, prompt, num_samples=1, max_tokens=40, stop=[ids[3]])
    assert ids_of(ended) == [ids[: ids.index(ids[3]) + 1]] and ended.sequences[0].stop_reason == 0


# --- bounds and refusals ---------------------------------------------------------------------------


def test_nobody_is_answered_without_the_key(fresh: Client) -> None:
    stranger = Client(fresh.port, fresh.store, "tml-another-key-of-a-test")
    assert stranger.post("create_session", {})[0] == 401
    assert stranger.post("nothing", {})[0] == 401
    assert fresh.post("nothing", {}) == (404, {"detail": "POST /api/v1/nothing is not served here"})
    connection = http.client.HTTPConnection("127.0.0.1", fresh.port, timeout=HANG_S)
    connection.request("GET", "/api/v1/healthz")
    assert connection.getresponse().read() == b'{"status":"ok"}'
    connection.close()


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"tokens": []}, "model_input: 0 tokens, there must be 1 to 1024"),
        ({"tokens": [1] * 1025}, "1025 tokens, there must be 1 to 1024"),
        ({"tokens": [1, 513]}, "token 513 is outside the vocabulary of 513"),
        ({"target_tokens": np.array([1, -1])}, "outside the vocabulary"),
        ({"target_tokens": np.array([1, 2, 3])}, "shape [3], the first must be the 2 tokens of model_input"),
        ({"target_tokens": np.array([1.0, 2.0])}, "token ids (int64) are missing"),
        ({"weights": np.array([1.0])}, "shape [1], that of target_tokens is [2]"),
        (
            {"clip_low_threshold": np.array([0.8, 0.8])},
            "clip_low_threshold: cross_entropy takes target_tokens, weights",
        ),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused_with_their_place(
    fresh: Client, change: dict[str, Any], needle: str
) -> None:
    model_id = fresh.model(fresh.session())
    datum = {"tokens": [1, 2], "target_tokens": np.array([2, 3]), **change}
    fresh.seq_id += 1
    refusal = fresh.refusal("forward_backward", message_of(model_id, 1, [datum], "cross_entropy"))
    assert "data.0" in refusal and needle in refusal, refusal


@pytest.mark.parametrize(
    ("loss", "config", "needle"),
    [
        ("stable_reinforce", {}, "its formula is not public"),
        ("custom", {}, "the SDK computes them itself"),
        ("dpo", {}, "there are cross_entropy, importance_sampling, ppo, cispo, dro, gspo"),
        ("ppo", {"clip": 0.1}, "loss_fn_config.clip: ppo has clip_low_threshold, clip_high_threshold"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold 1.5 must be in [0, 1]"),
        ("dro", {"beta": -1.0}, "loss_fn_config.beta: -1.0 must be at least 0"),
        ("ppo", {"clip_low_threshold": math.nan}, "is not finite"),
        ("importance_sampling", {}, "data.0.loss_fn_inputs.logprobs: missing, importance_sampling takes it"),
    ],
)
def test_a_loss_that_is_not_served_is_refused_by_name(
    fresh: Client, loss: str, config: dict[str, float], needle: str
) -> None:
    model_id = fresh.model(fresh.session())
    refusal = fresh.refusal("forward_backward", message_of(model_id, 1, [datum_of()], loss, config=config))
    assert needle in refusal, refusal


@pytest.mark.parametrize(
    ("endpoint", "body", "needle"),
    [
        ("create_model", {"base_model": "other/model"}, "base_model: 'other/model' is not served; 'owner/tiny' is"),
        ("create_model", {"lora_config": None}, "only adapters are trained here"),
        ("create_model", {"lora_config": {"rank": 0}}, "lora_config.rank: Input should be greater than or equal to 1"),
        ("create_model", {"lora_config": {"rank": 4096}}, "lora_config.rank"),
        ("create_model", {"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type: Input should be 'adamw'"),
        ("create_model", {"session_id": "nobody"}, "session_id: 'nobody' is unknown"),
        ("load_weights", {"path": "tinker://../weights/x", "optimizer": False}, "is no tinker://RUN/weights/NAME"),
        ("load_weights", {"path": "tinker://run/weights/..", "optimizer": False}, "is no tinker://RUN/weights/NAME"),
        ("load_weights", {"path": "tinker://run/weights/x", "optimizer": False}, "nothing is saved at"),
        ("create_sampling_session", {"base_model": "x", "sampling_session_seq_id": 0}, "'x' is not served"),
        ("asample", {"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": []}}, "is unknown"),
        ("retrieve_future", {"request_id": "x"}, "is unknown, or was answered long ago"),
        ("get_info", {"model_id": "x"}, "session_id: 'x' is unknown"),
    ],
)
def test_a_request_that_cannot_be_honoured_is_refused_by_field(
    fresh: Client, endpoint: str, body: dict[str, Any], needle: str
) -> None:
    plain = {"session_id": fresh.session(), "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 2}}
    if endpoint == "load_weights":
        del plain["lora_config"]
    refusal = fresh.refusal(endpoint, {**plain, **body})
    assert needle in refusal, refusal


@pytest.mark.parametrize(
    ("params", "needle"),
    [
        ({"stop": []}, "would go on behind the end token"),
        ({"temperature": 0.001}, "must be 0 (greedy) or at least 0.01"),
        ({"max_tokens": 5000}, "max_tokens: 5000, the context has 1023 left"),
        ({"top_p": 2.0}, "sampling_params.top_p"),
    ],
)
def test_samples_that_cannot_be_made_are_refused(fresh: Client, params: dict[str, Any], needle: str) -> None:
    body = {
        "sampling_session_id": fresh.sampler(fresh.session()),
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": params,
    }
    status, reply = fresh.post("asample", body)
    assert status in (400, 422) and needle in reply["detail"], reply
    for field, value in (("record_stability_info", True), ("topk_prompt_logprobs", 21), ("prompt_alt_tokens_k", 1)):
        status, reply = fresh.post("asample", {**body, "sampling_params": {}, field: value})
        assert status == 422 and reply["detail"].startswith(field), reply
    image = {"chunks": [{"type": "image", "data": "", "format": "png"}]}
    status, reply = fresh.post("asample", {**body, "prompt": image, "sampling_params": {}})
    assert status == 422 and "no images or audio" in reply["detail"], reply


def test_no_bytes_make_the_server_fail(fresh: Client, caplog: pytest.LogCaptureFixture) -> None:
    model_id = fresh.model(fresh.session())
    good = message_of(model_id, 1, [datum_of(), datum_of(3)], "cross_entropy")
    for length in (0, 1, 7, len(good) // 2, len(good) - 1):
        assert fresh.post("forward_backward", good[:length])[0] in (200, 400, 404)
    for _ in range(200):
        body = bytearray(good)
        for place in RNG.integers(0, len(body), 3):
            body[place] = RNG.integers(0, 256)
        status, reply = fresh.post("forward_backward", bytes(body))
        assert status in (200, 400, 404), reply
    for body in (b"", b"[]", b"null", b"[" * 100_000, b'{"session_id": 3}', b"\xff"):
        assert fresh.post("create_model", body)[0] in (400, 422)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_session_that_falls_silent_ends_with_what_it_held(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinker_sessions, "MAX_MODELS", 1)
    with served(folder, tmp_path / "store") as client:
        session_id = client.session()
        model_id = client.model(session_id)
        made = client.in_order("save_weights_for_sampler", model_id, sampling_session_seq_id=0)
        other = client.session()
        refused = client.result(
            "create_model",
            {"session_id": other, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 2}},
        )
        assert "1 models are in training, of at most 1" in refused["error"]
        monkeypatch.setattr(tinker_sessions, "IDLE_S", 0.0)
        assert client.post("session_heartbeat", {"session_id": session_id})[0] == 410
        monkeypatch.setattr(tinker_sessions, "IDLE_S", 300.0)
        assert client.post("get_info", {"model_id": model_id})[0] == 404
        body = {
            "sampling_session_id": made["sampling_session_id"],
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": [1]}]},
        }
        assert client.post("asample", body)[0] == 404
        client.model(client.session())
        monkeypatch.setattr(tinker_sessions, "AWAY_S", 0.0)  # of those who are silent one makes room
        client.model(client.session())


def test_weights_that_have_expired_are_not_loaded_and_then_deleted(
    fresh: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = fresh.session()
    model_id = fresh.model(session_id)
    path = fresh.in_order("save_weights", model_id, path="short", ttl_seconds=3600)["path"]
    assert fresh.folder(path).is_dir()
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 4000)
    error = fresh.result("load_weights", {"session_id": session_id, "model_seq_id": 1, "path": path, "optimizer": True})
    assert "has expired" in error["error"]
    assert "path" in fresh.in_order("save_weights", model_id, path="next")
    assert not fresh.folder(path).exists()


def test_the_base_weights_stay_as_they_were(folder: Path, tmp_path: Path) -> None:
    model = load_target(str(folder))
    settings = TinkerSettings(
        name=NAME, listen="127.0.0.1:0", key=KEY, max_rows=8, device="cpu", store=tmp_path / "store"
    )
    started = start_tinker(model, settings)
    try:
        client = Client(int(started.url.rpartition(":")[2]), settings.store)
        train(client, client.model(client.session()), [datum_of()])
    finally:
        end_tinker(started)
    assert weights_digest(published_state(model.network)) == model.base_digest
