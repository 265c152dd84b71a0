"""Dialects of OpenAI-style servers: requests to vLLM and SGLang, and their replies.

Invariant: tokens are the ids that the server sampled, never a text tokenised again; a log-prob that the server did not
give is None, never a guess.

Sources: vLLM `entrypoints/openai/completion/protocol.py` (return_token_ids, prompt_logprobs), SGLang
`managers/io_struct.py` (native /generate: its completions do not score prompts) and `openai/protocol.py`.
"""

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from swarm.errors import ConfigError, Unavailable
from swarm.generation.http_json import JsonClient, Refusal
from swarm.types import FinishReason, Sampling

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
_NOISE: Final = 1e-4  # by which a log-prob may exceed 0, from a server's low precision
_FINISHES: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteCompletion:
    """One response as the server made it."""

    token_ids: list[int]
    logprobs: list[float] | None  # of each token
    finish: FinishReason


class Server(Protocol):
    """A server that speaks one dialect of the protocol."""

    model: str  # served name

    def complete(self, model: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> RemoteCompletion:
        """Samples one completion of a prompt (blocking); temperature 0 is greedy.

        Args:
            model: served name, or the name under which the server loaded a version.
            prompt: token ids.

        Raises:
            Unavailable: the server gives no answer or a malformed one, or no longer has that version.
            ConfigError: the server refuses the request, or returns no token ids.
            TooLarge: the reply is too long.
            Cancelled: `JsonClient.cancel` was called.
        """
        ...

    def score(self, model: str, sequence: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of all tokens of a sequence but the first (blocking). Raises as `complete`."""
        ...


class VllmServer:
    """vLLM, or another server whose completions take and return token ids as vLLM's do."""

    def __init__(self, client: JsonClient, model: str, eos_ids: Collection[int]) -> None:
        self.model = model
        self._client = client
        self._eos_ids = sorted(eos_ids)
        self._scoring = threading.Lock()

    def complete(self, model: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> RemoteCompletion:
        """Samples a completion; sends every parameter, since the server's defaults may come from the model's folder."""
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
            "seed": seed,
            "stop_token_ids": self._eos_ids,
            "logprobs": 0,  # the sampled token's alone
            "return_token_ids": True,
        }
        return _read(self._completions(body), lambda reply: self._completion(reply, sampling.max_new_tokens))

    def score(self, model: str, sequence: Sequence[int]) -> list[float]:
        """Scores a sequence by `prompt_logprobs`; the server also makes one token, which is dropped.

        Sends one request at a time: with adapters enabled, vLLM 0.32 mixes up the rows of a batch and crashes.
        """
        body = {
            "model": model,
            "prompt": list(sequence),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }

        def scores(data: Any) -> list[float]:
            entries = data["choices"][0]["prompt_logprobs"]
            if len(entries) != len(sequence):
                raise ValueError(f"{len(entries)} log-probs for {len(sequence)} tokens")
            return [float(each[str(token)]["logprob"]) for each, token in zip(entries[1:], sequence[1:], strict=True)]

        with self._scoring:
            return _read(self._completions(body), scores)

    def _completions(self, body: dict[str, Any]) -> Any:
        try:
            return self._client.call("POST", "/v1/completions", body)
        except Refusal as error:
            if error.status == 404 and body["model"] != self.model:
                raise Unavailable(f"the server lost an adapter: it was restarted ({error})") from error
            raise

    def _completion(self, reply: Any, most: int) -> RemoteCompletion:
        choice = reply["choices"][0]
        if choice.get("token_ids") is None:
            raise ConfigError(
                f"engine.url {self._client.url}: the server returns no token ids, and a text tokenised again is not "
                "what was sampled; use vLLM 0.10.2 or newer, or SGLang"
            )
        ids = [int(token) for token in choice["token_ids"]]
        given = (choice.get("logprobs") or {}).get("token_logprobs")
        return _checked(ids, given, choice["finish_reason"], self._eos_ids, most)


class SglangServer:
    """SGLang's own /generate, which takes and returns token ids in every version."""

    def __init__(self, client: JsonClient, model: str, eos_ids: Collection[int]) -> None:
        self.model = model
        self._client = client
        self._eos_ids = sorted(eos_ids)

    def complete(self, model: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> RemoteCompletion:
        """Samples a completion; sends every parameter, since --preferred-sampling-params may set other defaults.

        The seed has an effect only if the server was started with --enable-deterministic-inference.
        """
        body = {
            "input_ids": list(prompt),
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": sampling.repetition_penalty,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "stop_token_ids": self._eos_ids,
                "sampling_seed": seed % 2**31,
            },
            "return_logprob": True,
        }
        return _read(self._generate(model, body), lambda reply: self._completion(reply, sampling.max_new_tokens))

    def score(self, model: str, sequence: Sequence[int]) -> list[float]:
        """Scores a sequence by the log-probs of the input; the server also makes one token, which is dropped."""
        body = {
            "input_ids": list(sequence),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }

        def scores(data: Any) -> list[float]:
            entries = data["meta_info"]["input_token_logprobs"]
            if [int(entry[1]) for entry in entries] != list(sequence):
                raise ValueError("log-probs of other tokens than those that were asked for")
            return [float(entry[0]) for entry in entries[1:]]

        return _read(self._generate(model, body), scores)

    def _generate(self, model: str, body: dict[str, Any]) -> Any:
        """Reply to a request. Raises Unavailable if the server reports other weights than the version `model`."""
        reply = self._client.call("POST", "/generate", body)
        has = _read(reply, lambda data: data["meta_info"].get("weight_version"))
        if model != self.model and has is not None and has != model:
            raise Unavailable(f"the server has weights {has!r} in place of {model!r}: it was restarted or given others")
        return reply

    def _completion(self, reply: Any, most: int) -> RemoteCompletion:
        entries = reply["meta_info"]["output_token_logprobs"]
        ids = [int(entry[1]) for entry in entries]
        finish = reply["meta_info"]["finish_reason"]["type"]
        return _checked(ids, [entry[0] for entry in entries], finish, self._eos_ids, most)


def find_server(client: JsonClient, model: str, eos_ids: Collection[int]) -> Server:
    """Detects the dialect of a server.

    Args:
        model: name of the served model; "": the first one that the server lists.

    Raises:
        ConfigError: the server lists no models, or not the model `model`.
        Unavailable: the server does not answer.
    """
    try:
        listed = client.call("GET", "/v1/models")["data"]
        cards: dict[str, str] = {str(card["id"]): str(card.get("owned_by", "")) for card in listed}
    except (KeyError, TypeError, AttributeError, Refusal) as error:
        raise ConfigError(f"engine.url {client.url}: no OpenAI-compatible server there: {error}") from error
    name = model or next(iter(cards), "")
    if name not in cards:
        raise ConfigError(f"engine.options.model {model!r}: the server at {client.url} has {sorted(cards)}")
    kind = SglangServer if cards[name] == "sglang" else VllmServer
    return kind(client, name, eos_ids)


def log_probs_are_scaled(server: Server, model: str, prompts: Sequence[Sequence[int]]) -> bool | None:
    """True if a server's log-probs are those at the sampling temperature; None if it returns none (blocking).

    vLLM returns them at temperature 1 unless it was started with `--logprobs-mode processed_logprobs`; SGLang scales
    them. The check compares the log-probs of samples at temperature 2 with their scores at temperature 1: if the
    log-probs are scaled, most of them differ. False also if there are too few tokens to tell: then log-probs are used
    only at temperature 1, where both are equal.
    """
    differences: list[float] = []
    for seed in range(_MOST_PROBES):
        prompt = prompts[seed % len(prompts)]
        made = server.complete(model, prompt, Sampling(temperature=2.0, max_new_tokens=_PROBE_TOKENS), seed)
        if made.logprobs is None:
            return None
        scores = server.score(model, [*prompt, *made.token_ids])[len(prompt) - 1 :]
        differences += [abs(one - two) for one, two in zip(made.logprobs, scores, strict=True)]
        if len(differences) >= _ENOUGH_TOKENS:
            return 2 * sum(difference > _RAW_NATS for difference in differences) > len(differences)
    logger.warning(
        "too few tokens to tell the temperature of the server's log-probs: none are claimed at others than 1",
        extra={"num_tokens": len(differences), "needed": _ENOUGH_TOKENS},
    )
    return False


_MOST_PROBES: Final = 16
_PROBE_TOKENS: Final = 8  # so that several prompts and seeds take part
_ENOUGH_TOKENS: Final = 32
_RAW_NATS: Final = 0.25  # nearly all numeric noise is below; halving logits moves nearly every log-prob by more


def _read(reply: object, read: Callable[[Any], Value]) -> Value:
    """Value that `read` takes from a reply. Raises Unavailable if the reply is malformed."""
    try:
        return read(reply)
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Unavailable(f"the server's reply is malformed: {type(error).__name__}: {error}") from error


def _checked(
    ids: list[int], given: list[float | None] | None, finish: str | None, eos_ids: list[int], most: int
) -> RemoteCompletion:
    reason = _FINISHES.get(finish or "", FinishReason.ABORTED)
    if reason is FinishReason.STOP and (not ids or ids[-1] not in eos_ids):
        logger.warning("the server ended a response without an end token; it will not be trained on")
        reason = FinishReason.ABORTED
    if reason is FinishReason.LENGTH and len(ids) < most:  # other nodes would refuse it, and charge us
        logger.warning(
            "the server cut a response off early; it will not be trained on: give it a longer context",
            extra={"num_tokens": len(ids), "max_new_tokens": most},
        )
        reason = FinishReason.ABORTED
    logprobs = None if given is None else [float(value) for value in given if value is not None]
    if logprobs is not None and (len(logprobs) != len(ids) or not all(value <= _NOISE for value in logprobs)):
        logger.warning("the server's log-probs are no log-probs of its tokens and are left out")
        logprobs = None
    if logprobs is not None:
        logprobs = [min(value, 0.0) for value in logprobs]
    return RemoteCompletion(token_ids=ids, logprobs=logprobs, finish=reason)
