"""Rules about the file of questions: records that contradict each other, repeat, or have no usable answer.

Invariant: records are only counted; nothing of their text is shown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from swarm.config import EnvironmentConfig
from swarm.diagnosis.snapshot import FEW_GROUPS, MOST, VISIBLE, Diagnosed, Snapshot
from swarm.environments.record_facts import RecordFacts

FEW_QUESTIONS: Final = 20  # are learned by heart within minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordFault:
    """A rule about the file of questions: it reports the environment with the largest share of faulty records."""

    count: Callable[[RecordFacts, EnvironmentConfig], int]  # of the records that have the fault
    least: float = VISIBLE  # share of all records
    claim: str  # with {count}, {total}, {share}, {env} and {questions}, different ones
    fix: str  # with {path}

    def __call__(self, snapshot: Snapshot) -> Diagnosed | None:
        """Applies the rule: the finding about the worst environment; None if its share is below `least`."""
        files = [(env, snapshot.records[env.name]) for env in snapshot.environments if env.name in snapshot.records]
        counted = [(self.count(facts, env), facts, env) for env, facts in files if facts.num_records]
        worst = max(counted, key=lambda each: each[0] / each[1].num_records, default=None)
        if worst is None or not worst[0] or worst[0] < self.least * worst[1].num_records:
            return None
        count, facts, env = worst
        path = str(env.params.get("path") or env.dataset)
        words = {"count": count, "total": facts.num_records, "share": f"{count / facts.num_records:.0%}"}
        first = facts.first_contradiction
        shown = f"; records {first[0]} and {first[1]} first, counted from 0" if first[0] >= 0 else ""
        return Diagnosed(
            claim=self.claim.format(env=env.name, questions=facts.num_questions, **words),
            fix=self.fix.format(path=path),
            evidence=(f"{count} of {facts.num_records} records ({path}){shown}",),
            key="environments.dataset",
        )


def _asks_few_often(facts: RecordFacts) -> bool:
    return facts.num_questions <= FEW_QUESTIONS and facts.num_records >= 4 * facts.num_questions


records_contradict: Final = RecordFault(
    count=lambda facts, _: facts.num_contradicting,
    claim="records contradict each other: {share} of those of {env} ask a question that has different right answers "
    "elsewhere in the file, so that no answer is right",
    fix="keep one right answer for each question in {path}, or put into the question what tells them apart; then begin "
    "again in a new directory",
)


records_broken: Final = RecordFault(
    count=lambda facts, _: facts.num_broken,
    least=0.0,
    claim="the file of questions of {env} is damaged, or was changed since the start: {count} lines are no record",
    fix="put back {path} as it was, a JSON object in each line",
)


answers_no_text: Final = RecordFault(
    count=lambda facts, env: facts.num_null + (facts.num_no_text if env.kind == "jsonl" else 0),
    claim="{count} of {total} right answers of {env} are no text but null, true, false, a list or a table: only an "
    "answer that spells that is right",
    fix="right answers as plain text in {path}, as the model is to write them",
)


records_repeat: Final = RecordFault(
    count=lambda facts, _: facts.num_records if _asks_few_often(facts) else 0,
    claim="the same few questions are there again and again: {total} records of {env} ask {questions} different ones, "
    "which are soon known by heart",
    fix="more different questions in {path}; the same one twice adds nothing",
)


one_right_answer: Final = RecordFault(
    count=lambda facts, _: facts.commonest if facts.num_questions >= FEW_QUESTIONS else 0,
    least=MOST,
    claim="{share} of the questions of {env} have the same right answer, which is right without reading them",
    fix="records with different answers in {path}, about as many of each; params.answer names their field",
)


def one_question(snapshot: Snapshot) -> Diagnosed | None:
    """Finds an environment whose different tasks all have the same prompt."""
    for env in {each.env for each in snapshot.answers}:
        groups = [each for each in snapshot.answers if each.env == env]
        num_tasks = len({each.task_id for each in groups})
        if num_tasks >= FEW_GROUPS and len({each.prompt for each in groups}) == 1:
            return Diagnosed(
                claim=f"every task of {env} is the same question",
                fix=f"a data file whose records differ, and a prompt with their differences in it: "
                f"{snapshot.look} shows it; then {snapshot.start}",
                evidence=(f"{num_tasks} different tasks, 1 prompt (groups.sqlite)",),
                key="environments.dataset",
            )
    return None
