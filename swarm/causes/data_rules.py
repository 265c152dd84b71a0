"""Rules about the file of questions and right answers: records that contradict, repeat, or cannot be answered.

Invariant: records are counted and compared with each other; nothing that they say is shown.
"""

from collections.abc import Callable
from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity, Suspect
from swarm.causes.signal_rules import NO_SIGNAL
from swarm.causes.snapshot import Snapshot, middle
from swarm.config import EnvironmentConfig
from swarm.environments.record_facts import RecordFacts
from swarm.model.source import is_char_model

VISIBLE: Final = 0.05  # of the records, from which on a fault of them is more than a slip
MOST: Final = 0.9
FEW_QUESTIONS: Final = 20  # are learned by heart within minutes
CHARS_PER_TOKEN: Final = 8  # no tokenizer takes more of plain text
LONG_CHARS: Final = 128  # what the tiny models read
FAR_LONGER: Final = 10  # times as long as half of the questions
OF_SIZE: Final = frozenset({"out_of_memory", "worker_dies", "cannot_be_scored", "killer_group", "loops_fail", "halted"})
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
            f"records {one} and {other} first, counted from 0 ({path_of(env)})",
        ),
        fix=f"keep one right answer for each question in {path_of(env)}, or put into the question what tells them "
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
        evidence=(f"{facts.num_broken} of {facts.num_records} lines ({path_of(env)})",),
        fix=f"put back {path_of(env)} as it was, a JSON object in each line; then {snapshot.start}",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        key="environments.dataset",
    )


def answers_no_text(snapshot: Snapshot) -> Diagnosed | None:
    """Right answers are null, or lists and tables where the text has to be the same."""
    by_kind = {
        each.name: facts.num_null + (facts.num_no_text if each.kind == "jsonl" else 0)
        for each, facts in files_of(snapshot)
    }
    for env, facts in files_of(snapshot):
        if by_kind[env.name] >= VISIBLE * facts.num_records:
            return Diagnosed(
                name="answers_no_text",
                claim=f"{by_kind[env.name]} of {facts.num_records} right answers of {env.name} are no text but null, "
                "true, false, a list or a table: none is right that does not spell that",
                evidence=(f"{facts.num_null} null, {facts.num_no_text} others ({path_of(env)})",),
                fix=f"right answers as plain text in {path_of(env)}, as the model is to write them",
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
        evidence=(f"{facts.num_told} of {facts.num_records} records ({path_of(env)})",),
        fix="questions without their answers; --question and --answer (params of [[environments]]) name the fields",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        key="environments.dataset",
    )


def questions_too_long(snapshot: Snapshot) -> Diagnosed | None:
    """Some questions are many times as long as the others, and longer than the model reads."""
    found = _worst(snapshot, _num_far_longer, least=0.0)
    if found is None or snapshot.config is None or not is_char_model(snapshot.config.model.source):
        return None
    return _far_longer(*found)


def _num_far_longer(facts: RecordFacts) -> int:
    most = max(LONG_CHARS, FAR_LONGER * middle(facts.question_chars))
    return sum(count > most for count in facts.question_chars)


def _far_longer(env: EnvironmentConfig, facts: RecordFacts, _: float) -> Diagnosed:
    usual, longest = middle(facts.question_chars), max(facts.question_chars)
    return Diagnosed(
        name="questions_too_long",
        claim=f"{_num_far_longer(facts)} questions of {env.name} are far longer than the others, up to {longest} "
        f"characters where {usual:.0f} is usual: the model hardly reads such, and they take memory and time",
        evidence=(
            f"of {facts.num_records} records, number {facts.question_chars.index(longest)} is the longest, counted "
            f"from 0 ({path_of(env)})",
        ),
        fix=f"take them out of {path_of(env)}, or cut them to what matters",
        gravity=Gravity.WASTES,
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
        evidence=(f"{facts.commonest} of {facts.num_records} records ({path_of(env)})",),
        fix="records with different answers, about as many of each; "
        f"params.answer of [[environments]] {env.name} names the field that has them",
        gravity=Gravity.WASTES,
        certainty=Certainty.LIKELY,
        key="environments.dataset",
    )


def records_repeat(snapshot: Snapshot) -> Diagnosed | None:
    """A file has a few questions many times."""
    for env, facts in files_of(snapshot):
        if facts.num_questions <= FEW_QUESTIONS and facts.num_records >= 4 * facts.num_questions:
            return Diagnosed(
                name="records_repeat",
                claim=f"the same few questions are there again and again: {facts.num_records} records of {env.name} "
                f"ask {facts.num_questions} different questions, which are soon known by heart",
                evidence=(f"{path_of(env)}",),
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


def suspects(snapshot: Snapshot) -> list[Suspect]:
    """What is odd about records, and harms where little is learned from them."""
    found = [_with_blanks(snapshot)]
    if (long := _worst(snapshot, lambda each: _num_too_long(each, snapshot), least=0.1)) is not None:
        found.append(Suspect(finding=_no_room(snapshot, *long), explains=DULL | {"cut_off"}))
    if (outliers := _worst(snapshot, _num_far_longer, least=0.0)) is not None:
        found.append(Suspect(finding=_far_longer(*outliers), explains=OF_SIZE))
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
        evidence=(f"{facts.num_with_blanks} of {facts.num_records} records ({path_of(env)})",),
        fix=f"right answers without blanks around them in {path_of(env)}, or reference.strip() in the reward",
        gravity=Gravity.NOTE,
        certainty=Certainty.LIKELY,
        key="environments.dataset",
    )
    return Suspect(finding=finding, explains=DULL - {"no_progress", "learns_nothing"} | {"right_answers_unpaid"})


def _no_room(snapshot: Snapshot, env: EnvironmentConfig, facts: RecordFacts, share: float) -> Diagnosed:
    longest, most = max(facts.answer_chars, default=0), _most_chars(snapshot)
    return Diagnosed(
        name="answers_have_no_room",
        claim=f"{share:.0%} of the right answers of {env.name} are longer than generator.max_new_tokens allows: nobody "
        "can give them",
        evidence=(f"the longest has {longest} characters, and {most} fit ({path_of(env)})",),
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


def files_of(snapshot: Snapshot) -> list[tuple[EnvironmentConfig, RecordFacts]]:
    """Environments that ask from a file, with its facts."""
    sections = () if snapshot.config is None else snapshot.config.environments
    return [(each, snapshot.records[each.name]) for each in sections if each.name in snapshot.records]


def _worst(
    snapshot: Snapshot, count: Callable[[RecordFacts], int], least: float = VISIBLE
) -> tuple[EnvironmentConfig, RecordFacts, float] | None:
    """The environment with the largest share of such records; None where it is below `least`."""
    found = [(env, facts, count(facts) / facts.num_records) for env, facts in files_of(snapshot) if count(facts)]
    env, facts, share = max(found, key=lambda each: each[2], default=(None, None, 0.0))
    return None if env is None or facts is None or share < least else (env, facts, share)


def path_of(env: EnvironmentConfig) -> str:
    """The file that an environment asks from."""
    return str(env.params.get("path") or env.dataset)
