"""The HTTP interface: OpenAI's chat completions and completions, vLLM's token endpoints.

    GET  /health                   no key needed
    GET  /v1/models                the served model and its policy version
    POST /v1/chat/completions      a conversation that was answered here continues with its exact tokens
    POST /v1/responses             the same, in the newer dialect (`responses_dialect`)
    POST /v1/completions           text or token ids
    POST /inference/v1/generate    token ids in, token ids out
    POST /v1/episodes              begins a run of an agent, with a key of its own (`agent_runs`)
    GET  /v1/episodes              numbers of runs by state, with reasons
    GET  /v1/episodes/{id}         what became of a run
    POST /v1/episodes/{id}/reward  ends a run
    POST /tokenize, /detokenize

Invariant: requests are bounded in bytes, tokens and number; an abandoned request is removed from the engine.

Source: OpenAI API reference; vLLM `entrypoints/openai` and `entrypoints/serve`.
"""

import asyncio
import hmac
import itertools
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from swarm.episode import Message
from swarm.errors import ConfigError, TooLarge, Unavailable
from swarm.interfaces import Completer, CompletionRequest, Tokenizer
from swarm.model.plain_text import with_whole_characters
from swarm.model.tokenizer import text_ids
from swarm.serving.agent_runs import AgentRuns, RunKey
from swarm.serving.answers import Answer, AnswerPiece, follow_answer, whole_answer
from swarm.serving.conversation_memory import ConversationMemory
from swarm.serving.http_server import read_body
from swarm.serving.openai_replies import (
    as_piece,
    chat_choice,
    chat_deltas,
    chat_logprobs,
    error_body,
    fingerprint,
    prompt_scores,
    text_choice,
    text_logprobs,
    token_choice,
    usage,
    version_fields,
)
from swarm.serving.openai_requests import (
    MAX_CHOICES,
    RUN_NAME,
    TASK_NAME,
    AnswerFields,
    ChatRequest,
    DetokenizeRequest,
    OpenRun,
    RequestRefused,
    RewardFields,
    SamplingFields,
    TextRequest,
    TokenizeRequest,
    TokensRequest,
    read_request,
)
from swarm.serving.responses_dialect import (
    ResponsesRequest,
    response_body,
    response_head,
    stream_events,
    to_chat,
)
from swarm.serving.run_groups import recorded_call
from swarm.serving.run_store import RunRow
from swarm.serving.turn_form import MAX_TRIES, ChatTurn, TurnForm, form_of, messages_of
from swarm.types import JsonDict

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Of a body: room for its fields, and for ten letters of each token of a prompt, as \uXXXX.
BODY_BYTES: Final = 256 * 1024
BODY_BYTES_PER_TOKEN: Final = 64
RUN_BODY_BYTES: Final = 16 * 1024  # of the name, or the rewards, of a run
MAX_OPEN: Final = 1024  # answers in progress
DEFAULT_MAX_TOKENS: Final = 16  # of /v1/completions, as OpenAI's
DEFAULT_CHAT_TOKENS: Final = 1024  # default bound of an answer's tokens; less if the context has less room


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model behind the interface, and its engine."""

    name: str  # as clients call it
    completer: Completer
    tokenizer: Tokenizer
    context_tokens: int  # bound of the tokens of a prompt and its answer together
    source: str = ""  # the initial model


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """An API key besides the main key."""

    key: str
    name: str
    learns: bool  # runs of agents with it are recorded


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, by its key."""

    owner: str  # name of the key; "" for the main one
    learns: bool
    run: RunKey | None = None  # the run whose session key the caller sent, else None
    may_reward: bool = True


@dataclass(frozen=True, slots=True)
class _Chat:
    """A chat that is ready to be answered."""

    messages: Sequence[Message]  # as the model is shown them
    form: TurnForm
    requests: Sequence[CompletionRequest]
    stops: Sequence[str]
    run: RunRow | None


class OpenAiApp:
    """Application that answers requests for one model; `routes` is its ASGI form.

    Example:
        app = OpenAiApp(ServedModel(name="tiny", completer=engine, tokenizer=tokenizer, context_tokens=512), key="k")
        uvicorn.run(app.routes)
    """

    def __init__(
        self,
        model: ServedModel,
        key: str,
        max_open: int = MAX_OPEN,
        keys: Sequence[ApiKey] = (),
        runs: AgentRuns | None = None,
    ) -> None:
        """Builds the routes; every request but /health must carry one of the keys as its bearer token.

        Args:
            model: the served model.
            key: the main key.
            max_open: bound of the answers in progress.
            keys: further keys.
            runs: runs of agents; None: none are recorded.
        """
        assert key, "a model is not served without a key"
        self._model = model
        self._callers = [(key.encode(), Caller("", False))]
        self._callers += [(each.key.encode(), Caller(each.name, each.learns)) for each in keys]
        self._runs = runs
        self._max_open = max_open
        self._num_open = 0
        self._began_s = int(time.time())
        self.memory = ConversationMemory(model.tokenizer)
        self.routes = Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/v1/models", self._guarded(self._models), methods=["GET"]),
                Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
                Route("/v1/responses", self._guarded(self._responses), methods=["POST"]),
                Route("/v1/completions", self._guarded(self._text), methods=["POST"]),
                Route("/inference/v1/generate", self._guarded(self._tokens), methods=["POST"]),
                Route("/v1/episodes", self._guarded(self._open_run), methods=["POST"]),
                Route("/v1/episodes", self._guarded(self._overview), methods=["GET"]),
                Route("/v1/episodes/{id}", self._guarded(self._run_state), methods=["GET"]),
                Route("/v1/episodes/{id}/reward", self._guarded(self._reward), methods=["POST"]),
                Route("/tokenize", self._guarded(self._tokenize), methods=["POST"]),
                Route("/detokenize", self._guarded(self._detokenize), methods=["POST"]),
                Route("/{path:path}", self._guarded(self._unknown), methods=["GET", "POST", "PUT", "DELETE"]),
            ]
        )

    # --- endpoints ------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._model.name})

    async def _unknown(self, request: Request) -> Response:
        raise RequestRefused(f"{request.method} {request.url.path} is not served here", status=404)

    async def _models(self, request: Request) -> Response:
        card = {
            "id": self._model.name,
            "object": "model",
            "created": self._began_s,
            "owned_by": "swarm-trainer",
            "root": self._model.source or self._model.name,
            "max_model_len": self._model.context_tokens,
            "policy_version": version_fields(self._model.completer.version),
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def _chat(self, request: Request) -> Response:
        asked = await self._read(ChatRequest, request)
        chat = await self._prepared(request, asked)

        def chunk(piece: AnswerPiece, index: int, num_chars: int) -> JsonDict:
            logprobs = chat_logprobs(self._model.tokenizer, piece) if asked.logprobs else None
            return {"index": index, "delta": {"content": piece.text}, "logprobs": logprobs, "finish_reason": None}

        if asked.stream:
            opening = {"role": "assistant", "content": "" if chat.form.is_free else None}
            if chat.form.is_free:
                steps = partial(self._steps, chat.requests, chat.stops, chat)
            else:
                steps = partial(self._turns, chat)
            kind = "chat.completion.chunk"
            return self._streamed(asked, len(chat.requests), steps, kind, chunk, {"delta": {}}, opening)
        turns = await self._whole(request, [self._turn(chat, each) for each in chat.requests])
        shown = {"has_logprobs": asked.logprobs, "has_token_ids": asked.return_token_ids}
        choices = [chat_choice(self._model.tokenizer, turn, index, **shown) for index, turn in enumerate(turns)]
        reply = self._reply("chat.completion", [turn.answer for turn in turns], choices, 1)
        prompt_ids = list(chat.requests[0].prompt_ids)
        return JSONResponse(reply | ({"prompt_token_ids": prompt_ids} if asked.return_token_ids else {}))

    async def _responses(self, request: Request) -> Response:
        asked = await self._read(ResponsesRequest, request)
        chat = await self._prepared(request, to_chat(asked))
        head = response_head(asked, self._model.name)
        if not asked.stream:
            (turn,) = await self._whole(request, [self._turn(chat, chat.requests[0])])
            return JSONResponse(response_body(asked, turn, head))
        self._require_room(1)  # now, while a status can still be sent

        async def events() -> AsyncGenerator[bytes]:
            numbers = itertools.count()

            def sent(events: Iterable[JsonDict]) -> bytes:
                made = (each | {"sequence_number": next(numbers)} for each in events)
                return b"".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in made)

            yield sent(stream_events(head, None))
            try:
                with self._open(1):
                    turn = await self._turn(chat, chat.requests[0])
            except (Unavailable, RequestRefused) as error:
                failed = {"code": "server_error", "message": str(error)}
                yield sent([{"type": "response.failed", "response": head | {"status": "failed", "error": failed}}])
                return
            yield sent(stream_events(head, response_body(asked, turn, head)))

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _prepared(self, request: Request, asked: ChatRequest) -> "_Chat":
        """Converts a chat request for the engine, with the run that it belongs to. Raises RequestRefused."""
        run = await self._run_of(request)
        form = form_of(asked)
        messages = form.shown(messages_of(asked.messages))
        prefill = (Message(role="assistant", content=form.prefill),) if form.prefill else ()
        prompt_ids = await self._encoded(self.memory.prompt, (*messages, *prefill))
        most = asked.max_completion_tokens or asked.max_tokens
        if run is not None:
            asked, most = self._as_recorded(asked, most)
        requests = self._requests(asked, [prompt_ids], most, asked.top_logprobs if asked.logprobs else 0)
        return _Chat(messages, form, requests, (*asked.stops, *form.stops), run)

    async def _finish(self, chat: "_Chat", turn: ChatTurn, is_sent: bool = True) -> None:
        """Records a turn, and adds it to the memory if its client gets it. Raises RequestRefused if its run is over."""
        made = turn.answer.completion.token_ids
        if chat.run is not None and self._runs is not None and made:
            await self._runs.record(chat.run, recorded_call(turn.answer, chat.requests[0].sampling))
        if is_sent and not turn.answer.stop:  # else the client has less text than the model made
            is_ended = bool(made) and made[-1] in self._model.tokenizer.eos_ids
            self.memory.add(chat.messages, turn.text, [*turn.answer.prompt_ids, *made], is_ended)

    async def _text(self, request: Request) -> Response:
        asked = await self._read(TextRequest, request, MAX_CHOICES)
        prompts = await self._encoded(self._prompts, asked.prompt)
        most = asked.max_tokens or DEFAULT_MAX_TOKENS
        requests = self._requests(asked, prompts, most, asked.logprobs or 0)

        def chunk(piece: AnswerPiece, index: int, num_chars: int) -> JsonDict:
            num_top = asked.logprobs
            logprobs = None if num_top is None else text_logprobs(self._model.tokenizer, piece, num_top, num_chars)
            return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": None}

        if asked.stream:
            if asked.prompt_logprobs is not None:
                raise RequestRefused("prompt_logprobs: not with stream; leave one of them out", "prompt_logprobs")
            steps, ending = partial(self._steps, requests, asked.stops), {"text": "", "logprobs": None}
            return self._streamed(asked, len(requests), steps, "text_completion", chunk, ending)
        answers = await self._whole(request, self._answers(requests, asked.stops))
        choices = [
            text_choice(
                self._model.tokenizer, answer, index, num_logprobs=asked.logprobs, has_token_ids=asked.return_token_ids
            )
            for index, answer in enumerate(answers)
        ]
        if asked.prompt_logprobs is not None:
            scores = await asyncio.to_thread(self._model.completer.score, prompts)
            for index, choice in enumerate(choices):
                place = index // asked.n
                choice["prompt_logprobs"] = prompt_scores(prompts[place], scores[place].tolist())
        return JSONResponse(self._reply("text_completion", answers, choices, len(prompts)))

    async def _tokens(self, request: Request) -> Response:
        asked = await self._read(TokensRequest, request)
        how = asked.sampling_params
        requests = self._requests(how, [asked.token_ids], how.max_tokens or DEFAULT_MAX_TOKENS, how.logprobs or 0)
        answers = await self._whole(request, self._answers(requests, how.stops))
        return JSONResponse(
            {
                "request_id": f"generate-{secrets.token_hex(12)}",
                "model": self._model.name,
                "system_fingerprint": self._fingerprint(answers),
                "choices": [token_choice(answer, index) for index, answer in enumerate(answers)],
                "usage": usage(answers, 1),
            }
        )

    async def _tokenize(self, request: Request) -> Response:
        asked = await self._read(TokenizeRequest, request)
        if asked.messages is not None:
            ids = await self._encoded(self.memory.prompt, messages_of(asked.messages))
        elif asked.prompt is not None:
            (ids,) = await self._encoded(self._prompts, asked.prompt)
        else:
            raise RequestRefused("prompt: give it, or messages", "prompt")
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self._model.context_tokens})

    async def _detokenize(self, request: Request) -> Response:
        asked = await self._read(DetokenizeRequest, request)
        self._require_known(asked.tokens, "tokens")
        return JSONResponse({"prompt": await asyncio.to_thread(self._model.tokenizer.decode, asked.tokens)})

    # --- answers --------------------------------------------------------------------------------------

    def _requests(
        self, asked: SamplingFields, prompts: Sequence[Sequence[int]], most: int | None, num_top: int
    ) -> list[CompletionRequest]:
        """Requests to the engine, prompt by prompt. Raises RequestRefused if they are too many or too long."""
        if len(prompts) * asked.n > MAX_CHOICES:
            raise RequestRefused(f"n: {len(prompts)} prompts x {asked.n} answers exceed {MAX_CHOICES}", "n")
        requests: list[CompletionRequest] = []
        for prompt_ids in prompts:
            self._require_known(prompt_ids, "prompt")
            room = self._model.context_tokens - len(prompt_ids)
            if (most or 1) > room:
                raise RequestRefused(
                    f"max_tokens: a prompt of {len(prompt_ids)} tokens and an answer of {most or 1} exceed the "
                    f"{self._model.context_tokens} of this model's context",
                    "max_tokens",
                )
            for sample in range(asked.n):
                seed = secrets.randbits(63) if asked.seed is None else asked.seed % 2**63 * MAX_CHOICES + sample
                requests.append(
                    CompletionRequest(
                        prompt_ids=prompt_ids,
                        sampling=asked.sampling(most or min(room, DEFAULT_CHAT_TOKENS)),
                        seed=seed,
                        num_top=num_top,
                        end_ids=frozenset(asked.stop_token_ids or ()),
                    )
                )
        return requests

    def _answers(
        self, requests: Sequence[CompletionRequest], stops: Sequence[str]
    ) -> list[Coroutine[Any, Any, Answer]]:
        return [whole_answer(self._model.completer, self._model.tokenizer, each, stops) for each in requests]

    async def _turn(self, chat: "_Chat", request: CompletionRequest) -> ChatTurn:
        """The first answer that has the form. Raises RequestRefused if no try has the form, and Unavailable.

        A run records this answer alone, or the last try. When earlier tries shared the reward, a policy learned to fail
        first: sampled success rose from .53 to .75 while greedy answers fell from .61 to 0 (docs/agents.md).
        """
        last, problem = request.seed + (MAX_TRIES - 1 if request.sampling.temperature else 0), ""
        for seed in range(request.seed, last + 1):
            (made,) = self._answers([replace(request, seed=seed)], chat.stops)
            turn = chat.form.read(await made)
            problem = chat.form.problem(turn)
            if not problem or seed == last:
                await self._finish(chat, turn, is_sent=not problem)
            if not problem:
                return turn
        raise RequestRefused(f"the model gave no answer of the form that was asked for: {problem}", status=422)

    async def _whole(self, request: Request, calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
        """Waits for all answers. Raises ClientDisconnect if the client has gone, RequestRefused, and Unavailable."""
        tasks = [asyncio.create_task(call) for call in calls]
        gone = asyncio.create_task(_until_gone(request))
        try:
            with self._open(len(calls)):
                answers = asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.wait((answers, gone), return_when=asyncio.FIRST_COMPLETED)
                if not answers.done():
                    raise ClientDisconnect
                return [task.result() for task in tasks]
        finally:
            for task in (gone, *tasks):
                task.cancel()
            await asyncio.gather(gone, *tasks, return_exceptions=True)

    def _streamed(
        self,
        asked: AnswerFields,
        count: int,
        steps: Callable[[], AsyncGenerator[tuple[int, AnswerPiece | Answer | ChatTurn]]],
        kind: str,
        chunk: Callable[[AnswerPiece, int, int], JsonDict],
        ending: JsonDict,
        opening: JsonDict | None = None,
    ) -> Response:
        """Response with server-sent events: the steps of `count` choices, then their endings. Raises RequestRefused."""
        self._require_room(count)  # now, while a status can still be sent
        head = self._head(kind)

        async def events() -> AsyncGenerator[bytes]:
            def event(choices: list[JsonDict], **more: Any) -> bytes:
                made = head | {"system_fingerprint": fingerprint(self._model.completer.version)}
                return b"data: " + json.dumps(made | {"choices": choices} | more).encode() + b"\n\n"

            answers: list[Answer] = []
            num_chars = dict.fromkeys(range(count), 0)
            try:
                with self._open(count):
                    if opening is not None:
                        for index in num_chars:
                            yield event([{"index": index, "delta": opening, "finish_reason": None}])
                    async with aclosing(steps()) as made_steps:
                        async for index, step in made_steps:
                            if isinstance(step, AnswerPiece):
                                made = chunk(step, index, num_chars[index])
                                num_chars[index] += len(step.text)
                                if asked.return_token_ids:
                                    made["token_ids"] = list(step.token_ids)
                                if step.text or made["logprobs"] or asked.return_token_ids:
                                    yield event([made])
                                continue
                            if isinstance(step, ChatTurn):
                                part = chunk(as_piece(step.answer), index, 0)
                                if asked.return_token_ids:
                                    part["token_ids"] = list(step.answer.completion.token_ids)
                                for delta in chat_deltas(step):
                                    yield event([part | {"delta": delta}])
                                    part = {"index": index, "logprobs": None, "finish_reason": None}
                            answer = step.answer if isinstance(step, ChatTurn) else step
                            answers.append(answer)
                            last = token_choice(answer, index)
                            del last["logprobs"], last["token_ids"]
                            if isinstance(step, ChatTurn) and step.calls:
                                last["finish_reason"] = "tool_calls"
                            yield event([{**ending, **last}])
            except (Unavailable, RequestRefused) as error:  # the status was sent before
                yield b"data: " + json.dumps(error_body(str(error), "server_error")).encode() + b"\n\n"
                return
            if asked.stream_options is not None and asked.stream_options.include_usage:
                yield event([], usage=usage(answers, max(1, len(answers) // asked.n)))
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _turns(self, chat: "_Chat") -> AsyncGenerator[tuple[int, ChatTurn]]:
        """Yields the turns of all requests in order, each with the index of its request."""
        tasks = [asyncio.create_task(self._turn(chat, each)) for each in chat.requests]
        try:
            for index, task in enumerate(tasks):
                yield index, await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _steps(
        self, requests: Sequence[CompletionRequest], stop: Sequence[str], chat: "_Chat | None" = None
    ) -> AsyncGenerator[tuple[int, AnswerPiece | Answer]]:
        """Yields the pieces and answers of all requests as they arrive, each with the index of its request.

        `chat`: chat whose answers are recorded (`_finish`) before they are yielded.
        """
        news: asyncio.Queue[tuple[int, AnswerPiece | Answer | BaseException]] = asyncio.Queue()

        async def follow(index: int, request: CompletionRequest) -> None:
            try:
                pieces = follow_answer(self._model.completer, self._model.tokenizer, request, stop)
                async with aclosing(pieces):
                    async for step in pieces:
                        news.put_nowait((index, step))
            except Unavailable as error:
                news.put_nowait((index, error))

        tasks = [asyncio.create_task(follow(index, request)) for index, request in enumerate(requests)]
        try:
            num_ended = 0
            while num_ended < len(requests):
                index, step = await news.get()
                if isinstance(step, BaseException):
                    raise step
                num_ended += isinstance(step, Answer)
                if isinstance(step, Answer) and chat is not None:
                    await self._finish(chat, chat.form.read(step))
                yield index, step
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- runs of agents -------------------------------------------------------------------------------

    async def _open_run(self, request: Request) -> Response:
        caller, runs = self._learning(request)
        if caller.run is not None:
            raise RequestRefused("no valid key: the key of a run opens no other", status=403)
        asked = await self._read(OpenRun, request, 0)
        if asked.held_out and not asked.task:
            raise RequestRefused("held_out: name the task, which is measured again and again", "task")
        names = caller.owner, asked.id or "", asked.task or ""
        run, key, reward_key = await runs.open_session(*names, is_held_out=asked.held_out)
        return JSONResponse(await runs.state(run) | {"key": key, "reward_key": reward_key})

    async def _run_state(self, request: Request) -> Response:
        caller, runs = self._learning(request)
        return JSONResponse(await runs.state(self._named_run(request, caller)))

    async def _overview(self, request: Request) -> Response:
        caller, runs = self._learning(request)
        if caller.run is not None:
            raise RequestRefused("the keys of a run see that run alone", status=403)
        return JSONResponse(await runs.overview(caller.owner))

    async def _reward(self, request: Request) -> Response:
        caller, runs = self._learning(request)
        if not caller.may_reward:
            raise RequestRefused("the key of a run's calls gives no reward; use its `reward_key`", status=403)
        asked = await self._read(RewardFields, request, 0)
        return JSONResponse(await runs.reward(self._named_run(request, caller), asked.named))

    async def _run_of(self, request: Request) -> RunRow | None:
        """The run that a call belongs to, by its key or by X-Episode; None if the call belongs to no run."""
        name, task = request.headers.get("x-episode", ""), request.headers.get("x-task", "")
        caller: Caller = request.state.caller
        if caller.run is None and not name:
            if task:
                raise RequestRefused("X-Task: names the task of a run; send X-Episode with the run, too", "X-Task")
            return None
        caller, runs = self._learning(request)
        for field, value, pattern in (("X-Episode", name, RUN_NAME), ("X-Task", task, TASK_NAME)):
            if value and not re.fullmatch(pattern, value):
                raise RequestRefused(f"{field}: {value[:80]!r} does not match {pattern}", field)
        if caller.run is not None and name not in ("", caller.run.name):
            raise RequestRefused(f"X-Episode: this key is of the run {caller.run.name!r}", "X-Episode", 403)
        return await runs.begin_call(caller.run or RunKey(caller.owner, name), task)

    def _as_recorded(self, asked: ChatRequest, most: int | None) -> tuple[ChatRequest, int]:
        """Applies the rules of runs to a request; returns the request and the bound of its new tokens."""
        assert self._runs is not None, "a call is of a run"
        rules = self._runs.rules
        if asked.n > 1:
            raise RequestRefused(f"n: {asked.n} answers; a call of a run has one", "n")
        if "temperature" not in asked.model_fields_set:
            asked = asked.model_copy(update={"temperature": rules.temperature})
        return asked, min(most or rules.max_new_tokens, rules.max_new_tokens)

    def _learning(self, request: Request) -> tuple[Caller, AgentRuns]:
        """The caller and the runs. Raises RequestRefused if nothing is learned from calls with its key."""
        caller: Caller = request.state.caller
        if self._runs is None or not caller.learns:
            raise RequestRefused(
                "this key is not learned from: use one of [[serve.keys]] with learn = true (docs/agents.md)", status=403
            )
        return caller, self._runs

    def _named_run(self, request: Request, caller: Caller) -> RunKey:
        """The run in the address. Raises RequestRefused for a malformed name, or a session key of another run."""
        run = RunKey(caller.owner, request.path_params["id"])
        if not re.fullmatch(RUN_NAME, run.name) or caller.run not in (None, run):
            raise RequestRefused(f"no run {run.name[:80]!r} of this key", "id", 404)
        return run

    def _caller(self, given: str) -> Caller | None:
        """The caller with this bearer token; None if the token is no key."""
        found = [caller for key, caller in self._callers if hmac.compare_digest(given.encode(), key)]
        if found or self._runs is None or (session := self._runs.of_session(given)) is None:
            return found[0] if found else None
        run, may_reward = session
        return Caller(run.owner, True, run, may_reward)

    # --- shared ---------------------------------------------------------------------------------------

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Wraps an endpoint: refuses callers without the key, and turns errors into replies for OpenAI's clients."""

        async def answer(request: Request) -> Response:
            caller = self._caller(request.headers.get("authorization", "").removeprefix("Bearer "))
            if caller is None:
                body = error_body("no valid key: send `Authorization: Bearer KEY`", "invalid_request_error")
                return JSONResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})
            request.state.caller = caller
            try:
                return await endpoint(request)
            except RequestRefused as error:
                code = "model_not_found" if error.field == "model" else None
                kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
                headers = {"Retry-After": "1"} if error.status == 429 else None
                return JSONResponse(error_body(str(error), kind, error.field, code), error.status, headers=headers)
            except Unavailable as error:
                return JSONResponse(error_body(str(error), "server_error"), 503, headers={"Retry-After": "1"})
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception:  # task boundary: one request must not end the others
                logger.exception("request failed", extra={"path": request.url.path})
                return JSONResponse(error_body("this request failed; the node's log says why", "server_error"), 500)

        return answer

    async def _read(self, kind: type[Any], request: Request, num_prompts: int = 1) -> Any:
        """Reads a request of up to `num_prompts` prompts from its body and checks it. Raises RequestRefused."""
        most = BODY_BYTES + BODY_BYTES_PER_TOKEN * num_prompts * self._model.context_tokens
        most = most if num_prompts else RUN_BODY_BYTES
        try:
            data: object = json.loads(await read_body(request.stream(), most))
        except TooLarge as error:
            raise RequestRefused(str(error), status=413) from None
        except (ValueError, RecursionError):
            raise RequestRefused("body: not JSON") from None
        asked = read_request(kind, data)
        if getattr(asked, "model", "") not in ("", self._model.name):
            raise RequestRefused(f"model: {asked.model!r} is not served; {self._model.name!r} is", "model", 404)
        return asked

    async def _encoded(self, encode: Callable[[Any], Any], what: object) -> Any:
        """Runs `encode` in a thread, since long texts take long; returns its result. Raises RequestRefused."""
        try:
            return await asyncio.to_thread(encode, what)
        except ConfigError as error:
            raise RequestRefused(str(error)) from None

    def _prompts(self, prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]) -> list[list[int]]:
        """Token ids of each prompt; text is plain: it never becomes a control token."""
        several: Sequence[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        return [
            text_ids(self._model.tokenizer, with_whole_characters(each)) if isinstance(each, str) else list(each)
            for each in several
        ]

    def _require_known(self, token_ids: Sequence[int], field: str) -> None:
        size = self._model.tokenizer.vocab_size
        if token_ids and max(token_ids) >= size:
            raise RequestRefused(f"{field}: token id {max(token_ids)} is outside the vocabulary of {size}", field)

    @contextmanager
    def _open(self, count: int) -> Generator[None]:
        """Counts answers as in progress during the block. Raises RequestRefused if they exceed `max_open`."""
        self._require_room(count)
        self._num_open += count
        try:
            yield
        finally:
            self._num_open -= count

    def _require_room(self, count: int) -> None:
        if self._num_open + count > self._max_open:
            raise RequestRefused(f"{self._num_open} answers are under way, of at most {self._max_open}", status=429)

    def _reply(self, kind: str, answers: Sequence[Answer], choices: list[JsonDict], num_prompts: int) -> JsonDict:
        made = {"choices": choices, "usage": usage(answers, num_prompts)}
        return self._head(kind) | {"system_fingerprint": self._fingerprint(answers)} | made

    def _head(self, kind: str) -> JsonDict:
        prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
        return {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model.name,
        }

    def _fingerprint(self, answers: Sequence[Answer]) -> str:
        versions = itertools.chain.from_iterable(answer.completion.spans for answer in answers)
        newest = max((span.version for span in versions), key=lambda version: version.step, default=None)
        return fingerprint(newest or self._model.completer.version)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
