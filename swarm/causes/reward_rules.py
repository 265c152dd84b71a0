"""Rules about what rewards look at: chance, the length, one text whatever was asked; and what right answers are worth.

Invariant: only whether prompts, answers and right answers are equal is looked at, and how long they are.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import variance
from typing import Final

from swarm.causes.data_rules import DULL, VISIBLE, files_of, path_of
from swarm.causes.finding import Certainty, Diagnosed, Gravity, Suspect
from swarm.causes.snapshot import AnsweredGroup, Snapshot, mean

FEW_GROUPS: Final = 8  # fewer say nothing
FEW_LENGTHS: Final = 4
FEW_APART: Final = 3
SMALL_SPREAD: Final = 0.05  # of rewards, whose range is 1
OF_LENGTH: Final = 0.9  # of the variance of rewards
WELL_PAID: Final = 0.3
RIGHT_SHARE: Final = 0.05
FEW_ANSWERS: Final = 8
FEW_UNPAID: Final = 4  # of a reward that knows right answers none is
COMPARED: Final = 16  # answers of each kind from which their rewards can be compared
NEARLY_SHARE: Final = 0.1  # of a small model's sentences few hold the right number
MANY_PAID: Final = 64  # answers in full
UNPAID: Final = 0.5  # a right answer is worth more
UNPAID_SHARE: Final = 0.15
MOST: Final = 0.9
SIGMAS: Final = 3.0
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


# --- beside the right answers of the file ---


def right_answers_unpaid(snapshot: Snapshot) -> Diagnosed | None:
    """Answers that are the right one are worth little, or less than others."""
    right, others = _worth(snapshot, lambda each: each.is_right)
    unpaid = [reward for reward in right if reward < UNPAID]
    few = FEW_UNPAID if len(unpaid) == len(right) else FEW_ANSWERS
    if len(right) < few or len(unpaid) < max(FEW_UNPAID, UNPAID_SHARE * len(right)):
        return None
    is_less = len(others) >= COMPARED and _sigmas(others, right) > SIGMAS
    if is_less:
        claim = "the reward pays less for right answers than for wrong ones: it is upside down, or blind"
    elif len(unpaid) > MOST * len(right):
        claim = f"the reward does not know a right answer: those that are equal to it are worth {mean(right):.2g}"
    else:
        claim = f"{len(unpaid) / len(right):.0%} of the answers that are equal to the right one are not paid for it"
    blanks = [
        f"{facts.num_with_blanks} of {facts.num_records}" for _, facts in files_of(snapshot) if facts.num_with_blanks
    ]
    said = f"; {blanks[0]} right answers have blanks before or after them, which answers never have" if blanks else ""
    return Diagnosed(
        name="right_answers_unpaid",
        claim=claim + said,
        evidence=(
            f"{len(right)} answers of the newest own groups are the right one (groups.sqlite, and the file of "
            f"questions): mean reward {mean(right):.2g}, of the {len(others)} others {mean(others):.2g}",
        ),
        fix="compare answer.strip() with reference.strip() in the reward; one that measures how wrong an answer is has "
        f"to be turned round. swarm samples {snapshot.directory} shows both; "
        f"{_check(snapshot)} shows what right answers are worth",
        gravity=Gravity.HARMS,
        certainty=Certainty.SURE if is_less or len(unpaid) > MOST * len(right) else Certainty.LIKELY,
        key="environments.dataset",
        follows_from=frozenset({"reward_is_random", "reward_is_upside_down", "rewards_hardly_differ"})
        | {"reward_range_set_so", "records_contradict"},
    )


def answers_are_shifted(snapshot: Snapshot) -> Diagnosed | None:
    """Answers are right for the record before or after theirs."""
    right = [flag for group in snapshot.answers for flag in group.is_right]
    beside = [flag for group in snapshot.answers for flag in group.is_of_neighbour]
    if sum(beside) < COMPARED or sum(beside) < 4 * sum(right):
        return None
    return Diagnosed(
        name="answers_are_shifted",
        claim="right answers stand in the wrong records: what is answered is mostly right for the record before or "
        "after its own",
        evidence=(
            f"of {len(beside)} answers {sum(right)} are right, {sum(beside)} would be in the record beside "
            "(groups.sqlite, and the file of questions)",
        ),
        fix="the column of answers is moved by a line: mend the file, and begin again in a new directory",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        key="environments.dataset",
    )


def suspects(snapshot: Snapshot) -> list[Suspect]:
    """Answers whose form alone is wrong, and wrong ones that are paid in full."""
    found = (_nearly_right(snapshot), _part_of_right(snapshot), _paid_though_wrong(snapshot))
    return [each for each in found if each is not None]


def _nearly_right(snapshot: Snapshot) -> Suspect | None:
    """Answers whose form alone is not that of the right one are worth nothing."""
    right = sum(flag for group in snapshot.answers for flag in group.is_right)
    nearly, others = _worth(snapshot, lambda each: each.is_nearly_right)
    if len(nearly) < FEW_ANSWERS or len(nearly) < NEARLY_SHARE * (len(nearly) + len(others)) or mean(nearly) > VISIBLE:
        return None
    if right > len(nearly) / 4:  # the form is within reach
        return None
    finding = Diagnosed(
        name="right_but_for_the_form",
        claim="answers are right but for their form, and worth nothing: case, punctuation, or words around the answer",
        evidence=(
            f"{len(nearly)} of {len(nearly) + len(others)} answers have the right one in them, {right} are equal to it "
            "(groups.sqlite, and the file of questions)",
        ),
        fix="a reward that takes the answer out of what is said, or a prompt that shows the form that it wants",
        gravity=Gravity.NOTE,
        certainty=Certainty.LIKELY,
        key="environments.dataset",
    )
    return Suspect(finding=finding, explains=DULL)


def _part_of_right(snapshot: Snapshot) -> Suspect | None:
    """Right answers have words before the result, as a solution has, and the result alone is worth nothing."""
    ends, _ = _worth(snapshot, lambda each: each.is_end_of_right)
    right, others = _worth(snapshot, lambda each: each.is_right)
    marked = [(env, facts) for env, facts in files_of(snapshot) if facts.num_marked >= MOST * facts.num_records]
    is_seen = len(ends) >= FEW_ANSWERS and mean(ends) <= VISIBLE and len(right) <= len(ends) / 4
    is_compared = any(env.kind == "jsonl" for env, _ in marked) and len(others) >= COMPARED and not right
    if not is_seen and not is_compared:
        return None
    shown = [f"{facts.num_marked} of {facts.num_records} in {path_of(env)}" for env, facts in marked]
    finding = Diagnosed(
        name="right_answers_hold_more",
        claim="right answers are whole solutions, or have words before the result, and only who writes all of that is "
        "right",
        evidence=(
            f"{len(ends)} answers are the last word of the right one, {len(right)} of {len(right) + len(others)} are "
            "equal to it (groups.sqlite, and the file of questions)",
            *([f"right answers whose last word has the same word before it: {shown[0]}"] if shown else []),
        ),
        fix="the result alone as the right answer of each record, or a --reward that takes it out of both",
        gravity=Gravity.NOTE,
        certainty=Certainty.LIKELY,
        key="environments.dataset",
    )
    return Suspect(finding=finding, explains=DULL)


def _paid_though_wrong(snapshot: Snapshot) -> Suspect | None:
    """Answers with the full reward are not the right one, nor have it in them: right where there are several."""
    known = [pair for group in snapshot.answers for pair in zip(group.rewards, _kin(group), strict=False)]
    best = max((reward for reward, _ in known), default=0.0)
    paid = [is_kin for reward, is_kin in known if reward >= best - _EDGE]
    if best < UNPAID or len(paid) < MANY_PAID or sum(paid) > (1 - MOST) * len(paid):
        return None
    finding = Diagnosed(
        name="paid_though_wrong",
        claim=f"{len(paid) - sum(paid)} of {len(paid)} answers with the full reward are not the right one, nor have it "
        "in them: the reward asks for less than that",
        evidence=(f"{len(known)} answers of the newest own groups (groups.sqlite, and the file of questions)",),
        fix=f"read some, and what they are worth: swarm samples {snapshot.directory}; a reward that compares with the "
        "reference, unless other answers are as right",
        gravity=Gravity.NOTE,
        certainty=Certainty.LIKELY,
        key="environments.dataset",
    )
    return Suspect(finding=finding, explains=DULL | {"all_right", "one_answer"})


def _kin(group: AnsweredGroup) -> tuple[bool, ...]:
    """Which answers are the right one, or have it in them, or are its last word."""
    kinds = (group.is_right, group.is_nearly_right, group.is_end_of_right)
    return tuple(any(flags) for flags in zip(*kinds, strict=False))


def _worth(snapshot: Snapshot, kind: Callable[[AnsweredGroup], tuple[bool, ...]]) -> tuple[list[float], list[float]]:
    """Rewards of answers of a kind, and of the others whose kind is known."""
    pairs = [pair for group in snapshot.answers for pair in zip(group.rewards, kind(group), strict=False)]
    return [reward for reward, flag in pairs if flag], [reward for reward, flag in pairs if not flag]


def _sigmas(one: list[float], other: list[float]) -> float:
    """By how many standard deviations of the difference the mean of one is above that of the other."""
    noise = math.sqrt(variance(one) / len(one) + variance(other) / len(other))
    return (mean(one) - mean(other)) / max(noise, 1e-9)


def _check(snapshot: Snapshot) -> str:
    return f"swarm check --config {snapshot.directory / 'node.toml'}"
