"""The one model that a Tinker server serves to train."""

from dataclasses import dataclass

from torch import nn

from swarm.interfaces import Tokenizer
from swarm.serving.openai_requests import RequestRefused
from swarm.types import Digest


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerModel:
    """What is served to train."""

    name: str  # as clients call it
    network: nn.Module  # without adapters; its weights never change
    digest: Digest  # of its published tensors
    tokenizer: Tokenizer
    context_tokens: int

    def require(self, base_model: str | None) -> None:
        """Raises RequestRefused where a client asks for another model."""
        if base_model is not None and base_model != self.name:
            raise RequestRefused(f"base_model: {base_model[:80]!r} is not served; {self.name!r} is", status=404)
