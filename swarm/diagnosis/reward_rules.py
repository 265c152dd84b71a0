"""Rules about rewards that are blind, random, inverted or nearly constant, and about scoring that fails or is slow.

Invariant: answers are only compared and counted; nothing of their text is shown.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

from swarm.diagnosis.signal_rules import has_no_signal, teaches_little
from swarm.diagnosis.snapshot import EDGE, FEW_GROUPS, MOST, VISIBLE, Diagnosed, Gravity, Snapshot, mean, shortened
from swarm.events import GroupUnscored
from swarm.printable import as_argument
from swarm.telemetry import LoggedWarning
from swarm.telemetry.warning_log import DOUBT, UPSIDE_DOWN

FEW_LENGTHS: Final = 4
FEW_APART: Final = 3
FEW_UNSCORED: Final = 4
UNSCORED_SHARE: Final = 0.1  # from which on it is more than a slip
SMALL_SPREAD: Final = 0.05  # of rewards, whose range is 1
WELL_PAID: Final = 0.3
SLOW_SHARE: Final = 0.5  # of the time that scoring takes
LEAST_SCORING_S: Final = 20.0  # the first process takes some of them to start
SLOW_GROUP_S: Final = 0.3  # the tiny models generate faster than any reward is asked
DOUBT_S: Final = 300.0  # from a doubt of a training to its start


def _noted(snapshot: Snapshot, message: str) -> LoggedWarning | None:
    """Newest warning with this message since shortly before the start of the process; None if there is none."""
    started_at_s = snapshot.value("started_at_s", snapshot.now_s)
    ended_at_s = max((each.at_s for each in snapshot.events if each.at_s < started_at_s), default=0.0)  # the one before
    since = max(started_at_s - DOUBT_S, ended_at_s)
    return next((each for each in reversed(snapshot.warnings) if each.message == message and each.at_s >= since), None)


def reward_is_upside_down(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a reward that paid less for a right answer than for an empty one when checked before the start."""
    noted = _noted(snapshot, UPSIDE_DOWN)
    if noted is None:
        return None
    fix = "where it measures how wrong an answer is, return 1 minus that"
    if any(each.reward_weights for each in snapshot.environments):
        # .01 of shortness beside .99 of rightness: the tiny model learned to say nothing
        fix = (
            "under [[environments]] set the weight to 0 of each reward that wrong answers get, too, however small it "
            "is; the function can pay that to right answers alone. Then a new directory, or a checkpoint of before"
        )
    rewards = snapshot.course("reward_mean")
    course = f"mean reward {rewards[0]:.2f} at first, {rewards[-1]:.2f} now" if rewards else "no step yet"
    return Diagnosed(
        claim=f"the reward pays less for a right answer than for an empty one: {shortened(noted.fields)}",
        fix=f"{fix}; {snapshot.check} shows what right answers are worth",
        evidence=("noted before the start (warnings.jsonl)", course),
        key="environments.dataset",
    )


def reference_worth_nothing(snapshot: Snapshot) -> Diagnosed | None:
    """Finds right answers that were worth nothing when checked before the start, if little has been learned since."""
    noted = _noted(snapshot, DOUBT)
    if noted is None or not (teaches_little(snapshot) or reward_ignores_question(snapshot)):
        return None
    return Diagnosed(
        claim=f"right answers are worth no more than none, or are too long: {shortened(noted.fields)}",
        fix="a reward that knows a right answer by its reference (params.answer of the data names the field), and a "
        f"generator.max_new_tokens that has room for it: {snapshot.check}",
        key="environments.dataset",
    )


def reward_is_random(snapshot: Snapshot) -> Diagnosed | None:
    """Finds equal answers to one question with different rewards."""
    rewards: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for group in snapshot.answers:
        for text, reward in zip(group.texts, group.rewards, strict=False):
            rewards[group.env, group.task_id, text].append(reward)
    twice = [each for each in rewards.values() if len(each) > 1]
    num_apart = sum(max(each) - min(each) > EDGE for each in twice)
    if num_apart < FEW_APART or num_apart < len(twice) / 4:
        return None
    return Diagnosed(
        claim="the reward is not of the answer alone: equal answers to one question get different rewards",
        fix="a reward that looks at question, answer and reference alone: no chance, clock, counter or other answers; "
        f"{snapshot.look} shows answers with their rewards",
        evidence=(f"{num_apart} of {len(twice)} answers that were given more than once (groups.sqlite)",),
    )


def reward_is_of_length(snapshot: Snapshot) -> Diagnosed | None:
    """Finds rewards that nearly depend on the length of the answer alone."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for group in snapshot.answers:
        for length, reward in zip(group.num_tokens, group.rewards, strict=True):
            rewards[length].append(reward)
    often = [each for each in rewards.values() if len(each) >= FEW_GROUPS]
    share = _between(often)
    if len(often) < FEW_LENGTHS or share < MOST or len({round(mean(each), 2) for each in often}) < FEW_LENGTHS:
        return None
    return Diagnosed(
        claim=f"the reward looks at the length of an answer{' alone' if share > 1 - EDGE else ''}: equal lengths are "
        "worth the same, whatever is asked and answered",
        fix=f"a reward that looks at the text: {snapshot.look} shows answers with their rewards",
        evidence=(
            f"{len(often)} lengths of {sum(map(len, often))} answers (groups.sqlite): {share:.0%} of the differences "
            "between rewards are those between lengths",
        ),
    )


def _between(parts: Sequence[Sequence[float]]) -> float:
    """Share of the variance that lies between parts; 0 if all values are equal."""
    level = mean([value for part in parts for value in part])
    whole = sum((value - level) ** 2 for part in parts for value in part)
    return sum(len(part) * (mean(part) - level) ** 2 for part in parts) / whole if whole > EDGE else 0.0


def reward_ignores_question(snapshot: Snapshot) -> Diagnosed | None:
    """Finds texts that get the same high reward for every question, if no common text gets different rewards."""
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
    num_answers, num_right = len(snapshot.is_right), snapshot.num_right
    wrong = f"; of {num_answers} answers {num_right} are right, and what is paid for is wrong"
    return Diagnosed(
        claim=f"the reward pays for a text whatever is asked: the same answer to {max(map(len, often))} different "
        f"questions is worth {max(paid):.2g} each time"
        + (wrong if num_answers and num_right < VISIBLE * num_answers else ""),
        fix="a reward that compares the answer with the reference of its question: "
        f"{snapshot.look} shows answers with their rewards",
        evidence=(f"{len(often)} texts were given to {FEW_GROUPS} questions or more (groups.sqlite)",),
    )


def rewards_hardly_differ(snapshot: Snapshot) -> Diagnosed | None:
    """Finds rewards that differ, but only by a small part of their range."""
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
    """Finds named rewards that differ from group to group while the total rewards of a group are all equal."""
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
        "make its transitions depend on the task and the actions alone: swarm check {dir}",
    ),
    ("", "answers cannot be scored", "correct what the error names; swarm samples {dir} shows questions and answers"),
)


def cannot_be_scored(snapshot: Snapshot) -> Diagnosed | None:
    """Finds own groups that were dropped without a reward, and names the cause by the newest error."""
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
        fix=f"{fix.format(dir=as_argument(snapshot.directory))}; then {snapshot.start}",
        evidence=(
            "errors of groups: unscored in events.jsonl",
            *(f"{number} x {kind}" for kind, number in kinds.most_common(3)),
        ),
        gravity=Gravity.STOPS if count > 0.95 * total else Gravity.HARMS,
    )


def scoring_is_slow(snapshot: Snapshot) -> Diagnosed | None:
    """Finds scoring of own answers that takes at least half of the time since the start."""
    scoring_s, up_s = snapshot.value("scoring_s", 0.0), snapshot.at_s - snapshot.value("started_at_s", snapshot.at_s)
    num_put = snapshot.value("num_put", 0)
    if scoring_s < max(LEAST_SCORING_S, SLOW_SHARE * up_s, SLOW_GROUP_S * num_put) or num_put < FEW_UNSCORED:
        return None
    return Diagnosed(
        claim=f"answers wait for their scoring: the reward takes {scoring_s / num_put:.2g} s for a group",
        fix="a faster reward: no sleep, no process or model that is loaded for each answer, no pattern that "
        f"backtracks; swarm doctor {as_argument(snapshot.directory)} measures it",
        evidence=(f"scoring_s {scoring_s:.0f} of {up_s:.0f} s since the start, num_put {num_put} (status.json)",),
        key="environments.dataset",
    )
