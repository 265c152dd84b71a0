"""Rules about answers, compared with each other and with the right answers of the file of questions.

Invariant: answers and right answers are only compared and counted; nothing of their text is shown.
"""

import math
from collections import Counter
from collections.abc import Callable
from statistics import variance
from typing import Final

from swarm.diagnosis.signal_rules import has_no_success, of_prompt, teaches_little
from swarm.diagnosis.snapshot import (
    COMPARED,
    EDGE,
    FEW_GROUPS,
    MOST,
    VISIBLE,
    AnsweredGroup,
    Diagnosed,
    Gravity,
    Snapshot,
    mean,
)

FEW_ANSWERS: Final = 8
FEW_UNPAID: Final = 4
MANY_PAID: Final = 64  # answers with the full reward
UNPAID: Final = 0.5  # a right answer is worth more
UNPAID_SHARE: Final = 0.15
NEARLY_SHARE: Final = 0.1  # of a small model's sentences few hold the right number
SIGMAS: Final = 3.0
EVIDENCE: Final = "(groups.sqlite, and the file of questions)"


def _worth(snapshot: Snapshot, kind: Callable[[AnsweredGroup], tuple[bool, ...]]) -> tuple[list[float], list[float]]:
    """Returns the rewards of answers with a flag set, and of the other answers whose flag is known."""
    pairs = [pair for group in snapshot.answers for pair in zip(group.rewards, kind(group), strict=False)]
    return [reward for reward, flag in pairs if flag], [reward for reward, flag in pairs if not flag]


def right_answers_unpaid(snapshot: Snapshot) -> Diagnosed | None:
    """Finds right answers that are worth little, or less than others."""
    right, others = _worth(snapshot, lambda each: each.is_right)
    unpaid = [reward for reward in right if reward < UNPAID]
    few = FEW_UNPAID if len(unpaid) == len(right) else FEW_ANSWERS
    if len(right) < few or len(unpaid) < max(FEW_UNPAID, UNPAID_SHARE * len(right)):
        return None
    if len(others) >= COMPARED and _sigmas(others, right) > SIGMAS:
        claim = "the reward pays less for right answers than for wrong ones: it is upside down, or blind"
    elif len(unpaid) > MOST * len(right):
        claim = f"the reward does not know a right answer: those that are equal to it are worth {mean(right):.2g}"
    else:
        claim = f"{len(unpaid) / len(right):.0%} of the answers that are equal to the right one are not paid for it"
    blanks = sum(facts.num_with_blanks for facts in snapshot.records.values())
    return Diagnosed(
        claim=claim
        + (f"; {blanks} right answers of the file have blanks around them, which answers never have" if blanks else ""),
        fix="compare answer.strip() with reference.strip() in the reward; one that measures how wrong an answer is has "
        f"to be turned round. {snapshot.look} shows both; "
        f"{snapshot.check} shows what right answers are worth",
        evidence=(
            f"{len(right)} answers of the newest own groups are the right one (groups.sqlite, and the file of "
            f"questions): mean reward {mean(right):.2g}, of the {len(others)} others {mean(others):.2g}",
        ),
        key="environments.dataset",
    )


def _sigmas(one: list[float], other: list[float]) -> float:
    """Mean of `one` minus mean of `other`, in standard deviations of the difference."""
    noise = math.sqrt(variance(one) / len(one) + variance(other) / len(other))
    return (mean(one) - mean(other)) / max(noise, 1e-9)


def answers_are_shifted(snapshot: Snapshot) -> Diagnosed | None:
    """Finds answers that are right for the record before or after their own."""
    num_right = snapshot.num_right
    beside = [flag for group in snapshot.answers for flag in group.is_of_neighbour]
    if sum(beside) < COMPARED or sum(beside) < 4 * num_right:
        return None
    return Diagnosed(
        claim="right answers stand in the wrong records: most answers are right for the record before or after their "
        "own",
        fix="the column of answers is moved by a line: correct the file, and begin again in a new directory",
        evidence=(
            f"of {len(beside)} answers {num_right} are right, {sum(beside)} would be in the record beside {EVIDENCE}",
        ),
        key="environments.dataset",
    )


def right_but_for_the_form(snapshot: Snapshot) -> Diagnosed | None:
    """Finds answers that contain the right answer and are worth nothing because of their form."""
    right = snapshot.num_right
    nearly, others = _worth(snapshot, lambda each: each.is_nearly_right)
    if len(nearly) < FEW_ANSWERS or len(nearly) < NEARLY_SHARE * (len(nearly) + len(others)) or mean(nearly) > VISIBLE:
        return None
    if right > len(nearly) / 4 or not teaches_little(snapshot):  # the form is within reach
        return None
    return Diagnosed(
        claim="answers are right but for their form, and worth nothing: case, punctuation, or words around the answer",
        fix="a reward that takes the answer out of the text, or a prompt that shows the form that it wants"
        + of_prompt(snapshot),
        evidence=(
            f"{len(nearly)} of {len(nearly) + len(others)} answers have the right one in them, {right} are equal to it "
            f"{EVIDENCE}",
        ),
        key="environments.dataset",
    )


def right_answers_hold_more(snapshot: Snapshot) -> Diagnosed | None:
    """Finds right answers in the file that contain more than the result, so that the result alone is worth nothing."""
    ends, _ = _worth(snapshot, lambda each: each.is_end_of_right)
    right, others = _worth(snapshot, lambda each: each.is_right)
    marked = {name for name, facts in snapshot.records.items() if facts.num_marked >= MOST * facts.num_records}
    is_seen = len(ends) >= FEW_ANSWERS and mean(ends) <= VISIBLE and len(right) <= len(ends) / 4
    is_exact = any(env.kind == "jsonl" and env.name in marked for env in snapshot.environments)
    if not (is_seen or (is_exact and len(others) >= COMPARED and not right)) or not teaches_little(snapshot):
        return None
    return Diagnosed(
        claim="right answers are whole solutions, or have words before the result, and only an answer that repeats all "
        "of that is right",
        fix="the result alone as the right answer of each record, or a --reward that takes it out of both",
        evidence=(
            f"{len(ends)} answers are the last word of the right one, {len(right)} of {len(right) + len(others)} are "
            f"equal to it {EVIDENCE}",
        ),
        key="environments.dataset",
    )


def paid_though_wrong(snapshot: Snapshot) -> Diagnosed | None:
    """Finds best paid answers that do not contain the right one; usual if several answers are right."""
    known = [
        (reward, any(flags))
        for group in snapshot.answers
        for reward, *flags in zip(
            group.rewards, group.is_right, group.is_nearly_right, group.is_end_of_right, strict=False
        )
    ]
    best = max((reward for reward, _ in known), default=0.0)
    paid = [is_kin for reward, is_kin in known if reward >= best - EDGE]
    if best < UNPAID or len(paid) < MANY_PAID or sum(paid) > (1 - MOST) * len(paid):
        return None
    return Diagnosed(
        claim=f"{len(paid) - sum(paid)} of {len(paid)} answers with the highest reward seen, {best:.3g}, are not the "
        "right one, nor have it in them: the reward asks for less than that",
        fix=f"read some, and what they are worth: {snapshot.look}; a reward that compares with the "
        "reference, unless other answers are as right",
        evidence=(f"{len(known)} answers of the newest own groups {EVIDENCE}",),
        key="environments.dataset",
        gravity=Gravity.HARMS if teaches_little(snapshot) or has_no_success(snapshot) else Gravity.NOTE,
    )


def one_answer(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a model that gives the same answer to every question."""
    groups = [each for each in snapshot.answers if each.texts]
    texts = Counter(text for each in groups for text in each.texts)
    if len({(each.env, each.task_id) for each in groups}) < FEW_GROUPS or not texts:
        return None
    share = texts.most_common(1)[0][1] / texts.total()
    if share < 0.95:
        return None
    is_paid = mean([reward for each in groups for reward in each.rewards]) > 0.5
    return Diagnosed(
        claim="the model gives one and the same answer to every question"
        + (", and gets a reward for it" if is_paid else ""),
        fix=f"look at it: {snapshot.look}. A reward that pays for one answer, whatever is asked, "
        "has to be corrected; then begin again from a checkpoint before",
        evidence=(f"{share:.0%} of {texts.total()} answers to {len(groups)} questions are equal (groups.sqlite)",),
    )
