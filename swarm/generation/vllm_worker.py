"""What our part adds to each of vLLM's workers, one per device: taking weights from a file in place.

Invariant: afterwards every layer computes with the new weights, also those that keep a packed copy of theirs.
Runs in vLLM's environment only.
"""

from collections.abc import Iterator
from typing import Any

from safetensors import safe_open


class SwarmWorker:
    """Mixed into vLLM's worker class by `worker_extension_cls`; called through `collective_rpc`."""

    model_runner: Any

    def swarm_reload(self, path: str) -> None:
        """Replaces the weights by those of a safetensors file with checkpoint names."""
        self.model_runner.reload_weights(weights_iterator=_tensors(path))
        _pack_again(self.model_runner.get_model())

    def swarm_reload_first(self) -> None:
        """Takes back the weights that the engine was started with."""
        self.model_runner.reload_weights()
        _pack_again(self.model_runner.get_model())


def _tensors(path: str) -> Iterator[tuple[str, Any]]:
    with safe_open(path, "pt") as file:
        names: list[str] = file.keys()
        for name in names:
            yield name, file.get_tensor(name)


def _pack_again(model: Any) -> None:
    """Renews packed copies that reload_weights leaves as they are.

    On CPU an output head that is tied to the embedding multiplies with a packed copy of its own. reload_weights renews
    the embedding only, as no tensor of the checkpoint bears the head's name (seen with vLLM 0.32.0: log-probs were
    wrong by 0.3 nats on average, without any error).
    """
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        # A layer of its own has given up the weight that its copy was made from, and was renewed.
        if hasattr(module, "cpu_linear") and weight is not None and weight.dim() == 2 and weight.numel() > 0:
            module.quant_method.process_weights_after_loading(module)
