"""Rules about what rewards look at: chance, the length, or one text whatever was asked, in place of the answer.

Invariant: only whether prompts and answers are equal is looked at, and how long they are, never what they say.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.snapshot import Snapshot, mean

FEW_GROUPS: Final = 8  # fewer say nothing
FEW_LENGTHS: Final = 4
FEW_APART: Final = 3
SMALL_SPREAD: Final = 0.05  # of rewards, whose range is 1
OF_LENGTH: Final = 0.9  # of the variance of rewards
WELL_PAID: Final = 0.3
RIGHT_SHARE: Final = 0.05
_EDGE: Final = 1e-6


def reward_is_random(snapshot: Snapshot) -> Diagnosed | None:
    """Equal answers to one question get different rewards."""
    rewards: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for group in snapshot.answers:
        for text, reward in zip(group.texts, group.rewards, strict=False):
            rewards[group.env, group.task_id, text].append(reward)
    twice = [each for each in rewards.values() if len(each) > 1]
    num_apart = sum(max(each) - min(each) > _EDGE for each in twice)
    if num_apart < FEW_APART or num_apart < len(twice) / 4:
        return None
    return Diagnosed(
        name="reward_is_random",
        claim="the reward is not of the answer alone: equal answers to one question get different rewards",
        evidence=(f"{num_apart} of {len(twice)} answers that were given more than once (groups.sqlite)",),
        fix="a reward that looks at question, answer and reference alone: no chance, clock, counter or other answers; "
        f"swarm samples {snapshot.directory} shows answers with their rewards",
        gravity=Gravity.HARMS,
    )


def reward_is_of_length(snapshot: Snapshot) -> Diagnosed | None:
    """Whatever was asked, the length of an answer says what it is worth: answers of one length are worth the same."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for group in snapshot.answers:
        for length, reward in zip(group.num_tokens, group.rewards, strict=True):
            rewards[length].append(reward)
    often = [each for each in rewards.values() if len(each) >= FEW_GROUPS]
    share = _between(often)
    if len(often) < FEW_LENGTHS or share < OF_LENGTH or len({round(mean(each), 2) for each in often}) < FEW_LENGTHS:
        return None
    return Diagnosed(
        name="reward_is_of_length",
        claim="the reward looks at the length of an answer"
        + (" alone" if share > 1 - _EDGE else "")
        + ": whatever is asked and said, equal lengths are worth the same",
        evidence=(
            f"{len(often)} lengths of {sum(map(len, often))} answers (groups.sqlite): {share:.0%} of the differences "
            "between rewards are those between lengths",
        ),
        fix=f"a reward that looks at what is said: swarm samples {snapshot.directory} shows answers with their rewards",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
    )


def _between(parts: Sequence[Sequence[float]]) -> float:
    """Share of the variance that lies between parts; 0 of equal values."""
    level = mean([value for part in parts for value in part])
    whole = sum((value - level) ** 2 for part in parts for value in part)
    return sum(len(part) * (mean(part) - level) ** 2 for part in parts) / whole if whole > _EDGE else 0.0


def reward_ignores_question(snapshot: Snapshot) -> Diagnosed | None:
    """Some texts are well paid whatever was asked, and always the same."""
    rewards: dict[tuple[str, int], dict[int, set[float]]] = defaultdict(lambda: defaultdict(set))
    for group in snapshot.answers:
        if len({*group.texts}) > 1:  # where all say the same, nobody tried what else is worth
            for text, reward in zip(group.texts, group.rewards, strict=False):
                rewards[group.env, text][group.prompt].add(round(reward, 6))
    often = [prompts for prompts in rewards.values() if len(prompts) >= FEW_GROUPS]
    values = [set[float]().union(*prompts.values()) for prompts in often]
    paid = [max(each) for each in values if len(each) == 1 and max(each) > WELL_PAID]
    if not paid or any(len(each) > 1 for each in values):
        return None
    num_questions = max(len(prompts) for prompts in often)
    right = [flag for group in snapshot.answers for flag in group.is_right]
    said = f"; of {len(right)} answers {sum(right)} are right, and what is paid for is wrong"
    said = said if right and sum(right) < RIGHT_SHARE * len(right) else ""
    return Diagnosed(
        name="reward_ignores_question",
        claim=f"the reward pays for a text whatever is asked: the same answer to {num_questions} different questions "
        f"is worth {max(paid):.2g} each time{said}",
        evidence=(f"{len(often)} texts were given to {FEW_GROUPS} questions or more (groups.sqlite)",),
        fix="a reward that compares the answer with the reference of its question: "
        f"swarm samples {snapshot.directory} shows answers with their rewards",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        follows_from=frozenset({"one_question", "one_right_answer", "reward_is_of_length", "reward_is_upside_down"})
        | {"right_answers_unpaid"},
    )


def rewards_hardly_differ(snapshot: Snapshot) -> Diagnosed | None:
    """Rewards fill a small part of their range, so that noise of the rest outweighs them."""
    rewards = [reward for each in snapshot.answers for reward in each.rewards]
    if len(snapshot.answers) < FEW_GROUPS or not 0 < max(rewards) - min(rewards) < SMALL_SPREAD:
        return None
    return Diagnosed(
        name="rewards_hardly_differ",
        claim=f"rewards of all answers lie between {min(rewards):.3g} and {max(rewards):.3g}: a good answer is hardly "
        "worth more than a bad one",
        evidence=(f"{len(rewards)} answers of the newest {len(snapshot.answers)} own groups (groups.sqlite)",),
        fix="reward_range under [[environments]] as what the function returns, or a reward that tells answers apart",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        key="environments.reward_range",
    )
