"""Authorship of answers: copies never displace originals, and honest groups of equal tasks never count as copies."""

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from swarm.config import EntryConfig, EnvironmentConfig, NodeConfig
from swarm.environments.load import build_environment
from swarm.exchange.novelty import MAX_ANSWERS, MAX_COMMITMENTS, MIN_BITS, Novelty, answer_keys, commitment_of
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.model.tokenizer import CharTokenizer
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import TOY_NOW_S, make_group, make_identity, make_sealed
from swarm.testing.episodes import make_episode_group
from swarm.testing.nodes import make_admission, make_agent, make_context
from swarm.types import Digest, NodeId, RefusalReason, Refused, RolloutGroup, Sampling, ScoredGroup
from swarm.wire.envelopes import seal_group

OURS, ALICE, BOB, EVE = (make_identity(number) for number in range(4))
NUM_TRIES = int(os.environ.get("SWARM_NOVELTY_TRIES", "1000"))  # make nightly: 10,000
ALPHABET = "abcdefghijklmnopqrstuvwxyz012345"
GROUP_SIZE, NUM_CHARS = 8, 7  # of ToyTokenizer: a token each, and the end


def invented(rng: random.Random, **settings: Any) -> RolloutGroup:
    """Answers of 35 bits each, with log-probs that say so."""
    texts = ["".join(rng.choices(ALPHABET, k=NUM_CHARS)) for _ in range(GROUP_SIZE)]
    return make_group(ALICE.node_id, texts=texts, logprob=-NUM_CHARS / (NUM_CHARS + 1) * math.log(32), **settings)


def with_logprobs(group: RolloutGroup, value: float | None) -> RolloutGroup:
    rollouts = []
    for rollout in group.rollouts:
        assert rollout.trace is not None
        size = rollout.trace.token_ids.shape
        logprobs = None if value is None else np.full(size, value, np.float32)
        rollouts.append(replace(rollout, trace=replace(rollout.trace, logprobs=logprobs)))
    return replace(group, rollouts=tuple(rollouts))


def whole(group: RolloutGroup, rng: random.Random) -> RolloutGroup:
    return group


def shuffled(group: RolloutGroup, rng: random.Random) -> RolloutGroup:
    return replace(group, rollouts=tuple(rng.sample(group.rollouts, GROUP_SIZE)))


def seven_of_eight(group: RolloutGroup, rng: random.Random) -> RolloutGroup:
    return replace(group, rollouts=(*group.rollouts[:7], invented(rng).rollouts[0]))


def one_repeated(group: RolloutGroup, rng: random.Random) -> RolloutGroup:
    """Four of the answers, twice each."""
    return replace(group, rollouts=group.rollouts[:4] * 2)


def claimed_certain(group: RolloutGroup, rng: random.Random) -> RolloutGroup:
    return with_logprobs(group, 0.0)


def without_logprobs(group: RolloutGroup, rng: random.Random) -> RolloutGroup:
    return with_logprobs(group, None)


def only_text(group: RolloutGroup, rng: random.Random) -> RolloutGroup:
    return replace(group, rollouts=tuple(replace(rollout, trace=None) for rollout in group.rollouts))


COPIES = (whole, shuffled, seven_of_eight, one_repeated, claimed_certain, without_logprobs, only_text)
Copy = Callable[[RolloutGroup, random.Random], RolloutGroup]


def copied(group: RolloutGroup, how: Copy, rng: random.Random) -> RolloutGroup:
    """The attacker's group: of its own lineage, made of the answers of another."""
    return replace(how(group, rng), producer=EVE.node_id, policy_id=EVE.node_id, created_at_s=TOY_NOW_S + 5)


def everybody(producer: NodeId) -> bool:
    return True


def all_but_the_thief(producer: NodeId) -> bool:
    return producer != EVE.node_id


def only_the_thief(producer: NodeId) -> bool:
    return producer == EVE.node_id


def nobody(producer: NodeId) -> bool:
    return False


Standing = Callable[[NodeId], bool]  # whether a producer is established


@dataclass
class Node:
    """The part of a node that judges novelty: who is used, who was refused."""

    is_established: Standing = everybody
    used: set[Digest] = field(default_factory=set[Digest])
    refused: set[Digest] = field(default_factory=set[Digest])

    def __post_init__(self) -> None:
        self.novelty = Novelty(self.used.discard, self.is_established)

    def take(self, group: RolloutGroup, digest: Digest) -> None:
        order = self.novelty.order(group)
        if self.novelty.copied_bits(group, digest, order) >= MIN_BITS:
            self.refused.add(digest)
            return
        self.novelty.record(group, digest, order)
        self.used.add(digest)


def race(rng: random.Random, node: Node) -> tuple[bool, bool]:
    """(is the original used, is a copy used) with up to three copies, the original's commitment first."""
    original = invented(rng, task_id=rng.randrange(4))
    node.novelty.commit([commitment_of(original)], ALICE.node_id)
    groups = {b"o" + rng.randbytes(31): original}
    for _ in range(rng.randint(1, 3)):
        copy = copied(original, rng.choice(COPIES), rng)
        groups[b"c" + rng.randbytes(31)] = copy
        if rng.random() < 0.7:
            node.novelty.commit([commitment_of(copy)], EVE.node_id)
    order = list(groups)
    rng.shuffle(order)
    for digest in order:
        node.take(groups[digest], digest)
    first = next(iter(groups))
    return first in node.used, any(digest in node.used for digest in groups if digest != first)


def displaced(rng: random.Random, node: Node) -> bool:
    """True if a copy is used, or the original is not."""
    is_used, is_copy_used = race(rng, node)
    return is_copy_used or not is_used


def informed(is_established: Standing) -> tuple[random.Random, Node]:
    """A node that knows what answers are worth."""
    rng, node = random.Random(1), Node(is_established)
    for _ in range(50):
        node.novelty.measure_own(invented(rng))
    return rng, node


@pytest.mark.parametrize(
    ("is_established", "num_tries"), [(everybody, NUM_TRIES), (all_but_the_thief, NUM_TRIES), (nobody, NUM_TRIES // 10)]
)
def test_a_copy_never_displaces_an_original_whose_commitment_came_first(
    is_established: Standing, num_tries: int
) -> None:
    rng, node = informed(is_established)
    assert sum(displaced(rng, node) for _ in range(num_tries)) == 0


def test_an_established_thief_uses_what_newcomers_made_and_takes_it_from_nobody() -> None:
    """An established node can copy what no newcomer can claim ahead: within its share, and the original stays."""
    rng, node = informed(only_the_thief)
    results = [race(rng, node) for _ in range(NUM_TRIES // 10)]
    assert all(is_used for is_used, _ in results) and sum(used for _, used in results) > 0.9 * len(results)


def test_a_newcomers_claim_does_not_hide_the_first_established_one() -> None:
    """A free key copies an original first, so that its established accomplice could copy it too."""
    accomplice = make_identity(4)
    rng, node = informed(all_but_the_thief)
    original = invented(rng)
    node.take(copied(original, whole, rng), b"1" * 32)
    node.take(original, b"2" * 32)
    node.take(replace(copied(original, shuffled, rng), producer=accomplice.node_id), b"3" * 32)
    node.take(replace(copied(original, shuffled, rng), created_at_s=TOY_NOW_S + 50), b"4" * 32)
    assert node.used == {b"1" * 32, b"2" * 32} and node.refused == {b"3" * 32, b"4" * 32}


# --- honest groups -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """Answers of one node to one task: a few likely ones, and many that hardly ever come."""

    texts: Sequence[str]
    probabilities: Sequence[float]

    @classmethod
    def draw(cls, rng: random.Random) -> "Policy":
        num_answers = rng.choice([1, 2, 8, 64, 4096])
        texts = ["".join(rng.choices(ALPHABET, k=rng.choice([1, 2, NUM_CHARS]))) for _ in range(num_answers)]
        sharpness = rng.choice([0.0, 1.0, 3.0])
        weights = [(rank + 1.0) ** -sharpness for rank in range(num_answers)]
        return cls(texts, [weight / sum(weights) for weight in weights])

    def group(self, rng: random.Random, **settings: Any) -> RolloutGroup:
        chosen = rng.choices(range(len(self.texts)), self.probabilities, k=GROUP_SIZE)
        group = make_group(texts=[self.texts[index] for index in chosen], **settings)
        rollouts = []
        for rollout, index in zip(group.rollouts, chosen, strict=True):
            assert rollout.trace is not None
            size = rollout.trace.token_ids.size
            logprobs = np.full(size, math.log(self.probabilities[index]) / size, np.float32)
            rollouts.append(replace(rollout, trace=replace(rollout.trace, logprobs=logprobs)))
        return replace(group, rollouts=tuple(rollouts))


def honest_groups(count: int, num_tasks: int = 20) -> Iterator[RolloutGroup]:
    """Groups of three producers about the same few tasks; two of them have the same policy."""
    rng = random.Random(7)
    policies = [Policy.draw(rng) for _ in range(num_tasks)]
    others = [Policy(each.texts, list(reversed(each.probabilities))) for each in policies]
    for number in range(count):
        task_id, producer = rng.randrange(num_tasks), (ALICE, BOB, EVE)[number % 3]
        policy = others[task_id] if producer is EVE else policies[task_id]
        yield policy.group(rng, producer=producer.node_id, task_id=task_id)


def num_refused(node: Node, count: int = NUM_TRIES) -> int:
    for number, group in enumerate(honest_groups(count)):
        if number % 10 == 0:
            node.novelty.measure_own(group)
        node.take(group, number.to_bytes(32, "big"))
    return len(node.refused)


def test_no_honest_group_of_equal_tasks_is_refused() -> None:
    node = Node()
    assert num_refused(node) == 0
    keys = [key for group in honest_groups(1000) for key in {rollout.text for rollout in group.rollouts}]
    assert len(keys) > 3 * len(set(keys)), "honest answers that never coincide show nothing"


def test_whoever_claims_too_many_bits_cannot_make_a_short_answer_its_own() -> None:
    """A node that knows what others will answer, and claims that it drew it by a great chance."""
    rng, node = random.Random(3), Node()
    for _ in range(50):
        node.novelty.measure_own(with_logprobs(make_group(texts=["7"] * 8), -0.1))
    likely = make_group(EVE.node_id, texts=["7", "8", "9", "1"] * 2)
    node.take(with_logprobs(likely, -90.0), b"e" * 32)
    honest = replace(likely, producer=BOB.node_id, rollouts=tuple(rng.sample(likely.rollouts, 8)))
    node.take(with_logprobs(honest, -0.1), b"h" * 32)
    assert not node.refused


def guessed(rng: random.Random) -> tuple[RolloutGroup, RolloutGroup]:
    """A stranger's group with one short answer that many give, by its claim of 87 bits, and an honest one with it."""
    group = with_logprobs(make_group(EVE.node_id, texts=["42", *(rng.randbytes(4).hex() for _ in range(7))]), -30.0)
    honest = with_logprobs(make_group(BOB.node_id, texts=["42", *(rng.randbytes(4).hex() for _ in range(7))]), -0.7)
    return group, honest


def taken_after_a_guess(node: Node) -> bool:
    """True if an honest group is used although a stranger claimed one of its answers before."""
    claimed, honest = guessed(random.Random(5))
    node.take(claimed, b"e" * 32)
    node.take(honest, b"h" * 32)
    return b"h" * 32 in node.used


@pytest.mark.parametrize("num_followers", [0, 1, 2, 3])
def test_a_node_that_generates_nothing_takes_no_strangers_word(num_followers: int) -> None:
    """The lower middle of what followers say: of two or three, one that lies moves nothing."""
    node = Node()
    for number in range(num_followers):
        logprob = -30.0 if number == 2 else -0.7
        group = with_logprobs(make_group(ALICE.node_id, texts=["7", "8"] * 4), logprob)
        node.novelty.measure_follower(group, f"party {number}")
    assert taken_after_a_guess(node)


def grid_episodes(producer: NodeId, logprob: float, num_episodes: int) -> RolloutGroup:
    """Episodes of 8 to 10 chosen tokens each, among 35 and more of what the environment says."""
    environment = build_environment(EnvironmentConfig(name="grid", kind="grid_world", params={"style": "char"}))
    right = environment.demonstration(0)  # type: ignore[attr-defined]
    episodes = [right, (*right[:-1], "u"), right[:1] + right, right[:1] * 2 + right][:num_episodes]
    told = (episodes * GROUP_SIZE)[:GROUP_SIZE]
    sampling = Sampling(max_new_tokens=8)
    return with_logprobs(make_episode_group(environment, 0, told, CharTokenizer(), producer, sampling), logprob)


def measured(num_episodes: int, own: float) -> Node:
    node = Node()
    node.novelty.measure_own(grid_episodes(OURS.node_id, own, num_episodes))
    return node


def taken_after_foreseen(node: Node, num_episodes: int, own: float) -> bool:
    """True if a group is used although a stranger gave its episodes before, with huge claims of bits."""
    node.take(grid_episodes(EVE.node_id, -90.0, 4), b"e" * 32)
    node.take(grid_episodes(BOB.node_id, own, num_episodes), b"h" * 32)
    return b"h" * 32 in node.used


def test_what_the_environment_said_is_no_evidence_of_a_copy() -> None:
    """Two honest episodes of 8 chosen tokens are 23 bits, however long the observations between them are."""
    node = measured(2, own=-1.0)
    assert taken_after_foreseen(node, 2, own=-1.0)


def test_copied_episodes_that_nobody_foresees_are_refused() -> None:
    assert not taken_after_foreseen(measured(4, own=-3.0), 4, own=-3.0)


def test_with_what_established_followers_say_copies_are_refused() -> None:
    rng, node = random.Random(1), Node()
    assert displaced(rng, node), "nothing is known yet"
    node.novelty.measure_follower(invented(rng), "party")
    assert sum(displaced(rng, node) for _ in range(200)) == 0


def test_old_content_with_a_new_date_is_a_copy_though_one_commitment_covers_both() -> None:
    rng, node = random.Random(3), Node()
    for _ in range(50):
        node.novelty.measure_own(with_logprobs(invented(rng), -10.0))
    old = invented(rng)
    node.novelty.commit([commitment_of(old)], ALICE.node_id)
    node.take(old, b"1" * 32)
    node.take(replace(old, created_at_s=TOY_NOW_S + 500), b"2" * 32)
    assert node.refused == {b"2" * 32}


def test_an_order_is_a_number_only_where_no_commitment_came() -> None:
    rng, novelty = random.Random(1), Novelty()
    group = invented(rng)
    novelty.commit([commitment_of(group)], ALICE.node_id)
    assert [novelty.order(group), novelty.order(group), novelty.order(invented(rng))] == [1, 1, 2]


def test_whoever_claims_too_few_bits_cannot_sell_its_old_content_again() -> None:
    rng, node = random.Random(3), Node()
    for _ in range(50):
        node.novelty.measure_own(with_logprobs(invented(rng), -10.0))  # 80 tokens of 14 bits: an eighth is enough
    old = with_logprobs(invented(rng), 0.0)
    node.take(old, b"1" * 32)
    node.take(replace(old, created_at_s=TOY_NOW_S + 500), b"2" * 32)
    assert node.used == {b"1" * 32} and node.refused == {b"2" * 32}


def test_whoever_gave_an_answer_later_is_its_first_once_an_unstored_group_is_released() -> None:
    rng, node = informed(everybody)
    lost = invented(rng)
    node.novelty.record(lost, b"l" * 32, 1)
    node.novelty.record(replace(lost, producer=ALICE.node_id), b"a" * 32, 2)
    node.novelty.release(lost, b"l" * 32)
    copy = replace(lost, producer=EVE.node_id)
    assert node.novelty.copied_bits(copy, b"e" * 32, 3) >= MIN_BITS
    node.novelty.release(lost, b"a" * 32)
    assert len(node.novelty) == 0


def test_the_tables_are_bounded() -> None:
    rng, novelty = random.Random(1), Novelty()
    for number in range(MAX_ANSWERS // GROUP_SIZE + 10):
        novelty.record(invented(rng, task_id=number), number.to_bytes(32, "big"), number)
    assert len(novelty) == MAX_ANSWERS
    original = invented(rng)
    novelty.commit([commitment_of(original)], ALICE.node_id)
    first = novelty.order(original)
    for _ in range(2 * MAX_COMMITMENTS):
        novelty.commit([rng.randbytes(32)], EVE.node_id)
    assert novelty.order(original) == first, "a flood of one neighbour forgets no commitment of another"


# --- the attacks, over admission -----------------------------------------------------------------


class Attacked:
    """A node's admission, and the groups that its buffer holds."""

    def __init__(self, generates: bool = True, is_established: Standing = everybody) -> None:
        context = make_context(identity=OURS)
        self.replay = ReplayBuffer(context.config.replay, OURS.node_id, 0, context.clock)
        self.novelty = Novelty(lambda digest: self.replay.discard(digest, "copied"), is_established)
        if generates:
            self.novelty.measure_own(invented(random.Random(2)))
        self.admission = make_admission(context, MemoryGroupStore(context.clock, 10**8), novelty=self.novelty)

    async def offer(self, group: RolloutGroup) -> ScoredGroup | Refused:
        identity = next(each for each in (ALICE, EVE) if each.node_id == group.producer)
        scored = await self.admission.admit(make_sealed(group, identity), identity.node_id)
        if isinstance(scored, ScoredGroup):
            self.replay.add(scored)
        return scored


def mixed(rng: random.Random, **settings: Any) -> RolloutGroup:
    """An original with signal: its first answer is right."""
    group = invented(rng, task_id=7, **settings)
    right = make_group(ALICE.node_id, task_id=7, texts=["7"]).rollouts[0]
    return replace(group, rollouts=(right, *group.rollouts[1:]))


def with_right_rewards(group: RolloutGroup) -> RolloutGroup:
    return replace(
        group, rollouts=tuple(replace(each, claimed_reward=float(each.text == "7")) for each in group.rollouts)
    )


def of_lineage(group: RolloutGroup) -> RolloutGroup:
    """With spans of its own lineage."""
    rollouts = []
    for rollout in group.rollouts:
        trace = rollout.trace
        if trace is not None:
            version = replace(trace.spans[0].version, policy_id=group.policy_id)
            trace = replace(trace, spans=(replace(trace.spans[0], version=version),))
        rollouts.append(replace(rollout, trace=trace))
    return replace(group, rollouts=tuple(rollouts))


@pytest.mark.parametrize("how", COPIES)
async def test_plagiarism_is_refused_and_nobody_else_is_blamed(how: Copy) -> None:
    rng, node = random.Random(1), Attacked()
    original = mixed(rng)
    assert isinstance(await node.offer(original), ScoredGroup)
    result = await node.offer(with_right_rewards(of_lineage(copied(original, how, rng))))
    assert isinstance(result, Refused) and result.reason is RefusalReason.COPIED, result
    assert isinstance(await node.offer(mixed(rng)), ScoredGroup), "the original's producer goes on"
    assert node.replay.num_external == 2


async def test_stale_as_fresh_is_refused() -> None:
    """The same rollouts signed again with a new date and step: what a producer claimed counts against itself."""
    rng, node = random.Random(1), Attacked(generates=False)
    old = mixed(rng)
    assert isinstance(await node.offer(old), ScoredGroup)
    for step in range(1, 20):
        fresh = replace(old, created_at_s=TOY_NOW_S + step)
        result = await node.offer(fresh)
        assert isinstance(result, Refused) and result.reason is RefusalReason.COPIED


async def test_a_copy_that_was_faster_leaves_the_buffer_when_the_committed_original_comes() -> None:
    rng, node = random.Random(1), Attacked()
    original = mixed(rng)
    node.novelty.commit([commitment_of(original)], ALICE.node_id)
    copy = await node.offer(with_right_rewards(of_lineage(copied(original, whole, rng))))
    assert isinstance(copy, ScoredGroup) and node.replay.digests == {copy.digest}
    genuine = await node.offer(original)
    assert isinstance(genuine, ScoredGroup) and node.replay.digests == {genuine.digest}
    assert node.replay.num_dropped == {"copied": 1}


# --- easy answers claimed ahead ------------------------------------------------------------------


def easy(rng: random.Random) -> tuple[RolloutGroup, RolloutGroup]:
    """A free key's group with the answers that everybody gives to an easy task, each by its claim drawn by a great
    chance; and an honest group with them, each drawn almost for certain."""
    original = mixed(rng)
    return with_right_rewards(of_lineage(copied(original, whole, rng))), with_logprobs(original, -0.01)


@pytest.mark.parametrize("ahead", ["commitment", "group", "both"])
async def test_easy_answers_that_a_free_key_claims_ahead_cost_no_established_node_a_group(ahead: str) -> None:
    node = Attacked(is_established=all_but_the_thief)
    claimed, honest = easy(random.Random(1))
    if ahead != "group":
        node.novelty.commit([commitment_of(claimed)], EVE.node_id)
    if ahead != "commitment":
        assert isinstance(await node.offer(claimed), ScoredGroup)
    result = await node.offer(honest)
    if ahead == "commitment":  # the group comes afterwards
        assert isinstance(result, ScoredGroup)
        assert isinstance(await node.offer(claimed), ScoredGroup)
    assert make_sealed(honest, ALICE).digest in node.replay.digests


async def test_nor_do_long_ones() -> None:
    node = Attacked(is_established=all_but_the_thief)
    for _ in range(400):
        node.novelty.measure_own(with_logprobs(invented(random.Random(2)), -12.0))  # a token of many bits for many ones
    claimed, honest = easy(random.Random(1))
    assert isinstance(await node.offer(with_logprobs(claimed, -50.0)), ScoredGroup)
    assert isinstance(await node.offer(honest), ScoredGroup)


@pytest.mark.parametrize("is_vouched", [True, False])
async def test_a_node_of_an_open_run_knows_who_is_established(is_vouched: bool) -> None:
    entry = EntryConfig(members=(ALICE.node_id,) if is_vouched else (BOB.node_id,), established="members")
    context = make_context(NodeConfig(entry=entry), OURS)
    agent = make_agent(context, MemoryGroupStore(context.clock, 10**8))
    agent.novelty.measure_own(invented(random.Random(2)))
    claimed, honest = easy(random.Random(1))
    assert isinstance(await agent.ingest.receive(seal_group(claimed, EVE), EVE.node_id), ScoredGroup)
    result = await agent.ingest.receive(seal_group(honest, ALICE), ALICE.node_id)
    if is_vouched:
        assert isinstance(result, ScoredGroup)
    else:  # among newcomers the first claim counts
        assert isinstance(result, Refused) and result.reason is RefusalReason.COPIED
    assert agent.reputation.score(ALICE.node_id) >= 0.0


async def test_nobody_can_sign_the_bytes_of_another() -> None:
    node = Attacked()
    victim = make_sealed(mixed(random.Random(1)), ALICE)
    signature = EVE.sign(b"swarm.v1.group", bytes([2 if victim.is_compressed else 1]) + victim.digest)
    stolen = replace(victim, producer=EVE.node_id, public_key=EVE.public_key, signature=signature)
    result = await node.admission.admit(stolen, EVE.node_id)
    assert isinstance(result, Refused) and result.reason is RefusalReason.MALFORMED
    assert isinstance(await node.admission.admit(victim, ALICE.node_id), ScoredGroup)


async def test_a_restarted_node_still_knows_the_answers() -> None:
    rng, context = random.Random(1), make_context(identity=OURS)
    store = MemoryGroupStore(context.clock, 10**8)
    original = mixed(rng)
    first = make_agent(context, store)
    assert isinstance(await first.admission.admit(seal_group(original, ALICE), ALICE.node_id), ScoredGroup)
    second = make_agent(context, store)
    await second.restore()
    second.novelty.measure_own(invented(random.Random(2)))
    copy = seal_group(with_right_rewards(of_lineage(copied(original, shuffled, rng))), EVE)
    result = await second.admission.admit(copy, EVE.node_id)
    assert isinstance(result, Refused) and result.reason is RefusalReason.COPIED


def test_turns_of_an_episode_are_told_apart_whatever_their_texts_hold() -> None:
    """Whoever could write a text whose key is that of another episode could have that one refused as its copy."""
    episodes = [("a", "b"), ("a\0b",), ("a", "b", ""), ("", "a", "b"), ("a\0b", ""), ("\0" * 8 + "a", ""), ("a", "\0")]
    group = make_group(texts=["1"] * len(episodes))
    rollouts = tuple(replace(each, actions=told) for each, told in zip(group.rollouts, episodes, strict=True))
    assert len(set(answer_keys(replace(group, rollouts=rollouts)))) == len(episodes)


def test_a_commitment_that_comes_after_a_group_moves_it_back_no_further() -> None:
    """Whoever holds a group can commit to it; one that came before keeps its place until its form is checked."""
    seen, group = Novelty(), make_group(ALICE.node_id, texts=["7"] * GROUP_SIZE)
    arrived = seen.take_number()
    seen.commit([commitment_of(group)], EVE.node_id)
    assert seen.order(group, arrived) == arrived < seen.order(group), "without the place that it arrived at: later"
