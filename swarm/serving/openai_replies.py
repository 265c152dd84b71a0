"""Replies to OpenAI's clients, with the token fields of vLLM.

Every reply names its policy version: `system_fingerprint` is the newest version; `policy_versions` of a choice lists
each version with its first token, in case weights changed during the answer.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Any

from swarm.interfaces import Tokenizer
from swarm.serving.answers import Answer, AnswerPiece
from swarm.serving.turn_form import ChatTurn
from swarm.types import FinishReason, JsonDict, PolicyVersion, short

_FINISHES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}


def fingerprint(version: PolicyVersion) -> str:
    """A version as one word: its policy id, shortened, its step, and the digest of its weights, if known."""
    digest = f"-{version.digest.hex()[:16]}" if version.digest else ""
    return f"{short(version.policy_id)}-{version.step}{digest}".replace(" ", "_")


def version_fields(version: PolicyVersion) -> JsonDict:
    """A version as JSON."""
    return {"policy_id": version.policy_id, "step": version.step, "digest": version.digest.hex()}


def chat_choice(
    tokenizer: Tokenizer, turn: ChatTurn, index: int, *, has_logprobs: bool, has_token_ids: bool
) -> JsonDict:
    """A choice of /v1/chat/completions."""
    answer, calls = turn.answer, call_fields(turn)
    message = {"role": "assistant", "content": turn.content or (None if calls else ""), "refusal": None}
    choice: JsonDict = {
        "index": index,
        "message": message | ({"tool_calls": calls} if calls else {}),
        "logprobs": chat_logprobs(tokenizer, as_piece(answer)) if has_logprobs else None,
    }
    finish = {"finish_reason": "tool_calls"} if calls else {}
    return choice | _ending(answer) | finish | _ids(answer.completion.token_ids, has_token_ids)


def chat_deltas(turn: ChatTurn) -> list[JsonDict]:
    """Deltas of a streamed turn that was made as a whole, without role: its content, then each call in two parts."""
    deltas: list[JsonDict] = [{"content": turn.content}] if turn.content or not turn.calls else []
    for index, call in enumerate(call_fields(turn)):
        arguments = call["function"]["arguments"]
        opened = call | {"index": index, "function": call["function"] | {"arguments": ""}}
        deltas.append({"tool_calls": [opened]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
    return deltas


def call_fields(turn: ChatTurn) -> list[JsonDict]:
    """The calls of a turn as a message has them, each with a new id."""
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for call in turn.calls
    ]


def text_choice(
    tokenizer: Tokenizer, answer: Answer, index: int, *, num_logprobs: int | None, has_token_ids: bool
) -> JsonDict:
    """A choice of /v1/completions."""
    logprobs = None if num_logprobs is None else text_logprobs(tokenizer, as_piece(answer), num_logprobs, 0)
    choice: JsonDict = {"index": index, "text": answer.text, "logprobs": logprobs}
    if has_token_ids:
        choice["prompt_token_ids"] = list(answer.prompt_ids)
    return choice | _ending(answer) | _ids(answer.completion.token_ids, has_token_ids)


def token_choice(answer: Answer, index: int) -> JsonDict:
    """A choice of /inference/v1/generate: ids without text, with log-probs if known."""
    ids, logprobs = answer.completion.token_ids, answer.completion.logprobs
    content = None
    if logprobs is not None:
        tops = answer.completion.top or ((),) * len(ids)
        content = [
            {
                "token": f"token_id:{token}",
                "logprob": logprob,
                "bytes": None,
                "top_logprobs": [{"token": f"token_id:{i}", "logprob": _finite(v), "bytes": None} for i, v in top],
            }
            for token, logprob, top in zip(ids, logprobs, tops, strict=True)
        ]
    choice: JsonDict = {"index": index, "logprobs": None if content is None else {"content": content}}
    return choice | _ending(answer) | _ids(ids, True)


def chat_logprobs(tokenizer: Tokenizer, piece: AnswerPiece) -> JsonDict | None:
    """`logprobs` of a chat choice or chunk; None if the log-probs are not known."""
    if len(piece.logprobs) != len(piece.token_ids):
        return None
    tops = piece.top or ((),) * len(piece.token_ids)
    return {
        "content": [
            _entry(tokenizer, token, logprob) | {"top_logprobs": [_entry(tokenizer, i, value) for i, value in top]}
            for token, logprob, top in zip(piece.token_ids, piece.logprobs, tops, strict=True)
        ],
        "refusal": None,
    }


def text_logprobs(tokenizer: Tokenizer, piece: AnswerPiece, num_top: int, offset: int) -> JsonDict | None:
    """`logprobs` of a completion, None if not known; `offset`: characters of the answer before this piece."""
    if len(piece.logprobs) != len(piece.token_ids):
        return None
    texts = [tokenizer.decode([token]) for token in piece.token_ids]
    offsets = [offset]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    tops = [{tokenizer.decode([token]): _finite(value) for token, value in place[:num_top]} for place in piece.top]
    return {
        "tokens": texts,
        "token_logprobs": list(piece.logprobs),
        "top_logprobs": tops if num_top else None,
        "text_offset": offsets[: len(texts)],
    }


def usage(answers: Sequence[Answer], num_prompts: int) -> JsonDict:
    """Token counts of answers, given prompt by prompt and equally many for each; each prompt counts once."""
    each = max(1, len(answers) // max(1, num_prompts))
    read = sum(len(answer.prompt_ids) for answer in answers[::each])
    made = sum(len(answer.completion.token_ids) for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def prompt_scores(token_ids: Sequence[int], scores: Sequence[float]) -> list[JsonDict | None]:
    """`prompt_logprobs` of a choice: None for the first token, then the log-prob of each later token."""
    scored = zip(token_ids[1:], scores[1:], strict=True)
    return [None, *({str(token): {"logprob": float(score), "rank": None}} for token, score in scored)]


def error_body(message: str, kind: str, field: str = "", code: str | None = None) -> JsonDict:
    """An error in the form that OpenAI's clients read."""
    return {"error": {"message": message, "type": kind, "param": field or None, "code": code}}


def _ending(answer: Answer) -> JsonDict:
    return {
        "finish_reason": _FINISHES[answer.completion.finish],
        "stop_reason": answer.stop or None,
        "policy_versions": [{"start": span.start, **version_fields(span.version)} for span in answer.completion.spans],
    }


def _ids(token_ids: Sequence[int], is_wanted: bool) -> JsonDict:
    return {"token_ids": list(token_ids)} if is_wanted else {}


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.decode([token])
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    """The log-prob, at least -9999, OpenAI's value for tokens that are never chosen: JSON has no infinity."""
    return max(logprob, -9999.0)


def as_piece(answer: Answer) -> AnswerPiece:
    """The whole answer as one piece."""
    made = answer.completion
    return AnswerPiece(text=answer.text, token_ids=made.token_ids, logprobs=made.logprobs or (), top=made.top)
