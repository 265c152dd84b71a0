"""Figures of single tokens of a step: they are those of the step itself, and a bounded number is kept."""

from pathlib import Path

import numpy as np
import pytest
import torch

from swarm.clock import ManualClock
from swarm.config import ReplayConfig
from swarm.learn.learner import PolicyLearner
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.report.token_view import groups_of, tokens_in_update
from swarm.telemetry import shown_updates
from swarm.telemetry.shown_updates import (
    EVERY_S,
    LEFT_OUT,
    MAX_KEPT,
    MAX_TOKENS,
    TRAINED,
    ShownUpdate,
    kept_updates,
    read_update,
    write_update,
)
from swarm.testing.builders import make_group, make_scored
from swarm.testing.tiny_models import make_learner
from swarm.types import Draw, DrawnGroup

OWN, PEER = "a" * 64, "b" * 64
TOKENIZER = CharTokenizer()


def draw(step: int, texts: tuple[str, ...] = ("cab", "abc", "bca", "ab"), num_groups: int = 4) -> Draw:
    groups = [
        DrawnGroup(
            scored=make_scored(
                make_group(
                    PEER if index % 2 else OWN, task_id=index, tokenizer=TOKENIZER, texts=list(texts), logprob=-3.8
                ),
                rewards=[1.0] + [0.0] * (len(texts) - 1),
                is_made_here=index % 2 == 0,
            ),
            age_steps=index,
            use=1,
        )
        for index in range(num_groups)
    ]
    return Draw(step=step, groups=tuple(groups), num_zero_variance=0)


def learner(directory: Path, shown: list[ShownUpdate], clock: ManualClock, external: str = "all") -> PolicyLearner:
    replay = ReplayConfig.model_validate({"external": external})
    return make_learner(directory, replay=replay, clock=clock, show=shown.append)


def test_the_figures_are_those_of_the_step(tmp_path: Path) -> None:
    shown, network = list[ShownUpdate](), tiny_network(seed=1)
    report = learner(tmp_path, shown, ManualClock()).step(draw(1))
    (update,) = shown
    assert update.step == report.version.step == 1 and update.recipe == "grpo"
    assert {each.digest for each in update.rollouts} == {each.scored.digest.hex() for each in draw(1).groups}
    of_draw = {each.scored.digest.hex(): each.scored for each in draw(1).groups}
    for each in update.rollouts:
        group = of_draw[each.digest].group
        trace = group.rollouts[each.place].trace
        assert trace is not None and trace.logprobs is not None
        assert list(each.token_ids) == trace.token_ids.tolist() and set(each.kinds) == {TRAINED}
        assert each.reward == of_draw[each.digest].rewards[each.place]
        row = torch.tensor([[*group.prompt_ids.tolist(), *each.token_ids]])
        with torch.no_grad():
            scores = network(input_ids=row).logits.float().log_softmax(-1)[0, len(group.prompt_ids) - 1 : -1]
        expected = [float(score[token]) for score, token in zip(scores, each.token_ids, strict=True)]
        np.testing.assert_allclose(each.learner, expected, atol=1e-4)
        np.testing.assert_allclose(np.array(each.generator, float), trace.logprobs, atol=1e-6)
        # pushed up where the advantage is positive, and nothing that the recipe clipped is pushed at all
        for weight, advantage, is_bounded in zip(each.weights, each.advantages, each.bounded, strict=True):
            assert np.sign(weight) == (0 if is_bounded else np.sign(advantage))
    weights = np.concatenate([np.array(each.weights) for each in update.rollouts])
    assert (weights > 0).any() and (weights < 0).any()


def test_what_the_step_left_out_is_shown_as_that(tmp_path: Path) -> None:
    shown = list[ShownUpdate]()
    learner(tmp_path, shown, ManualClock(), external="positive").step(draw(1))
    left_out = [each for each in shown[0].rollouts if LEFT_OUT in each.kinds]
    foreign = {each.scored.digest.hex() for each in draw(1).groups if not each.scored.is_made_here}
    assert {each.digest for each in left_out} == foreign
    assert all(each.reward == 0.0 and not any(each.weights) for each in left_out)
    views = tokens_in_update(shown[0], next(iter(foreign)), TOKENIZER)
    for number, view in enumerate(views, 1):
        assert view.head.startswith(f"answer {number}: reward {int(number == 1)}")
        assert {token.css == "said" for token in view.tokens} == {number != 1}


def test_one_step_in_a_while_and_so_many_tokens_of_it(tmp_path: Path) -> None:
    shown, clock = list[ShownUpdate](), ManualClock()
    policy = learner(tmp_path, shown, clock)
    for step in (1, 2):
        policy.step(draw(step))
    assert [each.step for each in shown] == [1]
    clock.advance(EVERY_S)
    policy.step(draw(3, texts=("ab" * 60, "ba" * 60, "aa" * 60, "bb" * 60), num_groups=6))
    assert shown[-1].step == 3
    num_tokens = sum(len(each.token_ids) for each in shown[-1].rollouts)
    assert MAX_TOKENS - 121 <= num_tokens <= MAX_TOKENS
    first, second, *_ = (digest for digest, _, _ in groups_of(shown[-1]))
    own = {each.scored.digest.hex() for each in draw(3, num_groups=6).groups if each.scored.is_made_here}
    assert len(own & {first, second}) == 1, "own and others' in turn"


def test_the_newest_are_kept_and_a_damaged_one_is_nobodys_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[ShownUpdate]()
    learner(tmp_path, shown, ManualClock()).step(draw(1))
    for step in range(1, MAX_KEPT + 6):
        write_update(tmp_path, ShownUpdate(step=step, recipe="grpo", rollouts=shown[0].rollouts))
    assert kept_updates(tmp_path) == list(range(MAX_KEPT + 5, 5, -1))
    again = read_update(tmp_path, 9)
    assert again is not None and again.step == 9
    assert again.rollouts[0].learner == pytest.approx(shown[0].rollouts[0].learner, rel=1e-3)
    for text in ("", "[]", '{"step": 9}', '{"step": 9, "recipe": "x", "rollouts": [{"digest": "00"}]}'):
        (tmp_path / "updates" / "9.json").write_text(text)
        assert read_update(tmp_path, 9) is None
    text = (tmp_path / "updates" / "10.json").read_text().replace('"kinds":[2,', '"kinds":[2,2,', 1)
    (tmp_path / "updates" / "10.json").write_text(text)
    assert read_update(tmp_path, 10) is None, "columns of different lengths"

    def full(*_: object, **__: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(shown_updates.Path, "write_text", full)
    write_update(tmp_path, shown[0])  # a full disk stops no learner
