"""Samplers of a Tinker server: frozen weights that clients sample from, answered by nodes or by an engine here.

Invariant: a sampler's weights never change, and all of its answers are of them, whoever gives them: the samples of a
seed are the same but for the last bits of their log-probs.
"""

import asyncio
import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import nn

from swarm.extras.tinker.tinker_nodes import SamplingNodes
from swarm.extras.tinker.tinker_requests import SampleRequest
from swarm.extras.tinker.tinker_wire import SampledAnswer, write_sample_reply
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import CompletionRequest, Tokenizer
from swarm.serving.answers import whole_answer
from swarm.serving.openai_requests import MAX_CHOICES, RequestRefused
from swarm.types import JsonDict, PolicyVersion, Sampling

logger = logging.getLogger(__name__)

MAX_SAMPLERS: Final = 64  # with weights here; the one that was not used for longest goes first
MAX_ADAPTER_BYTES: Final = 4 * 2**30  # of all of them together


@dataclass(eq=False, slots=True)
class Sampler:
    """Weights to sample from."""

    sampler_id: str
    session_id: str
    network: nn.Module  # used by this sampler alone; its tensors may be shared, and do not change
    version: PolicyVersion  # of an engine here
    published: PolicyVersion | None  # of the nodes that follow; None: the weights were not published
    base_model: str
    model_path: str | None
    num_bytes: int  # of weights of its own
    engine: TransformersGenerator | None = field(default=None, init=False)


class Samplers:
    """All samplers, and who answers for them.

    Args:
        tokenizer: of the model.
        context_tokens: most of a prompt and its answer.
        max_rows: of an engine here.
        nodes: that may hold published versions; None: all samples are made here.
    """

    def __init__(
        self, tokenizer: Tokenizer, context_tokens: int, max_rows: int, nodes: SamplingNodes | None = None
    ) -> None:
        self.nodes = nodes
        self._tokenizer, self._context_tokens, self._max_rows = tokenizer, context_tokens, max_rows
        self._samplers: OrderedDict[str, Sampler] = OrderedDict()
        self.num_made_here = 0  # samples

    def add(self, sampler: Sampler) -> None:
        """Takes a sampler; one of its id ends, and the one that was not used for longest makes room."""
        if sampler.sampler_id in self._samplers:  # a client that got no answer asked again
            self._end(sampler.sampler_id)
        self._samplers[sampler.sampler_id] = sampler
        while len(self._samplers) > MAX_SAMPLERS or (len(self._samplers) > 1 and self._num_bytes > MAX_ADAPTER_BYTES):
            self._end(next(iter(self._samplers)))

    def get(self, sampler_id: str) -> Sampler:
        """A sampler, which counts as used. Raises RequestRefused."""
        if sampler_id not in self._samplers:
            raise RequestRefused(
                f"sampling_session_id: {sampler_id!r} is unknown, its session ended, or it made room for newer ones "
                f"(at most {MAX_SAMPLERS}, and {MAX_ADAPTER_BYTES} bytes); save and name the weights to keep them",
                status=404,
            )
        self._samplers.move_to_end(sampler_id)
        return self._samplers[sampler_id]

    def end_of(self, session_id: str) -> None:
        """Ends the samplers of a session."""
        for sampler_id in [each for each, own in self._samplers.items() if own.session_id == session_id]:
            self._end(sampler_id)

    def close(self) -> None:
        """Ends all engines, and calls of nodes (blocking)."""
        if self.nodes is not None:
            self.nodes.close()
        for sampler in self._samplers.values():
            if sampler.engine is not None:
                sampler.engine.close()

    @property
    def _num_bytes(self) -> int:
        return sum(sampler.num_bytes for sampler in self._samplers.values())

    async def sample(self, sampler: Sampler, asked: SampleRequest) -> bytes:
        """The reply to a sample request. Raises RequestRefused or Unavailable."""
        prompt = asked.prompt.token_ids
        sampling = self.check(asked)
        seed = secrets.randbits(62) if asked.sampling_params.seed is None else asked.sampling_params.seed
        answers: list[SampledAnswer] = []
        for first in range(0, asked.num_samples, MAX_CHOICES):  # a node takes so many at once
            count = min(MAX_CHOICES, asked.num_samples - first)
            answers += await self._part(sampler, asked, sampling, count, seed + first // MAX_CHOICES)
        scores: list[float] | None = None
        if asked.prompt_logprobs:
            (scored,) = await asyncio.to_thread(self._engine(sampler).score, [prompt])
            last = asked.prompt_logprobs_last_n or len(prompt)
            scores = [math.nan] * max(0, len(prompt) - last) + scored.tolist()[-last:]
        return write_sample_reply(answers, scores, asked.topk_sample_logprobs)

    def check(self, asked: SampleRequest) -> Sampling:
        """How tokens are drawn. Raises RequestRefused where a request cannot be answered."""
        prompt, size = asked.prompt.token_ids, self._tokenizer.vocab_size
        if not prompt or max(prompt) >= size:
            raise RequestRefused(f"prompt: {len(prompt)} tokens, at least one, each below the vocabulary of {size}")
        return asked.sampling_params.sampling(self._context_tokens - len(prompt))

    async def _part(
        self, sampler: Sampler, asked: SampleRequest, sampling: Sampling, count: int, seed: int
    ) -> Sequence[SampledAnswer]:
        if self.nodes is not None and sampler.published is not None:
            body = _body(asked, sampling, count, seed)
            answers = await self.nodes.sample(sampler.published, body, count)
            if answers is not None:
                return answers
            logger.info("samples are made here: no node holds their version", extra={"step": sampler.published.step})
        self.num_made_here += count
        engine, params = self._engine(sampler), asked.sampling_params
        calls = [
            whole_answer(
                engine,
                self._tokenizer,
                CompletionRequest(
                    prompt_ids=asked.prompt.token_ids,
                    sampling=sampling,
                    seed=seed % 2**63 * MAX_CHOICES + place,  # as a node has it
                    num_top=asked.topk_sample_logprobs,
                    end_ids=frozenset(params.end_ids),
                ),
                params.stops,
            )
            for place in range(count)
        ]
        made = [answer.completion for answer in await asyncio.gather(*calls)]
        return [
            SampledAnswer(token_ids=each.token_ids, logprobs=each.logprobs or (), top=each.top, finish=each.finish)
            for each in made
        ]

    def _engine(self, sampler: Sampler) -> TransformersGenerator:
        if sampler.engine is None:
            sampler.engine = TransformersGenerator(
                sampler.network, self._tokenizer, sampler.version, seed=0, max_rows=self._max_rows
            )
        return sampler.engine

    def _end(self, sampler_id: str) -> None:
        engine = self._samplers.pop(sampler_id).engine
        if engine is not None:  # its thread ends with the answers that it is making
            asyncio.get_running_loop().run_in_executor(None, engine.close)


def _body(asked: SampleRequest, sampling: Sampling, count: int, seed: int) -> JsonDict:
    params = asked.sampling_params
    return {
        "token_ids": asked.prompt.token_ids,
        "sampling_params": {
            "n": count,
            "seed": seed,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(params.stops) or None,
            "stop_token_ids": list(params.end_ids) or None,
            "logprobs": asked.topk_sample_logprobs,
        },
    }
