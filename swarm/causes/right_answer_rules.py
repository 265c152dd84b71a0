"""Rules about answers beside the right ones of the file: what those are worth that are right, or nearly so.

Invariant: only whether answers are equal to right ones is looked at; nothing that they say is shown.
"""

import math
from collections.abc import Callable
from statistics import variance
from typing import Final

from swarm.causes.data_rules import DULL, VISIBLE, files_of
from swarm.causes.finding import Certainty, Diagnosed, Gravity, Suspect
from swarm.causes.snapshot import AnsweredGroup, Snapshot, mean

FEW_ANSWERS: Final = 8
FEW_UNPAID: Final = 4  # of a reward that knows right answers none is
COMPARED: Final = 16  # answers of each kind from which their rewards can be compared
UNPAID: Final = 0.5  # a right answer is worth more
UNPAID_SHARE: Final = 0.15
MOST: Final = 0.9
SIGMAS: Final = 3.0


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
    """Answers whose form alone is wrong."""
    found = _nearly_right(snapshot)
    return [] if found is None else [found]


def _nearly_right(snapshot: Snapshot) -> Suspect | None:
    """Answers whose form alone is not that of the right one are worth nothing."""
    right = sum(flag for group in snapshot.answers for flag in group.is_right)
    nearly, others = _worth(snapshot, lambda each: each.is_nearly_right)
    if len(nearly) < FEW_ANSWERS or len(nearly) < 0.2 * (len(nearly) + len(others)) or mean(nearly) > VISIBLE:
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
