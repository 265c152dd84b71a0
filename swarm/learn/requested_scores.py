"""Scores that recipes ask for before a step learns: of other policies, of right answers, without observations.

Invariant: each is made only where a recipe of the step needs it, without gradient, with the weights before the step.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn

from swarm.clock import Clock
from swarm.interfaces import AnswerOf, Tokenizer
from swarm.learn.answer_scores import answer_probs
from swarm.learn.feedback_shifts import feedback_shifts
from swarm.learn.gradient import Measured, score_batch
from swarm.learn.packing import PackedRows
from swarm.learn.ranks import Ranks
from swarm.learn.reference_policy import ReferencePolicy
from swarm.learn.step_plan import updates_by_turn
from swarm.objectives.batch import Batch
from swarm.objectives.fallbacks import RecipeSet
from swarm.objectives.part import Requirement, Scope


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedScores:
    """Adds to the batch of a step what its recipes need of it beside the generator's log-probs.

    Example:
        batch = scores.add(recipes, batch, measured)
    """

    network: nn.Module  # the policy
    tokenizer: Tokenizer
    reference: ReferencePolicy | None  # where a recipe needs it
    answer_of: AnswerOf | None  # the right answer to a task
    pack: Callable[[Batch, Scope], list[PackedRows]]
    ranks: Ranks
    clock: Clock
    updates_per_step: int

    def add(self, recipes: RecipeSet, batch: Batch, measured: Measured) -> Batch:
        """The whole draw with its scores; the seconds that they took go to `measured`."""
        if Requirement.ANSWER_PROBS in recipes.needs:
            with self._timing("answers", measured):
                answers = self._answers(batch)
                found = answer_probs(self.network, batch, self.tokenizer, answers, self._pack_tokens, self.ranks)
                batch = replace(batch, answer_probs=found)
        if Requirement.FEEDBACK_SHIFTS in recipes.needs:
            with self._timing("feedback", measured):
                found = feedback_shifts(self.network, batch, self.tokenizer, self._pack_tokens, self.ranks)
                batch = replace(batch, feedback_shifts=found)
        needs_proximal = self._needs_proximal(recipes)
        if not (needs_proximal or self.reference):
            return batch
        plan = self.pack(batch, recipes.main.scope)
        if needs_proximal:
            with self._timing("proximal", measured):
                found = score_batch(self.network, batch, plan, ranks=self.ranks).logprobs
                batch = replace(batch, proximal_logprobs=found)
        if self.reference:
            with self._timing("reference", measured):
                batch = replace(batch, reference_logprobs=self.reference.logprobs(batch, plan))
        return batch

    def _pack_tokens(self, batch: Batch) -> list[PackedRows]:
        return self.pack(batch, Scope.TOKEN)

    def _answers(self, batch: Batch) -> list[str]:
        """Of each group."""
        assert self.answer_of is not None, "the learner was not told where right answers come from"
        names = [key.rpartition("/") for key in batch.task_keys]
        return [self.answer_of(env, int(number)) for env, _, number in names]

    def _needs_proximal(self, recipes: RecipeSet) -> bool:
        """With one update of a draw its policy is the proximal one, which shows once a token is scored."""
        has_several_updates = self.updates_per_step > 1 or updates_by_turn(recipes)
        return any(
            Requirement.PROXIMAL_LOGPROBS in recipe.needs and (has_several_updates or recipe.needs_proximal_first)
            for recipe in recipes.used.values()
        )

    @contextmanager
    def _timing(self, phase: str, measured: Measured) -> Generator[None]:
        start = self.clock.monotonic_s()
        yield
        measured.add_seconds(phase, self.clock.monotonic_s() - start)
