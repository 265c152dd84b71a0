"""Client of the nodes that follow a Tinker server's policy and sample for it, over their HTTP interface.

Invariant: an answer counts only if its node reports the digest of the requested weights for each token. A node that has
other weights, or does not answer in time, costs a retry at another node, never a wrong sample.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from swarm.clock import Clock
from swarm.errors import ConfigError, TooLarge, Unavailable
from swarm.extras.tinker.tinker_wire import SampledAnswer
from swarm.generation.http_json import Cancelled, JsonClient
from swarm.types import FinishReason, JsonDict, PolicyVersion

logger = logging.getLogger(__name__)

FOLLOW_WAIT_S: Final = 20.0  # for nodes to take a version, counted from its publication
ASK_EVERY_S: Final = 0.1  # which version a node has, while one is waited for
FORGET_S: Final = 5.0  # a node that did not answer is asked again so much later
MAX_CALLS: Final = 256  # under way at once, a thread each: as many requests of a client go on together
_FINISHES: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_FAILURES: Final = (Unavailable, ConfigError, TooLarge, Cancelled)  # of a call; a refusal is a ConfigError


@dataclass(eq=False, slots=True)
class _Node:
    client: JsonClient
    digest: str = ""  # hex, of the weights that it had when it was last asked
    is_away_until_s: float = 0.0
    num_answers: int = field(default=0, init=False)


class SamplingNodes:
    """Spreads samples over the nodes that hold a version.

    Args:
        addresses: base address (http://host:port/v1, or without the /v1) and key of each node.
        clock: clock of the waits for a version and for a node that failed.
    """

    def __init__(self, addresses: Sequence[tuple[str, str]], clock: Clock) -> None:
        self._nodes = [_Node(JsonClient(url.removesuffix("/").removesuffix("/v1"), key)) for url, key in addresses]
        self._clock = clock
        self._threads = ThreadPoolExecutor(MAX_CALLS, "tinker sampling")
        self._turn = itertools.count()
        self._published_at_s: dict[bytes, float] = {}  # digest of the newest version -> when

    @property
    def num_answers(self) -> Mapping[str, int]:
        """Samples that each node has made so far, by address."""
        return {node.client.url: node.num_answers for node in self._nodes}

    def note_published(self, version: PolicyVersion) -> None:
        """Notes the newest version, which `sample` gives the nodes up to FOLLOW_WAIT_S to take."""
        self._published_at_s = {version.digest: self._clock.monotonic_s()}

    def close(self) -> None:
        """Cancels all calls and waits for their threads (blocking)."""
        for node in self._nodes:
            node.client.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def sample(self, version: PolicyVersion, body: JsonDict, count: int) -> list[SampledAnswer] | None:
        """Asks the nodes that have a version, one after the other, until one answers.

        Args:
            version: version that each token of the answers must be of.
            body: request to /inference/v1/generate.
            count: number of answers that the request asks for.

        Returns:
            `count` answers of one node; None if no node has the version, or none of them answers.
        """
        holders = await self._holders(version)
        start = next(self._turn)
        for offset in range(len(holders)):
            node = holders[(start + offset) % len(holders)]
            reply = await self._call(node, "POST", "/inference/v1/generate", body)
            answers = None if reply is None else _answers(reply, version, count)
            if answers is not None:
                node.num_answers += count
                return answers
            node.digest = ""
        return None

    async def _holders(self, version: PolicyVersion) -> list[_Node]:
        """Nodes that have the version.

        After the newest version was published, this waits up to FOLLOW_WAIT_S until all nodes that answer have it.
        """
        wanted = version.digest.hex()
        until_s = self._published_at_s.get(version.digest, -FOLLOW_WAIT_S) + FOLLOW_WAIT_S
        while True:
            await asyncio.gather(*(self._ask(node) for node in self._present() if node.digest != wanted))
            present = self._present()
            holders = [node for node in present if node.digest == wanted]
            if len(holders) == len(present) or self._clock.monotonic_s() >= until_s:
                return holders
            await asyncio.sleep(ASK_EVERY_S)

    def _present(self) -> list[_Node]:
        now_s = self._clock.monotonic_s()
        return [node for node in self._nodes if node.is_away_until_s <= now_s]

    async def _ask(self, node: _Node) -> None:
        reply = await self._call(node, "GET", "/v1/models", None)
        with contextlib.suppress(KeyError, IndexError, TypeError):
            node.digest = str(reply["data"][0]["policy_version"]["digest"])

    async def _call(self, node: _Node, method: str, path: str, body: JsonDict | None) -> Any:
        """The reply of a node; None if the call failed: then the node is left alone for FORGET_S."""
        try:
            call = partial(node.client.call, method, path, body, attempts=1)
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except _FAILURES as error:
            logger.warning("a sampling node does not answer", extra={"url": node.client.url, "error": str(error)[:300]})
            node.digest, node.is_away_until_s = "", self._clock.monotonic_s() + FORGET_S
            return None


def read_nodes(path: Path) -> list[tuple[str, str]]:
    """Reads addresses and keys from a file: `URL KEY` on each line, # begins a comment.

    Raises:
        ConfigError: the file cannot be read, has a line of another form, or names no node.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--samplers {path}: {error.strerror}; write `URL KEY` of each node on a line") from None
    found: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if len(words) == 2 and words[0].startswith(("http://", "https://")):
            found.append((words[0], words[1]))
        elif words:
            raise ConfigError(f"--samplers {path}: line {number} is not `URL KEY`, as http://127.0.0.1:8301/v1 KEY is")
    if not found:
        raise ConfigError(f"--samplers {path}: no node in it; write `URL KEY` of each on a line")
    return found


def _answers(reply: Any, version: PolicyVersion, count: int) -> list[SampledAnswer] | None:
    """The choices of a reply; None if a token is of another version, or the reply is not complete."""
    try:
        choices: list[JsonDict] = reply["choices"]
        answers = [
            SampledAnswer(
                token_ids=[int(token) for token in choice["token_ids"]],
                logprobs=[float(entry["logprob"]) for entry in choice["logprobs"]["content"]],
                top=[
                    [
                        (int(top["token"].removeprefix("token_id:")), float(top["logprob"]))
                        for top in entry["top_logprobs"]
                    ]
                    for entry in choice["logprobs"]["content"]
                ],
                finish=_FINISHES[choice["finish_reason"]],
            )
            for choice in choices
        ]
        digests = {span["digest"] for choice in choices for span in choice["policy_versions"]}
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    is_whole = len(answers) == count and all(len(each.token_ids) == len(each.logprobs) for each in answers)
    return answers if is_whole and digests == {version.digest.hex()} else None
