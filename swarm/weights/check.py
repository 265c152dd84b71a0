"""Hashes of a decoded version, in a thread beside the one that decodes it.

Invariant: `verified` gives tensors back only when every one of them, and all of them together, were compared with what
the manifest says.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from swarm.types import Digest, short
from swarm.weights.refuse import Malformed, UnusableReason
from swarm.weights.tensors import HostTensor, PublishedDigest, TensorSpec, Weights


def verified(tensors: Iterable[HostTensor], hashes: Mapping[TensorSpec, Digest], digest: Digest) -> Weights:
    """All tensors by name, in order, after their checks.

    Hashing leaves the interpreter to others, so it costs no time where a second core is free. What decodes may be one
    tensor or more ahead; a wrong one ends it.

    Args:
        tensors: as they are decoded, in any order.
        hashes: BLAKE3 of each tensor that there must be, in order of name.
        digest: of all of them together, see `PublishedDigest`.

    Raises:
        Malformed: a tensor is not what its hash says, or the whole is not the version; or from `tensors`.
    """
    staged: dict[str, HostTensor] = {}
    check = _Check(hashes)
    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, "weights-check") as beside:
        for tensor in tensors:
            while pending and pending[0].done():
                pending.popleft().result()
            pending.append(beside.submit(check.add, tensor))
            staged[tensor.spec.name] = tensor
        for future in pending:
            future.result()
    found = check.digest()
    if found != digest:
        raise Malformed(UnusableReason.WRONG_TARGET, f"weights are {short(found)}, the version is {short(digest)}")
    return {spec.name: staged[spec.name] for spec in hashes}


class _Check:
    """Compares tensor by tensor, and keeps what the digest of the whole is not up to yet."""

    def __init__(self, hashes: Mapping[TensorSpec, Digest]) -> None:
        self._hashes = hashes
        self._left = deque(hashes)
        self._early: dict[TensorSpec, HostTensor] = {}
        self._digest = PublishedDigest()

    def add(self, tensor: HostTensor) -> None:
        if tensor.blake3() != self._hashes[tensor.spec]:
            raise Malformed(UnusableReason.WRONG_TENSOR, tensor.spec.name)
        self._early[tensor.spec] = tensor
        while self._left and self._left[0] in self._early:
            self._digest.update(self._early.pop(self._left.popleft()))

    def digest(self) -> Digest:
        assert not self._left, "a decoder gave fewer tensors than there are"
        return self._digest.digest()
