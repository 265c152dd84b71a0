"""Tokens of a group for a page, shaded by their weight in a step, or by how unlikely they were when they were chosen.

Invariant: a shade follows from the figures in the token's tip; without a figure there is no shade.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from swarm.interfaces import Tokenizer
from swarm.telemetry.shown_updates import SAID, TRAINED, ShownRollout, ShownUpdate
from swarm.trained.samples import Sample, SampledGroup

NUM_SHADES: Final = 5
_NOT_TRAINED: Final = {True: "the environment said it", False: "not learned from: the recipe or the guard left it out"}
_SURPRISING_NATS: Final = 5.0  # of a token with the deepest shade


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenView:
    """A token as the page shows it: text, shade, and the figures behind the shade."""

    text: str
    css: str  # classes of the style sheet
    tip: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutView:
    """The tokens of one response, in order."""

    head: str  # its reward, and what is the same for all its tokens
    tokens: tuple[TokenView, ...]


def tokens_in_update(update: ShownUpdate, digest: str, tokenizer: Tokenizer) -> tuple[RolloutView, ...]:
    """Rollouts of a group that a step kept, each token shaded by its weight in the step."""
    rollouts = [each for each in update.rollouts if each.digest == digest]
    most = max((abs(weight) for each in rollouts for weight in each.weights if math.isfinite(weight)), default=0.0)
    return tuple(_learned(each, most, tokenizer) for each in rollouts)


def tokens_as_sampled(group: SampledGroup) -> tuple[RolloutView, ...]:
    """Rollouts of a group as the generator made them, each token shaded by how unlikely it was."""
    return tuple(_sampled(number, sample) for number, sample in enumerate(group.samples, 1))


def _learned(rollout: ShownRollout, most: float, tokenizer: Tokenizer) -> RolloutView:
    tokens: list[TokenView] = []
    for index, token in enumerate(rollout.token_ids):
        text = _text(token, tokenizer)
        if rollout.kinds[index] != TRAINED:
            tokens.append(TokenView(text=text, css="said", tip=_NOT_TRAINED[rollout.kinds[index] == SAID]))
            continue
        weight, learner, generator = rollout.weights[index], rollout.learner[index], rollout.generator[index]
        shade = math.ceil(NUM_SHADES * abs(weight) / most) if most and math.isfinite(weight) else 0
        css = f"{'up' if weight > 0 else 'down'}{shade}" if shade else ""
        figures = [f"log-prob {learner:.3f} under the learner"]
        if generator is not None:
            ratio = math.exp(max(-20.0, min(20.0, learner - generator)))
            figures += [f"{generator:.3f} when it was generated", f"ratio {ratio:.3g}"]
        figures += [f"advantage {rollout.advantages[index]:.3g}", f"weight {weight:+.3g} in the step"]
        if rollout.bounded[index]:
            css, figures = f"{css} bounded".strip(), [*figures, "clipped or capped by the recipe"]
        tokens.append(TokenView(text=text, css=css, tip=", ".join(figures)))
    age = f"{rollout.age_steps} {'step' if rollout.age_steps == 1 else 'steps'} old"
    return RolloutView(head=f"answer {rollout.place + 1}: reward {rollout.reward:g}, {age}", tokens=tuple(tokens))


def _sampled(number: int, sample: Sample) -> RolloutView:
    tokens: list[TokenView] = []
    for token in sample.tokens:
        made = f"by version {token.step}"
        if not token.is_action:
            view = TokenView(text=token.text, css="said", tip="the environment said it")
        elif token.logprob is None:
            view = TokenView(text=token.text, css="", tip=f"{made}; its log-prob is not known")
        else:
            shade = math.ceil(NUM_SHADES * min(1.0, -token.logprob / _SURPRISING_NATS)) if token.logprob < -0.05 else 0
            css = f"odd{shade}" if shade else ""
            view = TokenView(text=token.text, css=css, tip=f"log-prob {token.logprob:.3f}, {made}")
        tokens.append(view)
    if not tokens:  # a group of another tokenizer, or one without a trace
        tokens = [TokenView(text=action, css="", tip="its tokens are not known here") for action in sample.actions]
    return RolloutView(
        head=f"answer {number}: reward {sample.reward:g}, ended by {sample.finish}", tokens=tuple(tokens)
    )


def _text(token: int, tokenizer: Tokenizer) -> str:
    return "<end>" if token in tokenizer.eos_ids else tokenizer.decode([token])


def groups_of(update: ShownUpdate) -> Sequence[tuple[str, int, float]]:
    """(digest, number of rollouts, mean reward) of each group of which a step kept rollouts."""
    found: Mapping[str, list[float]] = {each.digest: [] for each in update.rollouts}
    for each in update.rollouts:
        found[each.digest].append(each.reward)
    return [(digest, len(rewards), sum(rewards) / len(rewards)) for digest, rewards in found.items()]
