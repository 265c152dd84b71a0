"""The distribution of a policy whose weights change while its cache stays."""

from collections.abc import Sequence

import numpy as np
import torch


@torch.inference_mode()
def scored_with_one_cache(
    networks: Sequence[torch.nn.Module], ids: Sequence[int], changes: Sequence[int]
) -> np.ndarray:
    """[T] log-probs of each token where one network after the other makes the cache; the first is NaN.

    Args:
        networks: in order.
        ids: [T].
        changes: the first token that each network but the first reads.
    """
    from transformers import DynamicCache

    cache, logprobs = DynamicCache(), [float("nan")]
    for place, token in enumerate(ids[:-1]):
        network = networks[sum(place >= change for change in changes)]
        logits = network(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]
        logprobs.append(float(torch.log_softmax(logits.float(), -1)[ids[place + 1]]))
    return np.array(logprobs, np.float32)
