"""Recipes against TRL's own GRPO loss, where TRL is installed (it needs nothing of ours, and we nothing of it).

Derivation: `GRPOTrainer._compute_loss` itself is called, with log-probs and advantages put in its way; compared are
loss and gradient with respect to every log-prob.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from golden_case import LENGTH, random_batch
from torch import Tensor

from swarm.objectives.coefficients import coefficients, with_advantages
from swarm.objectives.methods import load_recipe

TRAINER: Any = pytest.importorskip(
    "trl.trainer.grpo_trainer", reason="TRL is not installed: pip install trl", exc_type=ImportError
).GRPOTrainer

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo_kl": {"loss_type": "grpo", "beta": 0.04},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.28},
    "gspo": {"loss_type": "grpo", "level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "luspo": {"loss_type": "luspo", "level": "sequence", "epsilon_low": 2e-3, "epsilon_high": 2.5e-3},
    "sapo_soft_gate": {"loss_type": "sapo"},
}
KINDS = ("on_policy", "tight", "near", "binary", "signed")
FAR = ("broad", "far")  # TRL does not bound log-ratios (we do at 20), nor the k3 estimate (we do at 10, as verl)
TOLERANCE = {"sapo_soft_gate": 1e-5}  # TRL holds its temperatures in float32


def trainer(scores: tuple[Tensor, Tensor], settings: dict[str, Any]) -> Any:
    """Attributes of a trainer that `_compute_loss` reads; the model is replaced by its answer."""
    options = SimpleNamespace(
        use_bias_correction_kl=False,
        delta=None,
        steps_per_generation=1,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
    )
    return SimpleNamespace(
        **{"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "loss_type": settings["loss_type"]}
        | {name: value for name, value in settings.items() if name != "level"},
        args=options,
        importance_sampling_level=settings.get("level", "token"),
        _get_per_token_logps_and_entropies=lambda *_, **__: (*scores, None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_has_the_loss_and_gradient_of_trl(name: str) -> None:
    recipe, largest, tolerance = load_recipe(name), 0.0, TOLERANCE.get(name, 1e-9)
    for kind in KINDS if "beta" in CASES[name] else KINDS + FAR:
        batch, logprobs, entropy = random_batch(kind, 0)
        ready = with_advantages(recipe, batch, "all")
        found = coefficients(recipe, ready, logprobs, entropy)
        leaf = torch.where(ready.mask, logprobs, 0.0).requires_grad_()
        inputs = {
            "prompt_ids": torch.ones((batch.num_rollouts, 1), dtype=torch.int64),
            "prompt_mask": torch.ones((batch.num_rollouts, 1), dtype=torch.int64),
            "completion_ids": batch.token_ids,
            "completion_mask": ready.mask.long(),
            "advantages": ready.advantages,
            "old_per_token_logps": ready.behavior_logprobs,
            "ref_per_token_logps": ready.reference_logprobs,
            "num_items_in_batch": torch.tensor(float(batch.step_tokens)),
        }
        loss = TRAINER._compute_loss(trainer((leaf, entropy), CASES[name]), None, inputs)
        (expected,) = torch.autograd.grad(loss, [leaf])
        torch.testing.assert_close(found.logprobs, expected, rtol=tolerance, atol=tolerance * 1e-4)
        assert found.loss == pytest.approx(float(loss.detach()), rel=tolerance, abs=1e-12), kind
        largest = max(largest, float(expected.abs().max()))
    assert largest > 0
