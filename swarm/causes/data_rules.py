"""Rules about the file of questions and right answers, and about what answers that are right or nearly so are worth.

Invariant: records are counted and compared with each other and with answers; nothing that they say is shown.
"""

import math
from collections.abc import Callable
from statistics import variance
from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity, Suspect
from swarm.causes.signal_rules import NO_SIGNAL
from swarm.causes.snapshot import AnsweredGroup, Snapshot, mean
from swarm.config import EnvironmentConfig
from swarm.environments.record_facts import RecordFacts
from swarm.model.source import is_char_model

VISIBLE: Final = 0.05  # of the records, from which on a fault of them is more than a slip
MOST: Final = 0.9
FEW_QUESTIONS: Final = 20  # are learned by heart within minutes
FEW_ANSWERS: Final = 8
COMPARED: Final = 16  # answers of each kind from which their rewards can be compared
UNPAID: Final = 0.5  # a right answer is worth more
UNPAID_SHARE: Final = 0.15
SIGMAS: Final = 3.0
CHARS_PER_TOKEN: Final = 8  # no tokenizer takes more of plain text
DULL: Final = (NO_SIGNAL - {"cannot_be_scored"}) | {
    "learns_nothing",
    "no_progress",
    "step_needs_many",
    "small_signal",
    "held_out_stays",
}


def records_contradict(snapshot: Snapshot) -> Diagnosed | None:
    """The same question is there with several right answers."""
    found = _worst(snapshot, lambda each: each.num_contradicting)
    if found is None:
        return None
    env, facts, share = found
    one, other = facts.first_contradiction
    return Diagnosed(
        name="records_contradict",
        claim=f"records contradict each other: {share:.0%} of those of {env.name} ask a question that has different "
        "right answers elsewhere in the file, so that no answer is right",
        evidence=(
            f"{facts.num_contradicting} of {facts.num_records} records, {facts.num_questions} different questions; "
            f"records {one} and {other} first, counted from 0 ({_path(env)})",
        ),
        fix=f"keep one right answer for each question in {_path(env)}, or put into the question what tells them "
        "apart; then begin again in a new directory",
        gravity=Gravity.HARMS,
        certainty=Certainty.SURE if env.kind == "jsonl" else Certainty.LIKELY,
        key="environments.dataset",
    )


def records_broken(snapshot: Snapshot) -> Diagnosed | None:
    """Lines of the file are no records, which the start would have refused: it was changed since."""
    found = _worst(snapshot, lambda each: each.num_broken, least=0.0)
    if found is None:
        return None
    env, facts, _ = found
    return Diagnosed(
        name="records_broken",
        claim=f"the file of questions of {env.name} is damaged, or was changed since the start: {facts.num_broken} "
        "lines are no record",
        evidence=(f"{facts.num_broken} of {facts.num_records} lines ({_path(env)})",),
        fix=f"put back {_path(env)} as it was, a JSON object in each line; then {snapshot.start}",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        key="environments.dataset",
    )


def answers_no_text(snapshot: Snapshot) -> Diagnosed | None:
    """Right answers are null, or lists and tables where the text has to be the same."""
    by_kind = {
        each.name: facts.num_null + (facts.num_no_text if each.kind == "jsonl" else 0)
        for each, facts in _files(snapshot)
    }
    for env, facts in _files(snapshot):
        if by_kind[env.name] >= VISIBLE * facts.num_records:
            return Diagnosed(
                name="answers_no_text",
                claim=f"{by_kind[env.name]} of {facts.num_records} right answers of {env.name} are no text but null, "
                "true, false, a list or a table: none is right that does not spell that",
                evidence=(f"{facts.num_null} null, {facts.num_no_text} others ({_path(env)})",),
                fix=f"right answers as plain text in {_path(env)}, as the model is to write them",
                gravity=Gravity.HARMS,
                certainty=Certainty.LIKELY,
                key="environments.dataset",
            )
    return None


def questions_tell_answers(snapshot: Snapshot) -> Diagnosed | None:
    """Questions end with their right answer."""
    found = _worst(snapshot, lambda each: each.num_told, least=MOST)
    if found is None:
        return None
    env, facts, share = found
    return Diagnosed(
        name="questions_tell_answers",
        claim=f"{share:.0%} of the questions of {env.name} end with their right answer: the model learns to copy it",
        evidence=(f"{facts.num_told} of {facts.num_records} records ({_path(env)})",),
        fix="questions without their answers; --question and --answer (params of [[environments]]) name the fields",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        key="environments.dataset",
    )


def one_right_answer(snapshot: Snapshot) -> Diagnosed | None:
    """Most questions have one and the same right answer."""
    found = _worst(snapshot, lambda each: each.commonest, least=MOST)
    if found is None or found[1].num_questions < FEW_QUESTIONS:
        return None
    env, facts, share = found
    return Diagnosed(
        name="one_right_answer",
        claim=f"{share:.0%} of the questions of {env.name} have the same right answer: whoever always gives it is "
        "right without reading them",
        evidence=(f"{facts.commonest} of {facts.num_records} records ({_path(env)})",),
        fix="records with different answers, about as many of each; "
        f"params.answer of [[environments]] {env.name} names the field that has them",
        gravity=Gravity.WASTES,
        certainty=Certainty.LIKELY,
        key="environments.dataset",
    )


def records_repeat(snapshot: Snapshot) -> Diagnosed | None:
    """A file has a few questions many times."""
    for env, facts in _files(snapshot):
        if facts.num_questions <= FEW_QUESTIONS and facts.num_records >= 4 * facts.num_questions:
            return Diagnosed(
                name="records_repeat",
                claim=f"the same few questions are there again and again: {facts.num_records} records of {env.name} "
                f"ask {facts.num_questions} different questions, which are soon known by heart",
                evidence=(f"{_path(env)}",),
                fix="more different questions; the same one twice adds nothing",
                gravity=Gravity.WASTES,
                certainty=Certainty.LIKELY,
                key="environments.dataset",
            )
    return None


def answers_have_no_room(snapshot: Snapshot) -> Diagnosed | None:
    """Right answers are longer than answers may be."""
    found = _worst(snapshot, lambda each: _num_too_long(each, snapshot), least=0.1)
    if found is None or found[0].kind != "jsonl":  # of a function a part of it may be enough
        return None
    return _no_room(snapshot, *found)


def right_answers_unpaid(snapshot: Snapshot) -> Diagnosed | None:
    """Answers that are the right one are worth little, or less than others."""
    right, others = _worth(snapshot, lambda each: each.is_right)
    unpaid = [reward for reward in right if reward < UNPAID]
    if len(unpaid) < FEW_ANSWERS or len(unpaid) < UNPAID_SHARE * len(right):
        return None
    is_less = len(others) >= COMPARED and _sigmas(others, right) > SIGMAS
    if is_less:
        claim = "the reward pays less for right answers than for wrong ones: it is upside down, or blind"
    elif len(unpaid) > MOST * len(right):
        claim = f"the reward does not know a right answer: those that are equal to it are worth {mean(right):.2g}"
    else:
        claim = f"{len(unpaid) / len(right):.0%} of the answers that are equal to the right one are not paid for it"
    blanks = [
        f"{facts.num_with_blanks} of {facts.num_records}" for _, facts in _files(snapshot) if facts.num_with_blanks
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
    """What is odd about records, and harms where little is learned from them."""
    found = [_with_blanks(snapshot), _nearly_right(snapshot)]
    if (long := _worst(snapshot, lambda each: _num_too_long(each, snapshot), least=0.1)) is not None:
        found.append(Suspect(finding=_no_room(snapshot, *long), explains=DULL | {"cut_off"}))
    return [each for each in found if each is not None]


def _with_blanks(snapshot: Snapshot) -> Suspect | None:
    """Right answers that begin or end with blanks, where a function of one's own compares them."""
    found = _worst(snapshot, lambda each: each.num_with_blanks)
    if found is None or found[0].kind != "function":
        return None
    env, facts, share = found
    finding = Diagnosed(
        name="answers_with_blanks",
        claim=f"{share:.0%} of the right answers of {env.name} begin or end with blanks, which answers never do",
        evidence=(f"{facts.num_with_blanks} of {facts.num_records} records ({_path(env)})",),
        fix=f"right answers without blanks around them in {_path(env)}, or reference.strip() in the reward",
        gravity=Gravity.NOTE,
        certainty=Certainty.LIKELY,
        key="environments.dataset",
    )
    return Suspect(finding=finding, explains=DULL | {"right_answers_unpaid"})


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


def _no_room(snapshot: Snapshot, env: EnvironmentConfig, facts: RecordFacts, share: float) -> Diagnosed:
    longest, most = max(facts.answer_chars, default=0), _most_chars(snapshot)
    return Diagnosed(
        name="answers_have_no_room",
        claim=f"{share:.0%} of the right answers of {env.name} are longer than generator.max_new_tokens allows: nobody "
        "can give them",
        evidence=(f"the longest has {longest} characters, and {most} fit ({_path(env)})",),
        fix=snapshot.set_key("generator.max_new_tokens", longest + 1, why=" (the same on every node of the run)")
        + "; or shorter answers",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        key="generator.max_new_tokens",
    )


def _num_too_long(facts: RecordFacts, snapshot: Snapshot) -> int:
    return sum(count > _most_chars(snapshot) for count in facts.answer_chars)


def _most_chars(snapshot: Snapshot) -> int:
    """Characters that surely do not fit into an answer, less one."""
    assert snapshot.config is not None
    most = snapshot.config.generator.max_new_tokens
    return most if is_char_model(snapshot.config.model.source) else CHARS_PER_TOKEN * most


def _files(snapshot: Snapshot) -> list[tuple[EnvironmentConfig, RecordFacts]]:
    sections = () if snapshot.config is None else snapshot.config.environments
    return [(each, snapshot.records[each.name]) for each in sections if each.name in snapshot.records]


def _worst(
    snapshot: Snapshot, count: Callable[[RecordFacts], int], least: float = VISIBLE
) -> tuple[EnvironmentConfig, RecordFacts, float] | None:
    """The environment with the largest share of such records; None where it is below `least`."""
    found = [(env, facts, count(facts) / facts.num_records) for env, facts in _files(snapshot) if count(facts)]
    env, facts, share = max(found, key=lambda each: each[2], default=(None, None, 0.0))
    return None if env is None or facts is None or share < least else (env, facts, share)


def _worth(snapshot: Snapshot, kind: Callable[[AnsweredGroup], tuple[bool, ...]]) -> tuple[list[float], list[float]]:
    """Rewards of answers of a kind, and of the others whose kind is known."""
    pairs = [pair for group in snapshot.answers for pair in zip(group.rewards, kind(group), strict=False)]
    return [reward for reward, flag in pairs if flag], [reward for reward, flag in pairs if not flag]


def _sigmas(one: list[float], other: list[float]) -> float:
    """By how many standard deviations of the difference the mean of one is above that of the other."""
    noise = math.sqrt(variance(one) / len(one) + variance(other) / len(other))
    return (mean(one) - mean(other)) / max(noise, 1e-9)


def _path(env: EnvironmentConfig) -> str:
    return str(env.params.get("path") or env.dataset)


def _check(snapshot: Snapshot) -> str:
    return f"swarm check --config {snapshot.directory / 'node.toml'}"
