"""One policy in training: a draw in, a new policy version out.

Invariant: a step either makes exactly one new version or leaves weights, optimizer and version as they
were. A step uses no random numbers, so checkpoint and draws reproduce the learner bit for bit.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from swarm.clock import Clock, SystemClock
from swarm.config import LearnerConfig, ReplayConfig
from swarm.errors import ConfigError, NonFiniteStep
from swarm.interfaces import TextCodec
from swarm.learn.batch import Batch, make_batch
from swarm.learn.checkpoint import Checkpoint, has_checkpoint, read_checkpoint, write_checkpoint
from swarm.learn.diagnostics import edge_reports, step_diagnostics
from swarm.learn.objective import Coefficients, coefficients, with_advantages
from swarm.learn.optimizer import MasterAdamW
from swarm.learn.packing import PackedRows, pack, padding_share
from swarm.learn.part import Scope
from swarm.learn.recipe import Recipe
from swarm.learn.score import token_logprobs
from swarm.model import snapshot, weights_digest
from swarm.types import Draw, PolicyVersion, StepReport

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Scores:
    """What a step measured, filled micro-batch by micro-batch."""

    logprobs: Tensor  # [N, L] nats, 0 off the mask
    entropy: Tensor  # [N, L] nats
    bounded: Tensor  # bool [N, L]
    loss: float = 0.0


class PolicyLearner:
    """Implements `swarm.interfaces.Learner` for one Hugging Face causal language model.

    The network stays in evaluation mode: log-probs are those of the policy that generates, dropout off.
    """

    def __init__(
        self,
        network: nn.Module,
        codec: TextCodec,
        recipe: Recipe,
        config: LearnerConfig,
        replay: ReplayConfig,
        policy_id: str,
        dir: Path,
        device: torch.device | str = "cpu",
        clock: Clock | None = None,
    ) -> None:
        self._network = network.to(device).eval()
        self._codec = codec
        self._recipe = recipe
        self._config = config
        self._replay = replay
        self._dir = dir
        self._device = device
        self._clock = clock or SystemClock()
        self._optimizer = MasterAdamW(network, config.betas, config.weight_decay)
        self._next_draw = 1
        self._published = self._publish(policy_id, 0)

    @classmethod
    def open(
        cls,
        network: nn.Module,
        codec: TextCodec,
        recipe: Recipe,
        config: LearnerConfig,
        replay: ReplayConfig,
        policy_id: str,
        dir: Path,
        device: torch.device | str = "cpu",
    ) -> "PolicyLearner":
        """Resumes from the newest checkpoint under `dir`, or starts at step 0 where there is none."""
        start = cls.resume if has_checkpoint(dir) else cls
        return start(network, codec, recipe, config, replay, policy_id, dir, device)

    @classmethod
    def resume(
        cls,
        network: nn.Module,
        codec: TextCodec,
        recipe: Recipe,
        config: LearnerConfig,
        replay: ReplayConfig,
        policy_id: str,
        dir: Path,
        device: torch.device | str = "cpu",
    ) -> "PolicyLearner":
        """The learner as it was at its newest readable checkpoint.

        Args:
            network: of the same architecture, with the initial weights wherever they are not trained.

        Raises:
            ConfigError: nothing readable there, of another lineage, or of another model.
        """
        checkpoint = read_checkpoint(dir)
        if checkpoint.state["policy_id"] != policy_id:
            raise ConfigError(f"{dir}: checkpoint of policy {checkpoint.state['policy_id'][:8]}, not {policy_id[:8]}")
        learner = cls(network, codec, recipe, config, replay, policy_id, dir, device)
        try:
            learner._optimizer.load_state(checkpoint.tensors)
        except (KeyError, RuntimeError) as error:
            raise ConfigError(f"{dir}: checkpoint of another model: {error}") from error
        learner._published = learner._publish(policy_id, checkpoint.step)
        digest = learner.version.digest.hex()
        if digest != checkpoint.state["digest"]:
            raise ConfigError(f"{dir}: restored weights are {digest[:8]}, saved {checkpoint.state['digest'][:8]}")
        learner._next_draw = int(checkpoint.state["next_draw"])
        return learner

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
        state = {
            "policy_id": self.version.policy_id,
            "digest": self.version.digest.hex(),
            "next_draw": self._next_draw,
            "recipe": self._recipe.name,
        }
        write_checkpoint(self._dir, Checkpoint(step=self.version.step, tensors=self._optimizer.state(), state=state))

    def step(self, draw: Draw) -> StepReport:
        """One optimizer step (blocking). A non-finite step, or one with nothing to train on, is skipped and reported.

        Raises:
            ConfigError: the draw is empty, or the recipe may not learn from one of its groups.
        """
        batch = make_batch(draw, self._codec, self._device)
        batch = with_advantages(self._recipe, batch, self._replay.foreign)
        plan = pack(batch, self._config.token_budget, self._config.share_prompt)
        seconds = {"score": 0.0, "backward": 0.0, "optimizer": 0.0}
        dtype = torch.promote_types(next(self._network.parameters()).dtype, torch.float32)
        empty = torch.zeros(batch.mask.shape, dtype=dtype, device=batch.mask.device)
        scores = _Scores(empty, empty.clone(), torch.zeros_like(batch.mask))
        norm, was_skipped = 0.0, not plan
        if plan:
            self._backward(batch, plan, scores, seconds)
            try:
                norm = self._update(scores.loss, seconds)
            except NonFiniteStep as error:
                norm, was_skipped = float("nan"), True
                logger.warning("step skipped", extra={"step": draw.step, "reason": str(error)})
        else:
            logger.warning("step skipped", extra={"step": draw.step, "reason": "no trained token"})
        figures = step_diagnostics(batch, scores.logprobs, scores.entropy, scores.bounded)
        figures["padding_share"] = padding_share(plan)
        figures["num_micro_batches"] = float(len(plan))
        self._next_draw = draw.step + 1
        num_local = sum(drawn.scored.is_local for drawn in draw.groups)
        return StepReport(
            version=self.version,
            loss=scores.loss,
            grad_norm=norm,
            num_tokens=batch.num_tokens,
            was_skipped=was_skipped,
            diagnostics=figures,
            seconds=seconds,
            edges=edge_reports(batch, scores.logprobs),
            ages_steps=tuple(drawn.age_steps for drawn in draw.groups),
            num_local=num_local,
            num_external=len(draw.groups) - num_local,
            draw_step=draw.step,
        )

    def _backward(self, batch: Batch, plan: Sequence[PackedRows], scores: _Scores, seconds: dict[str, float]) -> None:
        """Accumulates the gradient of the whole step in the optimizer."""
        spans_step = self._recipe.scope in (Scope.GROUP, Scope.STEP) and len(plan) > 1
        shared: Coefficients | None = None
        if spans_step:
            start = self._clock.monotonic_s()
            with torch.no_grad():
                for packed in plan:
                    _scatter(scores, packed, *token_logprobs(self._network, packed))
            shared = self._note(coefficients(self._recipe, batch, scores.logprobs, scores.entropy), scores, None)
            seconds["score"] += self._clock.monotonic_s() - start
        for packed in plan:
            start = self._clock.monotonic_s()
            logprobs, entropy = token_logprobs(self._network, packed)
            scored = self._clock.monotonic_s()
            if shared is None:
                _scatter(scores, packed, logprobs, entropy)
                chosen = self._part(batch, packed, scores)
            else:
                chosen = shared
            _chain(packed, logprobs, entropy, chosen)
            self._optimizer.accumulate()
            seconds["score"] += scored - start
            seconds["backward"] += self._clock.monotonic_s() - scored

    def _part(self, batch: Batch, packed: PackedRows, scores: _Scores) -> Coefficients:
        """Coefficients of one micro-batch, at their places in the whole step."""
        members = torch.tensor(packed.members, device=batch.mask.device)
        part = coefficients(
            self._recipe, batch.select(packed.members), scores.logprobs[members], scores.entropy[members]
        )
        return self._note(part, scores, members)

    @staticmethod
    def _note(found: Coefficients, scores: _Scores, members: Tensor | None) -> Coefficients:
        scores.loss += found.loss
        if members is None:
            scores.bounded = found.bounded
            return found
        scores.bounded[members] = found.bounded
        return found.spread(members, scores.logprobs.shape[0])

    def _update(self, loss: float, seconds: dict[str, float]) -> float:
        start = self._clock.monotonic_s()
        step = self.version.step + 1
        warm = min(1.0, step / self._config.warmup_steps) if self._config.warmup_steps else 1.0
        if loss - loss != 0:  # infinite or NaN
            self._optimizer.discard()
            raise NonFiniteStep(f"loss {loss} is not finite")
        norm = self._optimizer.step(self._config.learning_rate * warm, self._config.max_grad_norm)
        self._published = self._publish(self.version.policy_id, step)
        seconds["optimizer"] += self._clock.monotonic_s() - start
        return norm

    def _publish(self, policy_id: str, step: int) -> tuple[PolicyVersion, dict[str, Tensor]]:
        tensors = snapshot(self._network)
        return PolicyVersion(policy_id=policy_id, step=step, digest=weights_digest(tensors)), tensors


def _scatter(scores: _Scores, packed: PackedRows, logprobs: Tensor, entropy: Tensor) -> None:
    scores.logprobs[packed.rollouts, packed.positions] = logprobs.detach()
    scores.entropy[packed.rollouts, packed.positions] = entropy.detach()


def _chain(packed: PackedRows, logprobs: Tensor, entropy: Tensor, found: Coefficients) -> None:
    """Backward from d(loss)/d(log pi) and d(loss)/d(entropy) into the network."""
    place = (packed.rollouts, packed.positions)
    if found.entropy is None:
        torch.autograd.backward([logprobs], [found.logprobs[place]])
    else:
        torch.autograd.backward([logprobs, entropy], [found.logprobs[place], found.entropy[place]])
