"""The learner: makes a new policy version from each draw of groups.

`PolicyLearner.step` plans (advantages, split into updates), makes the updates (gradient, optimizer) and publishes.

Invariant: a step either makes exactly one new version or leaves weights, optimizer, memory and version as
they were. A step's only random numbers are a method's layer noise, seeded by the update: checkpoint and draws
reproduce the learner bit for bit.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, Self, cast

import torch
from torch import Tensor, nn

from swarm.clock import Clock, SystemClock
from swarm.config import LearnerConfig, ReplayConfig
from swarm.errors import ConfigError, NonFiniteStep
from swarm.interfaces import AnswerOf, TaskOf, Tokenizer
from swarm.learn.checkpoint import (
    NUM_KEPT,
    Checkpoint,
    has_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from swarm.learn.checkpoint_state import COMPUTE_DTYPE
from swarm.learn.closer_look import closer_look
from swarm.learn.diagnostics import (
    LikelihoodStats,
    OffPolicyStats,
    Update,
    likelihood_by_source,
    off_policy_by_source,
    step_report,
)
from swarm.learn.fused_head import Head
from swarm.learn.gradient import Gradient, Measured, score_batch
from swarm.learn.gradient_checkpointing import checkpoint_layers
from swarm.learn.layer_noise import LayerNoise
from swarm.learn.logprobs import check_head
from swarm.learn.optimizer import learning_rate
from swarm.learn.packing import PackedRows, pack
from swarm.learn.ranks import OneProcess, Ranks
from swarm.learn.requested_scores import ReferencePolicy, RequestedScores
from swarm.learn.step_plan import StepPlan, split_step
from swarm.learn.supervised import SUPERVISED, supervised_batch
from swarm.model.published_dtype import network_dtype, published_dtype
from swarm.model.shared_beginnings import is_free_of_place
from swarm.model.version_digest import live_state, weights_digest
from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import scored, with_advantages, within_bounds
from swarm.objectives.draw_batch import make_batch
from swarm.objectives.fallbacks import MAIN, RecipeSet, RecipeSlice, merged
from swarm.objectives.mass_clip import MassHistory, clip_figures, scope_of
from swarm.objectives.part import Requirement, Scope
from swarm.objectives.recipe import Recipe
from swarm.telemetry.shown_updates import EVERY_S, ShownUpdate
from swarm.types import Draw, Evaluation, PolicyVersion, StepReport, Task

BETAS: Final = (0.9, 0.99)  # of AdamW: the second moment is a mean over 100 steps, since runs have some hundreds

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
        answer_of: AnswerOf | None = None,
        show: Callable[[ShownUpdate], None] | None = None,
        num_kept: int = NUM_KEPT,
    ) -> None:
        """A learner at step 0; `resume` continues a run. Raises ConfigError for a network that cannot be trained.

        Args:
            dir: folder of the checkpoints.
            ranks: the processes that share the step, and their device; None: this process, on the network's device.
            task_of: rebuilds the task of a group made with another tokenizer, to encode the prompt anew.
            answer_of: returns the right answer to a task, for recipes that score the answer's likelihood.
            show: receives a token-by-token view of a step; called at most once in `shown_updates.EVERY_S` seconds.
            num_kept: number of newest checkpoints that `save` keeps.
        """
        self._show, self._show_at_s = show, -math.inf
        self._network = network.eval()
        self._ranks = ranks or OneProcess(next(network.parameters()).device)
        check_head(self._network)
        self._tokenizer = tokenizer
        self._recipes = recipe if isinstance(recipe, RecipeSet) else RecipeSet(main=recipe)
        self._config = config
        self._replay = replay
        self._dir, self._num_kept = dir, num_kept
        self._clock = clock or SystemClock()
        self._task_of = task_of
        has_reference = Requirement.REFERENCE_LOGPROBS in self._recipes.needs
        self._reference = ReferencePolicy(self._network, self._ranks) if has_reference else None
        self._scores = RequestedScores(
            network=self._network,
            tokenizer=tokenizer,
            reference=self._reference,
            answer_of=answer_of,
            pack=self._pack,
            ranks=self._ranks,
            clock=self._clock,
            updates_per_step=config.updates_per_step,
        )
        live = live_state(self._network)
        self._dtypes = {name: published_dtype(self._network, name, tensor) for name, tensor in live.items()}
        self._compute_dtype = str(network_dtype(self._network)).removeprefix("torch.")
        self._ranks.prepare(self._network)
        if config.gradient_checkpointing:
            checkpoint_layers(self._network)
        self._optimizer = self._ranks.optimizer(self._network, BETAS, config.weight_decay)
        noise = self._recipes.main.ratio.noise
        self._noise = LayerNoise(self._network, noise, self._ranks) if noise else None
        self._memory = plain_data(self._recipes.main.initial_memory())
        self._masses = MassHistory({})
        self.next_draw = 1  # number of the first draw that is not yet learned from
        self.off_policy_stats: tuple[OffPolicyStats, ...] = ()
        """Off-policy figures of each source in the newest step."""
        self.likelihood_stats: tuple[LikelihoodStats, ...] = ()
        """Likelihood of each source's tokens in the newest step."""
        self.notes: dict[str, Any] = {}
        """Plain data that the caller keeps in the checkpoint, such as the guard's state."""
        self._published = self._publish(policy_id, 0)

    def resume(self) -> Self:
        """Restores the newest readable checkpoint, if the folder has any checkpoint, and returns this learner.

        Weights that are not trained are not in the checkpoint: the network must have the initial ones.

        Raises:
            ConfigError: no checkpoint is readable, or it is of another lineage, model or reference policy.
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
        if (before := checkpoint.state.get(COMPUTE_DTYPE)) not in (None, self._compute_dtype):
            changed = (
                "steps from here on are computed in another dtype: the published values are the same, log-probs differ"
            )
            logger.warning(changed, extra={"before": before, "now": self._compute_dtype})
        self.next_draw = int(checkpoint.state["next_draw"])
        self._memory = dict(checkpoint.state.get("memory", {}))
        self._masses = MassHistory.from_json(checkpoint.state.get("masses", {}))
        self.notes = dict(checkpoint.state.get("notes", {}))
        return self

    def _check_reference(self, saved: str) -> None:
        if self._reference and saved and saved != self._reference.digest():
            raise ConfigError(
                f"{self._dir}: the reference policy was {saved[:8]}, the model's initial weights are now "
                f"{self._reference.digest()[:8]}: give model.source the weights that the run began with"
            )

    @property
    def compute_dtype(self) -> str:
        """Dtype of forward and backward passes, as "bfloat16"."""
        return self._compute_dtype

    @property
    def version(self) -> PolicyVersion:
        """The newest policy version."""
        return self._published[0]

    def snapshot(self) -> tuple[PolicyVersion, dict[str, Tensor]]:
        """The newest version and its published tensors (none on ranks above 0), as arguments of `Generator.load`.

        Safe while `step` runs in another thread: later steps do not change these tensors, and no caller may.
        """
        return self._published

    def save(self) -> None:
        """Writes a checkpoint and deletes all but the newest `num_kept` (blocking). Raises OSError, NonFiniteStep."""
        self._write(self._gather())

    def _gather(self) -> Checkpoint | None:
        """The checkpoint to write; None on the ranks that write none."""
        tensors = self._optimizer.state()
        if not tensors:
            return None
        state = {
            "policy_id": self.version.policy_id,
            "digest": self.version.digest.hex(),
            "next_draw": self.next_draw,
            "recipe": self._recipes.main.name,
            "memory": self._memory,
            "masses": self._masses.seen,
            "notes": self.notes,
            "reference": self._reference.digest() if self._reference else "",
            COMPUTE_DTYPE: self._compute_dtype,
        }
        if self._noise:
            tensors |= self._noise.state()
        return Checkpoint(step=self.version.step, tensors=tensors, state=state)

    def _write(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            write_checkpoint(self._dir, checkpoint, self._num_kept)

    def evaluated(self, evaluations: Sequence[Evaluation]) -> None:
        """Does nothing; `GuardedLearner` acts on evaluations."""

    def stop(self) -> None:
        """Does nothing; `LeadingLearner` ends the other ranks."""

    def step(
        self, draw: Draw, recipe: Recipe | None = None, is_frozen: bool = False, ratio_band: float = math.inf
    ) -> StepReport:
        """Learns from one draw (blocking) in at most `updates_per_step` optimizer updates, or as many per turn range.

        An update that is not finite, or has no trained token, is skipped. If every update is skipped, no version is
        made and the report has `was_skipped`.

        Args:
            draw: the groups.
            recipe: replaces the main recipe for this step, for the groups that it accepts; it must not need further
                policies (reference, proximal).
            is_frozen: True scores the draw without an update.
            ratio_band: tokens whose known ratio to the generator is outside [1/band, band] are left out.

        Raises:
            ConfigError: the draw is empty, or no recipe accepts one of the draw's groups.
        """
        recipes = self._recipes if recipe is None else self._recipes.with_main(recipe)
        batch = drawn = replace(self._batch(draw), ratio_band=ratio_band)
        measured = Measured.empty(batch, self._network)
        measured.seconds = {"score": 0.0, "backward": 0.0, "optimizer": 0.0}
        if is_frozen:
            updates = [self._measure(batch, measured)]
        else:
            plan = self._plan_step(recipes, batch, measured)
            batch = plan.batch
            updates = [self._update(recipes.main, slices, measured) for slices in plan.updates]
            if not all(update.was_skipped for update in updates):
                for each in plan.slices:
                    self._observe(each, measured.at(each.places), "draw")
                start = self._clock.monotonic_s()
                self._published = self._publish(self.version.policy_id, self.version.step + 1)
                measured.add_seconds("optimizer", self._clock.monotonic_s() - start)
        self.next_draw = draw.step + 1
        self.off_policy_stats = off_policy_by_source(batch, measured.logprobs)
        self.likelihood_stats = likelihood_by_source(batch, measured.logprobs)
        is_made = not all(update.was_skipped for update in updates)
        if self._show is not None and is_made and self._clock.monotonic_s() >= self._show_at_s:
            self._show_at_s = self._clock.monotonic_s() + EVERY_S
            self._show(closer_look(self.version.step, recipes.main.name, draw, drawn, batch, measured))
        return step_report(self.version, draw, batch, measured, updates)

    def dry_run(self, draw: Draw, recipe: Recipe | None = None) -> None:
        """Computes the gradients of a step and discards them (blocking): nothing changes. Arguments as in `step`."""
        recipes = self._recipes if recipe is None else self._recipes.with_main(recipe)
        batch = self._batch(draw)
        for slices in self._plan_step(recipes, batch, Measured.empty(batch, self._network)).updates:
            self._accumulate(recipes.main, slices)
            self._discard()

    def imitate(self, pairs: Sequence[tuple[Task, str]], learning_rate: float, activity: str = "imitating") -> float:
        """One supervised update toward given answers (blocking); makes no version until `begin_anew`.

        Args:
            pairs: tasks with a right answer to each.
            learning_rate: the rate of this update.
            activity: name under which progress is reported.

        Returns:
            Mean negative log-likelihood of the answers' tokens before the update, nats.

        Raises:
            NonFiniteStep: the loss or the gradient is not finite; nothing changed.
        """
        prompts = [self._tokenizer.encode_prompt(task) for task, _ in pairs]
        answers = [self._tokenizer.encode_response(answer) for _, answer in pairs]
        batch = supervised_batch(prompts, answers, self._ranks.device)
        loss, _ = replace(self._gradient(SUPERVISED), activity=activity).of(batch, self._pack(batch, Scope.TOKEN))
        self._optimize(loss, learning_rate)
        return loss

    def begin_anew(self) -> None:
        """Makes the present weights version 0, with an optimizer that has made no update; valid only before step 1."""
        assert self.version.step == 0
        self._optimizer = self._ranks.optimizer(self._network, BETAS, self._config.weight_decay)
        self._published = self._publish(self.version.policy_id, 0)

    def _batch(self, draw: Draw) -> Batch:
        batch = make_batch(draw, self._tokenizer, self._ranks.device, self._task_of, self.version.policy_id)
        return replace(batch, learning_rate=self._learning_rate)

    def _pack(self, batch: Batch, scope: Scope) -> list[PackedRows]:
        # A linear layer of a usual network costs a token 24 H^2 operations, attention 4 H for each token it sees.
        # Coefficients of a group need it in one micro-batch, or everything is scored twice.
        break_even = 6.0 * Head.of(self._network).weight.shape[1]
        return pack(
            batch,
            self._config.token_budget,
            break_even=math.inf if scope is Scope.GROUP else break_even,
            num_ranks=self._ranks.count,
            most_alike=int(break_even) if is_free_of_place(self._network) else 0,
        )

    # --- planning ----------------------------------------------------------------------------------

    def _plan_step(self, recipes: RecipeSet, batch: Batch, measured: Measured) -> StepPlan:
        """Computes advantages recipe by recipe and splits the draw into updates."""
        batch = self._scores.add(recipes, batch, measured)
        slices: list[RecipeSlice] = []
        for each in recipes.slices(batch):
            shaped = with_advantages(each.recipe, self._with_memory(each), self._replay.external)
            # Rank 0's numbers: sums on different GPUs may differ in the last bit, and all ranks must make equal passes.
            shaped = replace(shaped, **{k: self._ranks.broadcast(v) for k, v in shaped.per_rollout.items()})
            slices.append(replace(each, batch=shaped))
        batch = merged(batch, slices)
        return split_step(batch, slices, recipes, self._config.updates_per_step)

    def _with_memory(self, part: RecipeSlice) -> Batch:
        """The slice's batch with the current memory of its recipe's parts."""
        return replace(part.batch, memory=self._memory if part.name == MAIN else self._memory.get(part.name, {}))

    def _observe(self, part: RecipeSlice, measured: Measured, of: Literal["draw", "update"]) -> None:
        """Updates the memory of the recipe's parts, unless the slice is newcomers' or has no token to learn from."""
        if part.is_newcomers or not bool(within_bounds(part.recipe, part.batch, measured.logprobs).mask.any()):
            return
        seen = scored(part.recipe, part.batch, measured.logprobs, measured.entropy, measured.probes)
        memory = plain_data(part.recipe.observe(seen, of))
        kept: dict[str, Any] = self._memory.get(part.name, {})
        self._memory |= memory if part.name == MAIN else {part.name: kept | memory}

    # --- updates -----------------------------------------------------------------------------------

    def _measure(self, batch: Batch, measured: Measured) -> Update:
        """Scores the draw without an update."""
        scores = score_batch(self._network, batch, self._pack(batch, Scope.TOKEN), ranks=self._ranks)
        measured.put(torch.arange(batch.num_rollouts, device=batch.mask.device), scores)
        return Update()

    def _update(self, main: Recipe, slices: Sequence[RecipeSlice], measured: Measured) -> Update:
        """Makes one optimizer update from the slices of all recipes and adds its measurements to `measured`."""
        loss, parts, masses = self._accumulate(main, slices)
        if not parts:
            logger.warning("step skipped", extra={"step": self.next_draw, "reason": "no trained token"})
            return Update()
        start = self._clock.monotonic_s()
        try:
            norm, was_skipped = self._optimize(loss, self._learning_rate), False
        except NonFiniteStep as error:
            norm, was_skipped = float("nan"), True
            if self._noise:
                self._noise.discard()
            logger.warning("step skipped", extra={"step": self.next_draw, "reason": str(error)})
        else:
            if self._noise:
                self._noise.step()
            self._masses.observe(main, masses)
            for each, part in parts:
                self._observe(each, part, "update")
        measured.add_seconds("optimizer", self._clock.monotonic_s() - start)
        for each, part in parts:
            measured.put(each.places, part, None if each.batch.turns is None else each.batch.learned)
        num_clipped, others_share = clip_figures(masses)
        return Update(loss=loss, norm=norm, was_skipped=was_skipped, num_clipped=num_clipped, others_share=others_share)

    def _accumulate(
        self, main: Recipe, slices: Sequence[RecipeSlice]
    ) -> tuple[float, list[tuple[RecipeSlice, Measured]], list[tuple[Batch, Tensor]]]:
        """Accumulates the slices' gradients in the optimizer; returns the loss, measurements by slice, and masses."""
        loss, parts = 0.0, list[tuple[RecipeSlice, Measured]]()
        masses: list[tuple[Batch, Tensor]] = []
        for each in slices:
            clip = self._masses.clip(main, self._nominal_groups, masses)
            # An update before this one may have changed the memory.
            each = replace(each, batch=replace(self._with_memory(each), mass_clip=clip))
            micro_batches = self._pack(each.batch, scope_of(each.recipe, each.batch, self._ranks.count))
            if micro_batches:
                part_loss, part = self._gradient(each.recipe).of(each.batch, micro_batches)
                loss += part_loss
                parts.append((each, part))
                masses.append((each.batch, part.masses))
        return loss, parts, masses

    def _discard(self) -> None:
        self._optimizer.discard()
        if self._noise:
            self._noise.discard()

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
    def _nominal_groups(self) -> float:
        """Configured local plus external groups of one optimizer update."""
        return (self._replay.local_groups + self._replay.external_groups) / self._config.updates_per_step

    @property
    def _learning_rate(self) -> float:
        """Learning rate of the step that makes the next version."""
        return learning_rate(self._config, self.version.step + 1)

    def _optimize(self, loss: float, learning_rate: float) -> float:
        if loss - loss != 0:  # infinite or NaN
            self._optimizer.discard()
            raise NonFiniteStep(f"loss {loss} is not finite")
        return self._optimizer.step(learning_rate, self._config.max_grad_norm)

    def _publish(self, policy_id: str, step: int) -> tuple[PolicyVersion, dict[str, Tensor]]:
        parts = self._ranks.gather_whole(live_state(self._network))
        tensors = {name: tensor.to(self._dtypes[name], copy=True) for name, tensor in parts}
        digest = self._ranks.broadcast(torch.frombuffer(bytearray(weights_digest(tensors)), dtype=torch.uint8))
        return PolicyVersion(policy_id=policy_id, step=step, digest=digest.numpy().tobytes()), tensors


def plain_data(memory: Mapping[str, Any]) -> dict[str, Any]:
    """The memory after a JSON round trip, as a checkpoint restores it: a restart changes nothing. Raises TypeError."""
    return cast("dict[str, Any]", json.loads(json.dumps(memory)))
