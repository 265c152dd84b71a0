"""A group of a node with another tokenizer: through admission, the store and the batch into a step."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from swarm.clock import SystemClock
from swarm.config import (
    EnvironmentConfig,
    GeneratorConfig,
    LearnerConfig,
    ModelConfig,
    NodeConfig,
    ReplayConfig,
    SandboxConfig,
)
from swarm.environments.load import build_environments
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.errors import ConfigError
from swarm.exchange.group_store import SqliteGroupStore
from swarm.generation.produce import produce
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.learn.learner import PolicyLearner
from swarm.model.network import load_model
from swarm.model.token_alignment import with_byte_lengths
from swarm.model.tokenizer import ALPHABET, CharTokenizer
from swarm.objectives.coefficients import scored as scored_by
from swarm.objectives.draw_batch import make_batch
from swarm.objectives.fallbacks import RecipeSet
from swarm.objectives.methods import load_recipe, load_recipes
from swarm.testing.builders import make_identity
from swarm.testing.nodes import make_admission, make_context
from swarm.testing.tiny_models import make_learner
from swarm.types import (
    Correction,
    Draw,
    DrawnGroup,
    FinishReason,
    PolicyVersion,
    RefusalReason,
    Refused,
    Rollout,
    RolloutGroup,
    Sampling,
    ScoredGroup,
    TokenTrace,
    VersionSpan,
)
from swarm.wire.envelopes import open_group, seal_group

US, THEM = make_identity(1), make_identity(2)
ENVIRONMENT = EnvironmentConfig(name="reverse", kind="char", dataset="reverse")
RUN = "run"


class PairTokenizer(CharTokenizer):
    """Two characters a token where there are two, from the left: another vocabulary, hence another digest."""

    def __init__(self) -> None:
        super().__init__()
        self.digest = b"p" * 32

    def encode_response(self, text: str) -> list[int]:
        return [*(100 + 50 * len(pair) + ALPHABET.index(pair[0]) for pair in self._pairs(text)), self.eos_id]

    def byte_lengths(self, text: str) -> list[int]:
        return [*map(len, self._pairs(text)), 0]

    def _pairs(self, text: str) -> list[str]:
        return [text[at : at + 2] for at in range(0, len(text), 2)]


def answer(text: str, tokenizer: CharTokenizer, finish: FinishReason = FinishReason.STOP) -> Rollout:
    ids = np.array(tokenizer.encode_response(text), np.int32)
    ids = ids if finish is FinishReason.STOP else ids[:-1]
    trace = TokenTrace(
        token_ids=ids,
        action_mask=np.ones(ids.shape, bool),
        logprobs=-(0.5 + np.arange(ids.size, dtype=np.float32)),
        turn_ids=np.zeros(ids.shape, np.int16),
        spans=(VersionSpan(start=0, version=PolicyVersion(policy_id=THEM.node_id, step=3)),),
    )
    return Rollout(actions=(text,), trace=trace, sampling=Sampling(max_new_tokens=8), finish=finish, claimed_reward=0.0)


def group_of(tokenizer: CharTokenizer, texts: Sequence[str], **changes: object) -> RolloutGroup:
    group = RolloutGroup(
        run_id=RUN,
        producer=THEM.node_id,
        policy_id=THEM.node_id,
        env="reverse",
        task_id=5,
        tokenizer_digest=tokenizer.digest,
        prompt_ids=np.array([99_999, 7], np.int32),  # ids that mean nothing to us
        rollouts=tuple(with_byte_lengths(answer(text, tokenizer), tokenizer) for text in texts),
        verifier="another/1",
        created_at_s=SystemClock().now_s(),
    )
    return replace(group, **changes)  # type: ignore[arg-type]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteGroupStore]:
    opened = await SqliteGroupStore.open(tmp_path / "groups.sqlite", SystemClock(), 2**24)
    yield opened
    await opened.close()


async def admit(store: SqliteGroupStore, group: RolloutGroup, recipes: RecipeSet) -> ScoredGroup | Refused:
    verifier = SandboxVerifier((ENVIRONMENT,), SandboxConfig())
    config = NodeConfig(run_id=RUN, generator=GeneratorConfig(group_size=len(group.rollouts)))
    admission = make_admission(
        make_context(config, US, clock=SystemClock(), offload=asyncio.to_thread),
        store,
        tokenizer=CharTokenizer(),
        verifier=verifier,
        environments=frozenset({"reverse"}),
        usable=recipes.usable,
    )
    try:
        return await admission.admit(seal_group(group, THEM), THEM.node_id)
    finally:
        await verifier.close()


def recipes(**keys: str) -> RecipeSet:
    return load_recipes(LearnerConfig.model_validate({"recipe": "grpo", **keys}))


def learner(folder: Path, chosen: RecipeSet) -> PolicyLearner:
    network = load_model(ModelConfig(source="tiny", dtype="float32")).network
    environments = build_environments((ENVIRONMENT,))
    given = {"network": network, "replay": ReplayConfig(external="all"), "policy_id": US.node_id}
    return make_learner(folder, chosen, **given, task_of=lambda env, task_id: environments[env].task(task_id))


def right_and_wrong() -> list[str]:
    """One right answer to the task, and wrong ones of other lengths."""
    problem = build_environments((ENVIRONMENT,))["reverse"]
    return [problem.reference(5), "a", "bcd", ""]


@pytest.mark.parametrize("recipe", ["sapo_swarm", "segment_ratio", "rl_plus"])
async def test_a_group_of_another_tokenizer_is_learned_from(
    recipe: str, store: SqliteGroupStore, tmp_path: Path
) -> None:
    chosen = recipes(recipe_text_only=recipe)
    found = await admit(store, group_of(PairTokenizer(), right_and_wrong()), chosen)
    assert isinstance(found, ScoredGroup), found
    assert found.correction is Correction.TEXT_ONLY and found.rewards[0] == 1.0 and found.rewards[3] == 0.0
    (restored,) = await store.load_scored(10)  # what a restart finds
    own = own_group()
    reports = []
    for index, one in enumerate((found, restored)):
        draw = Draw(
            step=1, groups=tuple(DrawnGroup(scored=s, age_steps=0, use=1) for s in (own, one)), num_zero_variance=0
        )
        reports.append(learner(tmp_path / str(index), chosen).step(draw))
    assert not reports[0].was_skipped and reports[0].num_external == 1
    expected = sum(len(text) + 1 for text in right_and_wrong())
    assert reports[0].num_tokens == expected + 2 * 3  # theirs in our tokens, and our own
    assert reports[0].version.digest == reports[1].version.digest


def own_group() -> ScoredGroup:
    """Two rollouts of our own, at log-probs of about those of a fresh network."""
    tokenizer = CharTokenizer()
    rollouts = tuple(answer(text, tokenizer) for text in ("ab", "cd"))
    group = replace(group_of(tokenizer, ()), producer=US.node_id, policy_id=US.node_id)
    return ScoredGroup(
        digest=bytes(32),
        group=replace(group, prompt_ids=np.array([5, 6, 7], np.int32), rollouts=rollouts),
        rewards=np.array([1.0, 0.0], np.float32),
        correction=Correction.EXACT,
        is_made_here=True,
        first_seen_s=0.0,
        size_bytes=1,
    )


async def test_its_prompt_and_text_are_encoded_here(store: SqliteGroupStore) -> None:
    found = await admit(store, group_of(PairTokenizer(), right_and_wrong()), recipes())
    assert isinstance(found, ScoredGroup)
    draw = Draw(step=1, groups=(DrawnGroup(scored=found, age_steps=0, use=1),), num_zero_variance=0)
    task = build_environments((ENVIRONMENT,))["reverse"].task(5)
    batch = make_batch(draw, CharTokenizer(), task_of=lambda env, task_id: task)
    assert batch.prompts[0].tolist() == CharTokenizer().encode_prompt(task)
    assert batch.corrections == (Correction.TEXT_ONLY,) * 4
    rows = [ids[mask].tolist() for ids, mask in zip(batch.token_ids, batch.mask, strict=True)]
    assert rows == [CharTokenizer().encode_response(text) for text in right_and_wrong()]
    with pytest.raises(ConfigError, match="another tokenizer"):
        make_batch(draw, CharTokenizer())


async def test_a_group_without_usable_logprobs_is_learned_from(store: SqliteGroupStore, tmp_path: Path) -> None:
    group = truncated_group()
    found = await admit(store, group, recipes())
    assert isinstance(found, ScoredGroup), found
    assert found.correction is Correction.NO_LOGPROBS
    draw = Draw(step=1, groups=(DrawnGroup(scored=found, age_steps=0, use=1),), num_zero_variance=0)
    report = learner(tmp_path, recipes()).step(draw)
    assert not report.was_skipped and report.num_tokens == group.num_tokens
    with pytest.raises(ConfigError, match="recipe_without_logprobs"):
        learner(tmp_path / "refused", recipes(recipe_without_logprobs="")).step(draw)


def truncated_group() -> RolloutGroup:
    """Of our own tokenizer, sampled with top-p, so that its log-probs are not those of what was sampled."""
    tokenizer = CharTokenizer()
    task = build_environments((ENVIRONMENT,))["reverse"].task(5)
    group = group_of(tokenizer, right_and_wrong()[:3], prompt_ids=np.array(tokenizer.encode_prompt(task), np.int32))
    rollouts = tuple(replace(each, sampling=Sampling(top_p=0.9, max_new_tokens=8)) for each in group.rollouts)
    return replace(group, rollouts=rollouts)


@pytest.mark.parametrize(
    ("key", "kind"),
    [("recipe_text_only", Correction.TEXT_ONLY), ("recipe_without_logprobs", Correction.NO_LOGPROBS)],
)
async def test_an_empty_key_refuses_the_kind_at_the_door_with_a_reason(
    key: str, kind: Correction, store: SqliteGroupStore
) -> None:
    group = truncated_group() if kind is Correction.NO_LOGPROBS else group_of(PairTokenizer(), right_and_wrong())
    refused = await admit(store, group, recipes(**{key: ""}))
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.UNUSABLE_CORRECTION
    assert kind in refused.detail and await store.load_scored(10) == []


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [([2, 2, 0], RefusalReason.BAD_TOKENS), ([1, 0, 0], RefusalReason.BAD_TOKENS), ([1, 2, 0], None)],
)
async def test_byte_lengths_add_up_to_the_text(
    lengths: list[int], reason: RefusalReason | None, store: SqliteGroupStore
) -> None:
    group = group_of(PairTokenizer(), ["abc", "d"])
    first = group.rollouts[0]
    assert first.trace is not None and first.trace.byte_lengths is not None
    assert first.trace.byte_lengths.tolist() == [2, 1, 0]
    trace = replace(first.trace, byte_lengths=np.array(lengths, np.int32))
    found = await admit(store, replace(group, rollouts=(replace(first, trace=trace), group.rollouts[1])), recipes())
    assert (found.reason if isinstance(found, Refused) else None) is reason


async def test_a_text_beyond_what_may_be_generated_is_refused(store: SqliteGroupStore) -> None:
    long = answer("abc", PairTokenizer())
    group = group_of(PairTokenizer(), ["ab"])
    found = await admit(store, replace(group, rollouts=(replace(long, actions=("a" * 1121,)), long)), recipes())
    assert isinstance(found, Refused) and found.reason is RefusalReason.UNUSABLE_TEXT and "1121" in found.detail


def test_segments_have_the_ratio_of_their_tokens_together() -> None:
    tokenizer = CharTokenizer()
    texts = ["abc", "a"]
    scored = replace(
        own_group(), group=group_of(PairTokenizer(), texts), correction=Correction.TEXT_ONLY, is_made_here=False
    )
    draw = Draw(step=1, groups=(DrawnGroup(scored=scored, age_steps=0, use=1),), num_zero_variance=0)
    task = build_environments((ENVIRONMENT,))["reverse"].task(5)
    batch = make_batch(draw, tokenizer, task_of=lambda env, task_id: task)
    logprobs = torch.tensor([[-0.1, -0.2, -1.7, -2.0], [-0.25, -1.1, 0.0, 0.0]])
    recipe = load_recipe("segment_ratio", {"ratio.cap": 3.0})
    ratios = scored_by(recipe, batch, logprobs, torch.zeros_like(logprobs)).log_ratio
    # They cut "ab|c|end" at -0.5, -1.5, -2.5; we "a|b|c|end".
    cap = math.log(3.0)
    expected = [min(-0.3 + 0.5, cap), min(-0.3 + 0.5, cap), -1.7 + 1.5, min(-2.0 + 2.5, cap)]
    torch.testing.assert_close(ratios[0], torch.tensor(expected))
    torch.testing.assert_close(ratios[1, :2], torch.tensor([-0.25 + 0.5, -1.1 + 1.5]))
    whole = load_recipe("segment_ratio", {"ratio.by_response": True, "ratio.cap": 3.0})
    ratios = scored_by(whole, batch, logprobs, torch.zeros_like(logprobs)).log_ratio
    torch.testing.assert_close(ratios[0], torch.full((4,), -4.0 + 4.5))


def test_a_sender_of_our_own_tokenizer_gives_token_ratios() -> None:
    tokenizer = CharTokenizer()
    group = group_of(tokenizer, ["abc", "a"])
    logprobs = torch.tensor([[-0.1, -0.2, -1.7, -2.0], [-0.25, -1.1, 0.0, 0.0]])
    found = []
    for kind in (Correction.EXACT, Correction.TEXT_ONLY):
        scored = replace(own_group(), group=group, correction=kind)
        draw = Draw(step=1, groups=(DrawnGroup(scored=scored, age_steps=0, use=1),), num_zero_variance=0)
        batch = make_batch(draw, tokenizer)
        assert (batch.segment_ids is not None) == (kind is Correction.TEXT_ONLY)
        found.append(scored_by(load_recipe("segment_ratio"), batch, logprobs, torch.zeros_like(logprobs)).log_ratio)
    torch.testing.assert_close(found[0], found[1])


def test_tokens_that_are_not_those_of_the_text_are_not_explained() -> None:
    tokenizer = PairTokenizer()
    odd = answer("abc", tokenizer)
    assert odd.trace is not None
    other = replace(odd, trace=replace(odd.trace, token_ids=odd.trace.token_ids + 1))
    assert with_byte_lengths(other, tokenizer) is other
    cut = with_byte_lengths(answer("abc", tokenizer, FinishReason.LENGTH), tokenizer)
    assert cut.trace is not None and cut.trace.byte_lengths is not None
    assert cut.trace.byte_lengths.tolist() == [2, 1]
    scored = replace(
        own_group(), group=replace(group_of(tokenizer, ()), rollouts=(other, cut)), correction=Correction.TEXT_ONLY
    )
    draw = Draw(step=1, groups=(DrawnGroup(scored=scored, age_steps=0, use=1),), num_zero_variance=0)
    task = build_environments((ENVIRONMENT,))["reverse"].task(5)
    batch = make_batch(draw, CharTokenizer(), task_of=lambda env, task_id: task)
    assert batch.mask.tolist() == [[True] * 4, [True] * 3 + [False]]  # where they were cut off, we do not learn to end
    logprobs = torch.full(batch.mask.shape, -1.0)
    ratios = scored_by(load_recipe("segment_ratio"), batch, logprobs, torch.zeros_like(logprobs)).log_ratio
    assert ratios[0].tolist() == [0.0] * 4
    # "ab" and "c" at -0.5 and -1.5; the end that we append was not drawn.
    torch.testing.assert_close(ratios[1], torch.tensor([-2 + 0.5, -2 + 0.5, -1 + 1.5, 0.0]))


def test_a_node_says_what_its_tokens_stand_for_where_it_is_asked_to() -> None:
    model = load_model(ModelConfig(source="tiny", dtype="float32"))
    version = PolicyVersion(policy_id=US.node_id, step=0)
    task = build_environments((ENVIRONMENT,))["reverse"].task(5)

    def groups(byte_lengths: bool) -> list[RolloutGroup]:
        generator = TransformersGenerator(network=model.network, tokenizer=model.tokenizer, version=version, seed=1)
        asked = Sampling(max_new_tokens=4)
        return produce(
            generator,
            model.tokenizer,
            [task],
            8,
            asked,
            run_id=RUN,
            producer=US.node_id,
            clock=SystemClock(),
            byte_lengths=byte_lengths,
        )

    (zero_variance,), (saying,) = groups(False), groups(True)
    said = 0
    for before, after in zip(zero_variance.rollouts, saying.rollouts, strict=True):
        assert before.trace is not None and after.trace is not None and before.trace.byte_lengths is None
        assert before.text == after.text and before.trace.token_ids.tolist() == after.trace.token_ids.tolist()
        lengths = after.trace.byte_lengths
        ids = model.tokenizer.encode_response(after.text)
        is_canonical = after.trace.token_ids.tolist() in (ids, ids[:-1])
        assert (lengths is not None) == is_canonical
        if lengths is not None:
            assert lengths.sum() == len(after.text.encode()) and lengths.shape == after.trace.token_ids.shape
            said += 1
    assert said > 0
    scored = tuple(replace(each, claimed_reward=0.0) for each in saying.rollouts)
    opened = open_group(seal_group(replace(saying, verifier="char/1", rollouts=scored), US), 2**20)
    assert isinstance(opened, RolloutGroup)
    for sent, came in zip(saying.rollouts, opened.rollouts, strict=True):
        assert sent.trace is not None and came.trace is not None
        assert np.array_equal(sent.trace.byte_lengths, came.trace.byte_lengths)  # type: ignore[arg-type]
