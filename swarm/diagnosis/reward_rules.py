"""Rules about own groups: the records they ask from, their answers, and the rewards without which nothing is learned.

Invariant: answers and right answers are only compared and counted; nothing of their text is shown.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import variance
from typing import Final

from swarm.config import EnvironmentConfig
from swarm.diagnosis.snapshot import AnsweredGroup, Diagnosed, Gravity, Snapshot, mean, middle, shortened
from swarm.environments.record_facts import RecordFacts
from swarm.events import NODE, GroupAdmitted, GroupPut, GroupUnscored, LoopFailed, events_of
from swarm.telemetry import LoggedWarning
from swarm.telemetry.warning_log import DOUBT, NOTHING_TO_LEARN, UPSIDE_DOWN

MANY_IN_VAIN: Final = 100  # own groups without signal; with one right answer in 100 and 8 tries a group: 1 in 3,000
MINUTE_IN_VAIN: Final = 48  # the same after MINUTE_S without a step; with one right answer in 100: 1 in 50
SOME_IN_VAIN: Final = 16  # the same, once the time without a step is up, or where every answer is cut off
MINUTE_S: Final = 60.0
FEW_UNSCORED: Final = 4
UNSCORED_SHARE: Final = 0.1  # from which on it is more than a slip
FEW_GROUPS: Final = 8  # fewer say nothing
FEW_ANSWERS: Final = 8
FEW_LENGTHS: Final = 4
FEW_APART: Final = 3
FEW_UNPAID: Final = 4
COMPARED: Final = 16  # answers of each kind from which their rewards can be compared
MANY_PAID: Final = 64  # answers with the full reward
MANY_PUT: Final = 40  # groups of all environments from which their shares can be compared
SOME_STEPS: Final = 15  # from which on a slope can be told from chance
FEW_QUESTIONS: Final = 20  # are learned by heart within minutes
CUT_SHARE: Final = 0.5  # of answers that end at the longest length
VISIBLE: Final = 0.05  # of records, from which on a fault is more than a slip
MOST: Final = 0.9
UNPAID: Final = 0.5  # a right answer is worth more
UNPAID_SHARE: Final = 0.15
NEARLY_SHARE: Final = 0.1  # of a small model's sentences few hold the right number
SMALL_SPREAD: Final = 0.05  # of rewards, whose range is 1
WELL_PAID: Final = 0.3
SIGMAS: Final = 3.0
NOISE_NATS: Final = 2.5  # 12 equally likely tokens; language models have .2 to 1.5
SLOW_SHARE: Final = 0.5  # of the time that scoring takes
LEAST_SCORING_S: Final = 20.0  # the first process takes some of them to start
SLOW_GROUP_S: Final = 0.3  # the tiny models generate faster than any reward is asked
DOUBT_S: Final = 300.0  # from a doubt of a training to its start
_EDGE: Final = 1e-6


# --- signal: groups whose rewards differ ------------------------------------------------------------------


def gave_up(snapshot: Snapshot) -> bool:
    """True where the node ended itself, as its groups had no signal."""
    ends = [event.error for event in events_of(LoopFailed, snapshot.events) if event.loop == NODE]
    return not snapshot.runs and bool(ends) and NOTHING_TO_LEARN in ends[-1]


def _num_equal(snapshot: Snapshot) -> tuple[int, list[float]]:
    """Newest scored own groups in a row that gave the learner nothing, and their mean rewards."""
    if snapshot.num_in_vain and snapshot.own[0]:
        num_put = snapshot.own[0]
        return num_put, [put.reward_mean for put in snapshot.puts[-num_put:]]
    means: list[float] = []  # without the node's own count: means at an end of the range are of equal rewards
    for put in reversed(snapshot.puts):
        if _EDGE < put.reward_mean < 1 - _EDGE:
            break
        means.append(put.reward_mean)
    return len(means), means[::-1]


def has_no_signal(snapshot: Snapshot) -> bool:
    """True where so many own groups have equal rewards that it is no chance."""
    num_equal, _ = _num_equal(snapshot)
    idle_s = snapshot.at_s - snapshot.value("last_step_at_s", snapshot.at_s)
    is_few_enough = idle_s > snapshot.max_idle_s or gave_up(snapshot) or (cut_share(snapshot) or 0.0) > 0.95
    few = SOME_IN_VAIN if is_few_enough else MINUTE_IN_VAIN if idle_s > MINUTE_S else MANY_IN_VAIN
    return num_equal >= few and not snapshot.is_finished


def has_flat_reward(snapshot: Snapshot) -> bool:
    """True where the reward did not rise beyond chance; an honest training may look the same at its begin."""
    rewards = snapshot.course("reward_mean")
    if len(rewards) < SOME_STEPS or mean(rewards[-SOME_STEPS // 2 :]) > MOST:
        return False
    center, level = (len(rewards) - 1) / 2, mean(rewards)
    places = [place - center for place in range(len(rewards))]
    spread = sum(place * place for place in places)
    slope = sum(place * (value - level) for place, value in zip(places, rewards, strict=True)) / spread
    rest = sum((value - level - slope * place) ** 2 for place, value in zip(places, rewards, strict=True))
    return slope <= max(math.sqrt(rest / (len(rewards) - 2) / spread), 1e-9)


def teaches_little(snapshot: Snapshot) -> bool:
    """True where own groups have no signal, or little of it comes of them."""
    return has_no_signal(snapshot) or has_flat_reward(snapshot) or has_small_signal(snapshot)


def cut_share(snapshot: Snapshot) -> float | None:
    """Of the answers of the newest own groups, those that ended at the longest length; None: unknown."""
    flags = [cut for group in snapshot.answers for cut in group.is_cut]
    if flags:
        return mean([float(cut) for cut in flags])
    if snapshot.config is None or not snapshot.puts or any(put.num_turns > 1 for put in snapshot.puts):
        return None
    longest = snapshot.config.generator.max_new_tokens * snapshot.config.generator.group_size
    return mean([float(put.num_tokens >= longest) for put in snapshot.puts])


def _waits(snapshot: Snapshot) -> str:
    return f"waits for own groups: {_num_equal(snapshot)[0]} generated, 0 with differing rewards"


def cut_off(snapshot: Snapshot) -> Diagnosed | None:
    """Answers that reach the longest length before the model ends them, and are worth less for it."""
    share = cut_share(snapshot)
    if share is None or share < CUT_SHARE or snapshot.config is None:
        return None
    pairs = [pair for group in snapshot.answers for pair in zip(group.rewards, group.is_cut, strict=True)]
    cut, whole = [reward for reward, is_cut in pairs if is_cut], [reward for reward, is_cut in pairs if not is_cut]
    if cut and mean(cut) > 0.5 and mean(cut) >= mean(whole) - 0.1:
        return None  # cut answers are worth as much: the reward does not need the end
    is_vain = has_no_signal(snapshot) and mean(_num_equal(snapshot)[1]) < 1 - _EDGE
    # one lucky answer that ended in time says nothing of what ending in time is worth
    is_no_loss = len(whole) >= COMPARED and mean(whole) <= mean(cut) + 0.05
    if not is_vain and (len(cut) < 32 or is_no_loss):
        return None
    longest = snapshot.config.generator.max_new_tokens
    worth = f", of those that end {mean(whole):.3g}" if whole else "; none ends by itself"
    return Diagnosed(
        claim=f"answers are cut off at generator.max_new_tokens = {longest} before they are finished",
        fix=snapshot.set_key("generator.max_new_tokens", 4 * longest, why=" (the same on every node of the run)")
        + "; or ask for a shorter answer in the prompt",
        evidence=(
            f"{share:.0%} of the answers of the newest {len(snapshot.answers)} own groups end at {longest} tokens "
            "without an end of their own (groups.sqlite)",
            *([f"mean reward of those cut off {mean(cut):.3g}{worth}"] if cut else []),
            *([_waits(snapshot)] if is_vain else []),
        ),
        key="generator.max_new_tokens",
        gravity=Gravity.STOPS if is_vain else Gravity.HARMS,
    )


def episodes_cut_off(snapshot: Snapshot) -> Diagnosed | None:
    """Episodes that end where another turn has no room, with nothing won by then."""
    config = snapshot.config
    if config is None or not has_no_signal(snapshot) or mean(_num_equal(snapshot)[1]) >= 1 - _EDGE:
        return None
    room = [each for group in snapshot.answers for each in group.has_room]
    most, action = config.generator.max_episode_tokens, config.generator.max_new_tokens
    is_full = len(room) >= COMPARED and room.count(False) >= CUT_SHARE * len(room)
    is_short = most < 2 * action and any(each.may_have_turns for each in config.environments)
    if not is_full and not is_short:
        return None
    return Diagnosed(
        claim=f"episodes end at generator.max_episode_tokens = {most}, before they are over",
        fix=snapshot.set_key(
            "generator.max_episode_tokens", max(4 * most, 2048), why=" (the same on every node of the run)"
        ),
        evidence=(
            f"{room.count(False)} of the newest {len(room)} episodes had no room for another turn of "
            f"generator.max_new_tokens = {action} (groups.sqlite)",
            _waits(snapshot),
        ),
        key="generator.max_episode_tokens",
    )


def equal_rewards(snapshot: Snapshot) -> Diagnosed | None:
    """Equal rewards of all answers to a question: all wrong, all right, or a reward that tells nothing apart."""
    if not has_no_signal(snapshot):
        return None
    num_equal, means = _num_equal(snapshot)
    level, is_stopped = mean(means), bool(snapshot.num_in_vain) or not snapshot.made
    by_env: dict[str, list[float]] = defaultdict(list)
    for put in snapshot.puts[-num_equal:]:
        by_env[put.env].append(put.reward_mean)
    shown = ", ".join(f"{env} {mean(each):.3g} ({len(each)} groups)" for env, each in sorted(by_env.items())[:5])
    look = f"look at answers: swarm samples {snapshot.directory}"
    check = f"{_check(snapshot)} shows what the right answers (references) are worth"
    if means and level >= 1 - _EDGE:
        name, claim = "all_right", "every answer gets the full reward, so nothing is left to learn from these tasks"
        fix = (
            f"{look}. Where they are right: harder tasks ([[environments]] params or another dataset), or a reward "
            f"that tells good from better. Where they are wrong, the reward pays for the wrong thing: {check}"
        )
    elif not means or level <= _EDGE:
        name = "all_wrong"
        claim = "no answer gets any reward, so no answer is better than another: nothing to learn from"
        fix = (
            f"{look}. Then easier tasks, or a model that can do some of them (model.source), a reward that grades "
            "(part of the way is worth something), a prompt that shows the form of the answer, or more tries "
            f"(generator.group_size){_of_prompt(snapshot)}"
        )
        if snapshot.config is not None and all(each.kind == "function" for each in snapshot.config.environments):
            fix = (
                f"{check}; worth 0, the reward itself fails: it runs confined, without network and without files but "
                f"its own, and an error that it catches looks like a wrong answer. Else {fix}"
            )
    elif max(means) - min(means) < _EDGE:
        name, claim = (
            "all_equal",
            f"every answer gets the same reward, {level:.3g}: the reward does not tell them apart",
        )
        fix = f"{look}, with their rewards; then correct the reward"
    else:
        name, claim = "all_equal", "all answers to a question get equal rewards, though questions differ"
        fix = "more tries ([generator] group_size) or a higher generator.temperature; a reward that grades"
    right = [flag for group in snapshot.answers for flag in group.is_right]
    return Diagnosed(
        name=name,
        claim=f"{claim} ({_waits(snapshot)})" if is_stopped else claim,
        fix=fix,
        evidence=(
            f"{_waits(snapshot)} (status.json)" if is_stopped else f"{num_equal} own groups in a row",
            f"mean rewards by environment: {shown} (put in events.jsonl)",
            *([f"{sum(right)} of {len(right)} answers are the right one of the file"] if right else []),
        ),
        gravity=Gravity.STOPS if is_stopped else Gravity.WASTES if name == "all_right" else Gravity.HARMS,
    )


def _of_prompt(snapshot: Snapshot) -> str:
    """Words around the question, which may have a form that the model does not know."""
    environments = () if snapshot.config is None else snapshot.config.environments
    shaped = [
        f"environments.{key} of {each.name} = {shortened(getattr(each, key))[:60]}"
        for each in environments
        for key, usual in (("prefill", ""), ("system", ""), ("prompt", "{question}"))
        if getattr(each, key) != usual
    ]
    return f". Of what is not the default, this bears on it: {', '.join(shaped[:3])}" if shaped else ""


def _check(snapshot: Snapshot) -> str:
    return f"swarm check --config {snapshot.directory / 'node.toml'}"


def has_small_signal(snapshot: Snapshot) -> bool:
    """True where nine of ten own groups have equal rewards."""
    draws = snapshot.draws[-20:]
    num_equal = sum(draw.num_zero_variance for draw in draws)
    num_used = sum(use.origin == "local" for draw in draws for use in draw.groups)
    return len(draws) >= 10 and num_equal >= max(50, MOST * (num_equal + num_used))


# --- scoring ----------------------------------------------------------------------------------------------

_UNSCORED: Final = (  # words of an error, what they mean, and the fix; {dir} is the node's directory
    (
        "MemoryError",
        "scoring runs out of memory",
        "a reward that keeps its results (a list, a cache without a bound) takes more with every answer: keep nothing "
        "there; or, where one answer needs so much, more sandbox.memory_bytes in {dir}/node.toml",
    ),
    (
        "the verifier raised",
        "the reward function fails on answers of the model",
        "correct the place that the error names: a reward must give a number for every text, also for an empty or "
        "broken answer (it runs confined: no network, no other files)",
    ),
    ("timeout_s", "scoring takes too long", "a faster reward, or more sandbox.timeout_s (seconds, for one group)"),
    ("answer_cpu_s", "scoring takes too long", "a faster reward, or more sandbox.timeout_s (seconds, for one group)"),
    (
        "scoring process",
        "the process that scores answers dies",
        "it needs more memory than sandbox.memory_bytes, or its code ends the process: try it outside",
    ),
    ("engine", "the generation engine ends answers before they are done", "read the engine's log; docs/engines.md"),
    (
        "not the episode that its actions make",
        "an environment does not play the same episode twice",
        "make its transitions depend on the task and the actions alone: swarm check --config {dir}/node.toml",
    ),
    ("", "answers cannot be scored", "correct what the error names; swarm samples {dir} shows questions and answers"),
)


def cannot_be_scored(snapshot: Snapshot) -> Diagnosed | None:
    """A reward that raises or takes too long, a verifier that dies, or an engine without answers."""
    unscored = [event for event in snapshot.attempts if isinstance(event, GroupUnscored)]
    num_put, _, count, error = snapshot.own
    total = num_put + count
    if snapshot.attempts:
        count, total = len(unscored), len(snapshot.attempts)
    if count < FEW_UNSCORED or count < UNSCORED_SHARE * total:
        return None
    error = unscored[-1].error if unscored else error
    claim, fix = next((claim, fix) for words, claim, fix in _UNSCORED if words in error)
    kinds = Counter(shortened(re.sub(r"task \d+", "task N", event.error))[:120] for event in unscored)
    return Diagnosed(
        claim=f"{claim}: {count} of the newest {total} own groups were dropped without a reward"
        + (f", the newest for: {shortened(error)}" if error else ""),
        fix=f"{fix.format(dir=snapshot.directory)}; then {snapshot.start}",
        evidence=(
            "errors of groups: unscored in events.jsonl",
            *(f"{number} x {kind}" for kind, number in kinds.most_common(3)),
        ),
        gravity=Gravity.STOPS if count > 0.95 * total else Gravity.HARMS,
    )


def scoring_is_slow(snapshot: Snapshot) -> Diagnosed | None:
    """Scoring of own answers that takes most of the time, one group after the other."""
    scoring_s, up_s = snapshot.value("scoring_s", 0.0), snapshot.at_s - snapshot.value("started_at_s", snapshot.at_s)
    num_put = snapshot.value("num_put", 0)
    if scoring_s < max(LEAST_SCORING_S, SLOW_SHARE * up_s, SLOW_GROUP_S * num_put) or num_put < FEW_UNSCORED:
        return None
    return Diagnosed(
        claim=f"answers wait for their scoring: the reward takes {scoring_s / num_put:.2g} s for a group",
        fix="a faster reward: no sleep, no process or model that is loaded for each answer, no pattern that "
        f"backtracks; swarm doctor --config {snapshot.directory / 'node.toml'} measures it",
        evidence=(f"scoring_s {scoring_s:.0f} of {up_s:.0f} s since the start, num_put {num_put} (status.json)",),
        key="environments.dataset",
    )


# --- records of a file ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordFault:
    """A rule about the file of questions: it finds the environment with the largest share of such records."""

    count: Callable[[RecordFacts, EnvironmentConfig, Snapshot], int]  # of the records that have the fault
    least: float = VISIBLE  # share of all records
    claim: str  # with {count}, {total}, {share}, {env} and {questions}, different ones
    fix: str  # with {path}
    key: str = "environments.dataset"

    def __call__(self, snapshot: Snapshot) -> Diagnosed | None:
        """The finding about these records; None where they are few."""
        sections = () if snapshot.config is None else snapshot.config.environments
        files = [(env, snapshot.records[env.name]) for env in sections if env.name in snapshot.records]
        counted = [(self.count(facts, env, snapshot), facts, env) for env, facts in files if facts.num_records]
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
            key=self.key,
        )


def _asks_few_often(facts: RecordFacts) -> bool:
    return facts.num_questions <= FEW_QUESTIONS and facts.num_records >= 4 * facts.num_questions


records_contradict: Final = RecordFault(
    count=lambda facts, *_: facts.num_contradicting,
    claim="records contradict each other: {share} of those of {env} ask a question that has different right answers "
    "elsewhere in the file, so that no answer is right",
    fix="keep one right answer for each question in {path}, or put into the question what tells them apart; then begin "
    "again in a new directory",
)
records_broken: Final = RecordFault(
    count=lambda facts, *_: facts.num_broken,
    least=0.0,
    claim="the file of questions of {env} is damaged, or was changed since the start: {count} lines are no record",
    fix="put back {path} as it was, a JSON object in each line",
)
answers_no_text: Final = RecordFault(
    count=lambda facts, env, _: facts.num_null + (facts.num_no_text if env.kind == "jsonl" else 0),
    claim="{count} of {total} right answers of {env} are no text but null, true, false, a list or a table: only an "
    "answer that spells that is right",
    fix="right answers as plain text in {path}, as the model is to write them",
)
records_repeat: Final = RecordFault(
    count=lambda facts, *_: facts.num_records if _asks_few_often(facts) else 0,
    claim="the same few questions are there again and again: {total} records of {env} ask {questions} different ones, "
    "which are soon known by heart",
    fix="more different questions in {path}; the same one twice adds nothing",
)
one_right_answer: Final = RecordFault(
    count=lambda facts, *_: facts.commonest if facts.num_questions >= FEW_QUESTIONS else 0,
    least=MOST,
    claim="{share} of the questions of {env} have the same right answer, which is right without reading them",
    fix="records with different answers in {path}, about as many of each; params.answer names their field",
)
# --- rewards ----------------------------------------------------------------------------------------------


def _noted(snapshot: Snapshot, message: str) -> LoggedWarning | None:
    """The note under this message from before the present or last process started."""
    started_at_s = snapshot.value("started_at_s", snapshot.now_s)
    ended_at_s = max(
        (each.at_s for each in snapshot.events if each.at_s < started_at_s), default=0.0
    )  # of the one before
    since = max(started_at_s - DOUBT_S, ended_at_s)
    return next((each for each in reversed(snapshot.warnings) if each.message == message and each.at_s >= since), None)


def reward_is_upside_down(snapshot: Snapshot) -> Diagnosed | None:
    """A right answer that was worth less than an empty one before the start."""
    noted = _noted(snapshot, UPSIDE_DOWN)
    if noted is None:
        return None
    environments = () if snapshot.config is None else snapshot.config.environments
    fix = "where it measures how wrong an answer is, return 1 minus that"
    if any(environment.reward_weights for environment in environments):
        # .01 of shortness beside .99 of rightness: the tiny model learned to say nothing
        fix = (
            "under [[environments]] set the weight to 0 of each reward that wrong answers get, too, however small it "
            "is; the function can pay that to right answers alone. Then a new directory, or a checkpoint of before"
        )
    rewards = snapshot.course("reward_mean")
    course = f"mean reward {rewards[0]:.2f} at first, {rewards[-1]:.2f} now" if rewards else "no step yet"
    return Diagnosed(
        claim=f"the reward pays less for a right answer than for an empty one: {shortened(noted.fields)}",
        fix=f"{fix}; {_check(snapshot)} shows what right answers are worth",
        evidence=("noted before the start (warnings.jsonl)", course),
        key="environments.dataset",
    )


def reference_worth_nothing(snapshot: Snapshot) -> Diagnosed | None:
    """Right answers that were worth nothing before the start, where little is learned since."""
    noted = _noted(snapshot, DOUBT)
    if noted is None or not (teaches_little(snapshot) or reward_ignores_question(snapshot)):
        return None
    return Diagnosed(
        claim=f"right answers are worth no more than none, or are too long: {shortened(noted.fields)}",
        fix="a reward that knows a right answer by its reference (params.answer of the data names the field), and a "
        f"generator.max_new_tokens that has room for it: {_check(snapshot)}",
        key="environments.dataset",
    )


def reward_is_random(snapshot: Snapshot) -> Diagnosed | None:
    """Equal answers to one question with different rewards."""
    rewards: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for group in snapshot.answers:
        for text, reward in zip(group.texts, group.rewards, strict=False):
            rewards[group.env, group.task_id, text].append(reward)
    twice = [each for each in rewards.values() if len(each) > 1]
    num_apart = sum(max(each) - min(each) > _EDGE for each in twice)
    if num_apart < FEW_APART or num_apart < len(twice) / 4:
        return None
    return Diagnosed(
        claim="the reward is not of the answer alone: equal answers to one question get different rewards",
        fix="a reward that looks at question, answer and reference alone: no chance, clock, counter or other answers; "
        f"swarm samples {snapshot.directory} shows answers with their rewards",
        evidence=(f"{num_apart} of {len(twice)} answers that were given more than once (groups.sqlite)",),
    )


def reward_is_of_length(snapshot: Snapshot) -> Diagnosed | None:
    """Answers of one length that are worth the same, whatever was asked."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for group in snapshot.answers:
        for length, reward in zip(group.num_tokens, group.rewards, strict=True):
            rewards[length].append(reward)
    often = [each for each in rewards.values() if len(each) >= FEW_GROUPS]
    share = _between(often)
    if len(often) < FEW_LENGTHS or share < MOST or len({round(mean(each), 2) for each in often}) < FEW_LENGTHS:
        return None
    return Diagnosed(
        claim=f"the reward looks at the length of an answer{' alone' if share > 1 - _EDGE else ''}: equal lengths are "
        "worth the same, whatever is asked and answered",
        fix=f"a reward that looks at the text: swarm samples {snapshot.directory} shows answers with their rewards",
        evidence=(
            f"{len(often)} lengths of {sum(map(len, often))} answers (groups.sqlite): {share:.0%} of the differences "
            "between rewards are those between lengths",
        ),
    )


def _between(parts: Sequence[Sequence[float]]) -> float:
    """Share of the variance that lies between parts; 0 of equal values."""
    level = mean([value for part in parts for value in part])
    whole = sum((value - level) ** 2 for part in parts for value in part)
    return sum(len(part) * (mean(part) - level) ** 2 for part in parts) / whole if whole > _EDGE else 0.0


def reward_ignores_question(snapshot: Snapshot) -> Diagnosed | None:
    """Texts that are well paid whatever was asked, and always the same."""
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
    right = [flag for group in snapshot.answers for flag in group.is_right]
    wrong = f"; of {len(right)} answers {sum(right)} are right, and what is paid for is wrong"
    return Diagnosed(
        claim=f"the reward pays for a text whatever is asked: the same answer to {max(map(len, often))} different "
        f"questions is worth {max(paid):.2g} each time"
        + (wrong if right and sum(right) < VISIBLE * len(right) else ""),
        fix="a reward that compares the answer with the reference of its question: "
        f"swarm samples {snapshot.directory} shows answers with their rewards",
        evidence=(f"{len(often)} texts were given to {FEW_GROUPS} questions or more (groups.sqlite)",),
    )


def rewards_hardly_differ(snapshot: Snapshot) -> Diagnosed | None:
    """Rewards that fill a small part of their range, so that noise of the rest outweighs them."""
    rewards = [reward for each in snapshot.answers for reward in each.rewards]
    if len(snapshot.answers) < FEW_GROUPS or not 0 < max(rewards) - min(rewards) < SMALL_SPREAD:
        return None
    return Diagnosed(
        claim=f"rewards of all answers lie between {min(rewards):.3g} and {max(rewards):.3g}: a good answer is hardly "
        "worth more than a bad one",
        fix="reward_range under [[environments]] as what the function returns, or a reward that tells answers apart",
        evidence=(f"{len(rewards)} answers of the newest {len(snapshot.answers)} own groups (groups.sqlite)",),
        key="environments.reward_range",
    )


def rewards_add_up_to_nothing(snapshot: Snapshot) -> Diagnosed | None:
    """Named rewards that differ from group to group, while the worth of an episode does not."""
    parts: dict[str, list[float]] = defaultdict(list)
    for put in snapshot.puts:
        for name, value in put.reward_parts.items():
            parts[name].append(value)
    moving = [name for name, course in parts.items() if max(course) - min(course) > 0.05]
    if not moving or not has_no_signal(snapshot):
        return None
    return Diagnosed(
        claim=f"named rewards differ ({', '.join(sorted(moving)[:4])}), and the worth of answers does not: their "
        "weights add up to nothing, or beyond 1",
        fix="reward_weights under [[environments]]: the weighted sum is clipped to [0, 1], and has to lie inside",
        key="environments.reward_weights",
    )


# --- answers compared with the right ones of the file -----------------------------------------------------


def _worth(snapshot: Snapshot, kind: Callable[[AnsweredGroup], tuple[bool, ...]]) -> tuple[list[float], list[float]]:
    """Rewards of answers of a kind, and of the others whose kind is known."""
    pairs = [pair for group in snapshot.answers for pair in zip(group.rewards, kind(group), strict=False)]
    return [reward for reward, flag in pairs if flag], [reward for reward, flag in pairs if not flag]


def right_answers_unpaid(snapshot: Snapshot) -> Diagnosed | None:
    """Right answers that are worth little, or less than others."""
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
        f"to be turned round. swarm samples {snapshot.directory} shows both; "
        f"{_check(snapshot)} shows what right answers are worth",
        evidence=(
            f"{len(right)} answers of the newest own groups are the right one (groups.sqlite, and the file of "
            f"questions): mean reward {mean(right):.2g}, of the {len(others)} others {mean(others):.2g}",
        ),
        key="environments.dataset",
    )


def _sigmas(one: list[float], other: list[float]) -> float:
    """Distance of the mean of one above that of the other, in standard deviations of the difference."""
    noise = math.sqrt(variance(one) / len(one) + variance(other) / len(other))
    return (mean(one) - mean(other)) / max(noise, 1e-9)


def answers_are_shifted(snapshot: Snapshot) -> Diagnosed | None:
    """Answers that are right for the record before or after theirs."""
    right = [flag for group in snapshot.answers for flag in group.is_right]
    beside = [flag for group in snapshot.answers for flag in group.is_of_neighbour]
    if sum(beside) < COMPARED or sum(beside) < 4 * sum(right):
        return None
    return Diagnosed(
        claim="right answers stand in the wrong records: most answers are right for the record before or after their "
        "own",
        fix="the column of answers is moved by a line: correct the file, and begin again in a new directory",
        evidence=(
            f"of {len(beside)} answers {sum(right)} are right, {sum(beside)} would be in the record beside "
            "(groups.sqlite, and the file of questions)",
        ),
        key="environments.dataset",
    )


def right_but_for_the_form(snapshot: Snapshot) -> Diagnosed | None:
    """Answers that hold the right one, and are worth nothing for their form alone."""
    right = sum(flag for group in snapshot.answers for flag in group.is_right)
    nearly, others = _worth(snapshot, lambda each: each.is_nearly_right)
    if len(nearly) < FEW_ANSWERS or len(nearly) < NEARLY_SHARE * (len(nearly) + len(others)) or mean(nearly) > VISIBLE:
        return None
    if right > len(nearly) / 4 or not teaches_little(snapshot):  # the form is within reach
        return None
    return Diagnosed(
        claim="answers are right but for their form, and worth nothing: case, punctuation, or words around the answer",
        fix="a reward that takes the answer out of the text, or a prompt that shows the form that it wants"
        + _of_prompt(snapshot),
        evidence=(
            f"{len(nearly)} of {len(nearly) + len(others)} answers have the right one in them, {right} are equal to it "
            "(groups.sqlite, and the file of questions)",
        ),
        key="environments.dataset",
    )


def right_answers_hold_more(snapshot: Snapshot) -> Diagnosed | None:
    """Right answers that are whole solutions, where the result alone is answered and worth nothing."""
    ends, _ = _worth(snapshot, lambda each: each.is_end_of_right)
    right, others = _worth(snapshot, lambda each: each.is_right)
    marked = {name for name, facts in snapshot.records.items() if facts.num_marked >= MOST * facts.num_records}
    sections = () if snapshot.config is None else snapshot.config.environments
    is_seen = len(ends) >= FEW_ANSWERS and mean(ends) <= VISIBLE and len(right) <= len(ends) / 4
    is_exact = any(env.kind == "jsonl" and env.name in marked for env in sections)
    if not (is_seen or (is_exact and len(others) >= COMPARED and not right)) or not teaches_little(snapshot):
        return None
    return Diagnosed(
        claim="right answers are whole solutions, or have words before the result, and only an answer that repeats all "
        "of that is right",
        fix="the result alone as the right answer of each record, or a --reward that takes it out of both",
        evidence=(
            f"{len(ends)} answers are the last word of the right one, {len(right)} of {len(right) + len(others)} are "
            "equal to it (groups.sqlite, and the file of questions)",
        ),
        key="environments.dataset",
    )


def paid_though_wrong(snapshot: Snapshot) -> Diagnosed | None:
    """Answers with the full reward that neither are nor hold the right one: usual where several answers are right."""
    known = [
        (reward, any(flags))
        for group in snapshot.answers
        for reward, *flags in zip(
            group.rewards, group.is_right, group.is_nearly_right, group.is_end_of_right, strict=False
        )
    ]
    best = max((reward for reward, _ in known), default=0.0)
    paid = [is_kin for reward, is_kin in known if reward >= best - _EDGE]
    if best < UNPAID or len(paid) < MANY_PAID or sum(paid) > (1 - MOST) * len(paid):
        return None
    return Diagnosed(
        claim=f"{len(paid) - sum(paid)} of {len(paid)} answers with the full reward are not the right one, nor have it "
        "in them: the reward asks for less than that",
        fix=f"read some, and what they are worth: swarm samples {snapshot.directory}; a reward that compares with the "
        "reference, unless other answers are as right",
        evidence=(f"{len(known)} answers of the newest own groups (groups.sqlite, and the file of questions)",),
        key="environments.dataset",
        gravity=Gravity.HARMS if teaches_little(snapshot) else Gravity.NOTE,
    )


# --- questions and answers --------------------------------------------------------------------------------


def one_question(snapshot: Snapshot) -> Diagnosed | None:
    """Different tasks with one and the same prompt."""
    for env in {each.env for each in snapshot.answers}:
        groups = [each for each in snapshot.answers if each.env == env]
        num_tasks = len({each.task_id for each in groups})
        if num_tasks >= FEW_GROUPS and len({each.prompt for each in groups}) == 1:
            return Diagnosed(
                claim=f"every task of {env} is the same question",
                fix=f"a data file whose records differ, and a prompt with their differences in it: "
                f"swarm samples {snapshot.directory} shows it; then {snapshot.start}",
                evidence=(f"{num_tasks} different tasks, 1 prompt (groups.sqlite)",),
                key="environments.dataset",
            )
    return None


def draws_noise(snapshot: Snapshot) -> bool:
    """True where each token is drawn of very many equally likely ones, as at a high temperature."""
    found = [each.nats for each in snapshot.answers if math.isfinite(each.nats)]
    return len(found) >= FEW_GROUPS and middle(found) >= NOISE_NATS


def model_knows_nothing(snapshot: Snapshot) -> Diagnosed | None:
    """Answers that are noise and earn nothing."""
    if not draws_noise(snapshot) or not has_no_signal(snapshot):
        return None
    return Diagnosed(
        claim="answers are nearly random: the temperature is too high, or the model does not know such questions",
        fix=f"look at them: swarm samples {snapshot.directory}. generator.temperature near 1; weights that were loaded "
        "to the end, the tokenizer and chat template that belong to them, and a prompt in a form that the model knows",
        evidence=(
            f"{middle([each.nats for each in snapshot.answers]):.2g} nats a token in the newest "
            f"{len(snapshot.answers)} own groups (groups.sqlite)",
        ),
    )


def one_answer(snapshot: Snapshot) -> Diagnosed | None:
    """One and the same answer to every question."""
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
        fix=f"look at it: swarm samples {snapshot.directory}. A reward that pays for one answer, whatever is asked, "
        "has to be corrected; then begin again from a checkpoint before",
        evidence=(f"{share:.0%} of {texts.total()} answers to {len(groups)} questions are equal (groups.sqlite)",),
    )


def environment_in_vain(snapshot: Snapshot) -> Diagnosed | None:
    """One environment of several that gives the learner nothing."""
    by_env: dict[str, list[GroupPut]] = defaultdict(list)
    for put in snapshot.puts:
        by_env[put.env].append(put)
    vain = {
        env: puts
        for env, puts in by_env.items()
        if len(puts) >= 2 * FEW_GROUPS and all(not _EDGE < put.reward_mean < 1 - _EDGE for put in puts)
    }
    if not 0 < len(vain) < len(by_env):
        return None
    env, puts = max(vain.items(), key=lambda each: len(each[1]))
    level = mean([put.reward_mean for put in puts])
    how = "all are wrong" if level < _EDGE else "all are right" if level > 1 - _EDGE else "of each question all or none"
    return Diagnosed(
        claim=f"environment {env} gives the learner nothing: of its answers {how}",
        fix=f"other tasks or another prompt or reward for {env}, or a small weight under [generator.env_weights]",
        evidence=(
            f"{len(puts)} of {len(snapshot.puts)} own groups, none with differing rewards (put in events.jsonl)",
        ),
    )


def environment_not_asked(snapshot: Snapshot) -> Diagnosed | None:
    """An environment of the configuration of which next to no task is asked."""
    config = snapshot.config
    if config is None or len(config.environments) < 2 or len(snapshot.attempts) < MANY_PUT:
        return None
    counts = {each.name: sum(put.env == each.name for put in snapshot.attempts) for each in config.environments}
    env, count = min(counts.items(), key=lambda each: each[1])
    is_of_others = any(event.env == env for event in events_of(GroupAdmitted, snapshot.events))
    if count > 0.01 * len(snapshot.attempts) or is_of_others:
        return None
    return Diagnosed(
        claim=f"environment {env} is hardly ever asked: generator.env_weights leaves it {count} of "
        f"{len(snapshot.attempts)} groups",
        fix=f"under [generator.env_weights] set {env} nearer to the others",
        evidence=(f"generator.env_weights = {config.generator.env_weights} (node.toml); put in events.jsonl",),
        key="generator.env_weights",
    )
