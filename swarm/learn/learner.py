"""One policy in training: a draw in, a new policy version out.

Invariant: a step either makes exactly one new version or leaves weights, optimizer, memory and version as
they were. A step's only random numbers are a method's layer noise, seeded by the update: checkpoint and draws
reproduce the learner bit for bit.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from swarm.clock import Clock, SystemClock
from swarm.config import LearnerConfig, ReplayConfig
from swarm.errors import ConfigError, NonFiniteStep
from swarm.interfaces import TaskOf, Tokenizer
from swarm.learn.checkpoint import Checkpoint, has_checkpoint, read_checkpoint, write_checkpoint
from swarm.learn.diagnostics import OffPolicyStats, off_policy_by_source
from swarm.learn.fused_head import Head
from swarm.learn.gradient import Gradient, Measured, minibatches, score_batch
from swarm.learn.layer_noise import LayerNoise
from swarm.learn.packing import PackedRows, pack
from swarm.learn.ranks import OneProcess, Ranks
from swarm.learn.reference import ReferencePolicy
from swarm.learn.report import Update, step_report
from swarm.learn.score import check_head
from swarm.model import published_state, weights_digest
from swarm.objectives.batch import Batch, make_batch
from swarm.objectives.coefficients import scored, with_advantages
from swarm.objectives.fallbacks import MAIN, RecipeSet, RecipeSlice, merged
from swarm.objectives.part import Requirement, Scope
from swarm.objectives.recipe import Recipe
from swarm.types import Draw, PolicyVersion, StepReport

logger = logging.getLogger(__name__)


class PolicyLearner:
    """Implements `swarm.interfaces.Learner` for one Hugging Face causal language model.

    The network stays in evaluation mode: log-probs are those of the policy that generates, dropout off.
    """

    def __init__(
        self,
        network: nn.Module,
        tokenizer: Tokenizer,
        recipe: Recipe | RecipeSet,
        config: LearnerConfig,
        replay: ReplayConfig,
        policy_id: str,
        dir: Path,
        ranks: Ranks | None = None,
        clock: Clock | None = None,
        task_of: TaskOf | None = None,
    ) -> None:
        """A learner at step 0; see `resumed`.

        Args:
            dir: of checkpoints.
            ranks: what the step is shared with, and on which device; None: this process alone, on the CPU.
            task_of: where the prompts of groups of another tokenizer come from.
        """
        self._network = network.eval()
        self._ranks = ranks or OneProcess()
        check_head(self._network)
        self._tokenizer = tokenizer
        self._recipes = recipe if isinstance(recipe, RecipeSet) else RecipeSet(main=recipe)
        self._config = config
        self._replay = replay
        self._dir = dir
        self._clock = clock or SystemClock()
        self._task_of = task_of
        has_reference = Requirement.REFERENCE_LOGPROBS in self._recipes.needs
        self._reference = ReferencePolicy(self._network, self._ranks) if has_reference else None
        self._dtypes = {name: tensor.dtype for name, tensor in published_state(self._network).items()}
        self._ranks.adopt(self._network)
        self._optimizer = self._ranks.optimizer(self._network, config.betas, config.weight_decay)
        noise = self._recipes.main.ratio.noise
        self._noise = LayerNoise(self._network, noise, self._ranks) if noise else None
        self._memory = plain_data(self._recipes.main.initial_memory())
        self._next_draw = 1
        self.offness: tuple[OffPolicyStats, ...] = ()
        """How off policy each source was in the newest step."""
        self.notes: dict[str, Any] = {}
        """Plain data of whoever steers this learner; part of the checkpoint."""
        self._published = self._publish(policy_id, 0)

    def resumed(self) -> "PolicyLearner":
        """This learner as it was at its newest readable checkpoint; as it is where there is none.

        Its network has the initial weights wherever they are not trained.

        Raises:
            ConfigError: nothing readable there, of another lineage, or of another model.
        """
        if not has_checkpoint(self._dir):
            return self
        checkpoint, own = read_checkpoint(self._dir), self.version.policy_id
        if checkpoint.state["policy_id"] != own:
            raise ConfigError(f"{self._dir}: checkpoint of policy {checkpoint.state['policy_id'][:8]}, not {own[:8]}")
        self._check_reference(checkpoint.state.get("reference", ""))
        try:
            self._optimizer.load_state(checkpoint.tensors)
            if self._noise:
                self._noise.load_state(checkpoint.tensors)
        except (KeyError, RuntimeError) as error:
            raise ConfigError(f"{self._dir}: checkpoint of another model: {error}") from error
        self._published = self._publish(own, checkpoint.step)
        digest, saved = self.version.digest.hex(), checkpoint.state["digest"]
        if digest != saved:
            raise ConfigError(f"{self._dir}: restored weights are {digest[:8]}, saved {saved[:8]}")
        self._next_draw = int(checkpoint.state["next_draw"])
        self._memory = dict(checkpoint.state.get("memory", {}))
        self.notes = dict(checkpoint.state.get("notes", {}))
        return self

    def _check_reference(self, saved: str) -> None:
        if self._reference and saved and saved != self._reference.digest():
            raise ConfigError(
                f"{self._dir}: the reference policy was {saved[:8]}, the model's initial weights are now "
                f"{self._reference.digest()[:8]}: give model.source the weights that the run began with"
            )

    @property
    def version(self) -> PolicyVersion:
        """The newest version."""
        return self._published[0]

    @property
    def next_draw(self) -> int:
        """Number of the first draw that is not yet learned from."""
        return self._next_draw

    def snapshot(self) -> tuple[PolicyVersion, dict[str, Tensor]]:
        """Version and published tensors that belong together: the arguments of `Generator.load`.

        Safe while `step` runs in another thread; the tensors never change afterwards (and must not be changed).
        """
        return self._published

    def weights(self) -> dict[str, Tensor]:
        """The published tensors of the newest version."""
        return self._published[1]

    def save(self) -> None:
        """Writes a checkpoint that reproduces the learner; the newest two are kept (blocking)."""
        tensors = self._optimizer.state()
        if not tensors:
            return  # the first rank writes it
        state = {
            "policy_id": self.version.policy_id,
            "digest": self.version.digest.hex(),
            "next_draw": self._next_draw,
            "recipe": self._recipes.main.name,
            "memory": self._memory,
            "notes": self.notes,
            "reference": self._reference.digest() if self._reference else "",
        }
        if self._noise:
            tensors |= self._noise.state()
        write_checkpoint(self._dir, Checkpoint(step=self.version.step, tensors=tensors, state=state))

    def stop(self) -> None:
        """Ends whatever else takes part in its steps: nothing."""

    def step(
        self, draw: Draw, recipe: Recipe | None = None, is_frozen: bool = False, ratio_band: float = math.inf
    ) -> StepReport:
        """One draw learned from in `updates_per_step` optimizer updates (blocking).

        An update that is not finite, or has nothing to train on, is skipped; the report says so where all were.

        Args:
            draw: the groups.
            recipe: in place of the learner's own, for this step and the groups that it accepts; it needs no other
                policies than that one.
            is_frozen: measure only, update nothing.
            ratio_band: tokens whose known ratio to the generator is outside [1/band, band] are left out.

        Raises:
            ConfigError: the draw is empty, or the recipe may not learn from one of its groups.
        """
        recipes = self._recipes if recipe is None else self._recipes.with_main(recipe)
        seconds = {"score": 0.0, "backward": 0.0, "optimizer": 0.0}
        batch = make_batch(draw, self._tokenizer, self._ranks.device, self._task_of, self.version.policy_id)
        batch = replace(batch, ratio_band=ratio_band, learning_rate=self._learning_rate)
        shares: list[RecipeSlice] = []
        if not is_frozen:
            batch, shares = self._prepared(recipes, batch, seconds)
        found = Measured.empty(batch, self._network)
        found.seconds = seconds
        if is_frozen:
            updates = [self._measure(batch, found)]
        else:
            parts = minibatches(batch, self._config.updates_per_step)
            updates = [self._update(recipes, part, places, found) for places, part in parts]
        if not all(update.was_skipped for update in updates):
            for share in shares:
                self._observe(share, found.at(share.places), "draw")
            start = self._clock.monotonic_s()
            self._published = self._publish(self.version.policy_id, self.version.step + 1)
            found.add_seconds("optimizer", self._clock.monotonic_s() - start)
        self._next_draw = draw.step + 1
        self.offness = off_policy_by_source(batch, found.logprobs)
        return step_report(self.version, draw, batch, found, updates)

    def _pack(self, batch: Batch, scope: Scope) -> list[PackedRows]:
        # A linear layer of a usual network costs a token 24 H^2 operations, attention 4 H for each token it sees.
        # Coefficients of a group need it in one micro-batch, or everything is scored twice.
        break_even = math.inf if scope is Scope.GROUP else 6.0 * Head.of(self._network).weight.shape[1]
        return pack(batch, self._config.token_budget, self._config.share_prompt, break_even, self._ranks.count)

    def _prepared(self, recipes: RecipeSet, batch: Batch, seconds: dict[str, float]) -> tuple[Batch, list[RecipeSlice]]:
        """The draw with advantages, and by recipe."""
        batch, external = self._with_other_policies(recipes, batch, seconds), self._replay.external
        shares = [
            replace(share, batch=self._agreed(with_advantages(share.recipe, self._remembering(share), external)))
            for share in recipes.shares(batch)
        ]
        return merged(batch, shares), shares

    def _agreed(self, batch: Batch) -> Batch:
        """The first rank's numbers: where sums of a GPU differ in the last bit, all still make the same passes."""
        return replace(batch, **{name: self._ranks.agreed(values) for name, values in batch.per_rollout.items()})

    def _with_other_policies(self, recipes: RecipeSet, batch: Batch, seconds: dict[str, float]) -> Batch:
        """The draw with log-probs of the reference and of the policy as it is now, where a recipe takes them."""
        needs_proximal = any(
            Requirement.PROXIMAL_LOGPROBS in recipe.needs
            and (self._config.updates_per_step > 1 or recipe.needs_proximal_first)
            for recipe in recipes.used.values()
        )
        if not (needs_proximal or self._reference):
            return batch
        plan = self._pack(batch, recipes.main.scope)
        if needs_proximal:
            start = self._clock.monotonic_s()
            scores = score_batch(self._network, batch, plan, ranks=self._ranks)
            batch = replace(batch, proximal_logprobs=scores.logprobs)
            seconds["proximal"] = self._clock.monotonic_s() - start
        if self._reference:
            start = self._clock.monotonic_s()
            batch = replace(batch, reference_logprobs=self._reference.logprobs(batch, plan))
            seconds["reference"] = self._clock.monotonic_s() - start
        return batch

    def _remembering(self, share: RecipeSlice) -> Batch:
        """The share with what its recipe's parts remember."""
        return replace(share.batch, memory=self._memory if share.name == MAIN else self._memory.get(share.name, {}))

    def _observe(self, share: RecipeSlice, part: Measured, of: Literal["draw", "update"]) -> None:
        """Has the recipe's parts remember what was learned from."""
        seen = scored(share.recipe, share.batch, part.logprobs, part.entropy, part.probes)
        memory = plain_data(share.recipe.observe(seen, of))
        kept: dict[str, Any] = self._memory.get(share.name, {})
        self._memory |= memory if share.name == MAIN else {share.name: kept | memory}

    def _measure(self, batch: Batch, found: Measured) -> Update:
        """No update, only its figures."""
        measured = score_batch(self._network, batch, self._pack(batch, Scope.TOKEN), ranks=self._ranks)
        found.put(torch.arange(batch.num_rollouts, device=batch.mask.device), measured)
        return Update()

    def _update(self, recipes: RecipeSet, batch: Batch, places: Tensor, found: Measured) -> Update:
        """One optimizer update; what it measured goes to its places in `found`."""
        loss, parts = 0.0, list[tuple[RecipeSlice, Measured]]()
        for share in recipes.shares(batch):
            share = replace(share, batch=self._remembering(share))
            plan = self._pack(share.batch, share.recipe.scope)
            if plan:
                part_loss, part = self._gradient(share.recipe).of(share.batch, plan)
                loss += part_loss
                parts.append((share, part))
        if not parts:
            logger.warning("step skipped", extra={"step": self._next_draw, "reason": "no trained token"})
            return Update()
        start = self._clock.monotonic_s()
        try:
            norm, was_skipped = self._optimize(loss), False
        except NonFiniteStep as error:
            norm, was_skipped = float("nan"), True
            if self._noise:
                self._noise.discard()
            logger.warning("step skipped", extra={"step": self._next_draw, "reason": str(error)})
        else:
            if self._noise:
                self._noise.step()
            for share, part in parts:
                self._observe(share, part, "update")
        found.add_seconds("optimizer", self._clock.monotonic_s() - start)
        for share, part in parts:
            found.put(places[share.places], part)
        return Update(loss=loss, norm=norm, was_skipped=was_skipped)

    def _gradient(self, recipe: Recipe) -> Gradient:
        return Gradient(
            network=self._network,
            recipe=recipe,
            optimizer=self._optimizer,
            clock=self._clock,
            ranks=self._ranks,
            noise=self._noise if recipe.ratio.noise else None,
        )

    @property
    def _learning_rate(self) -> float:
        """Of the step that makes the next version: the configured one, or less while it warms up."""
        step, warmup_steps = self.version.step + 1, self._config.warmup_steps
        return self._config.learning_rate * (min(1.0, step / warmup_steps) if warmup_steps else 1.0)

    def _optimize(self, loss: float) -> float:
        if loss - loss != 0:  # infinite or NaN
            self._optimizer.discard()
            raise NonFiniteStep(f"loss {loss} is not finite")
        return self._optimizer.step(self._learning_rate, self._config.max_grad_norm)

    def _publish(self, policy_id: str, step: int) -> tuple[PolicyVersion, dict[str, Tensor]]:
        parts = self._ranks.whole(published_state(self._network))
        tensors = {name: tensor.to(self._dtypes[name], copy=True) for name, tensor in parts}
        digest = self._ranks.agreed(torch.frombuffer(bytearray(weights_digest(tensors)), dtype=torch.uint8))
        return PolicyVersion(policy_id=policy_id, step=step, digest=digest.numpy().tobytes()), tensors


def plain_data(memory: Mapping[str, Any]) -> dict[str, Any]:
    """The memory as it comes back from a checkpoint, so that a restart changes nothing. Raises TypeError."""
    return cast("dict[str, Any]", json.loads(json.dumps(memory)))
