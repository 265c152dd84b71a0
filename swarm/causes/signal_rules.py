"""Rules about rewards: whether own answers are scored, and whether they differ, without which nothing is learned."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.snapshot import Snapshot, mean, shortened
from swarm.events import NODE, GroupPut, GroupUnscored, LoopFailed, events_of

NOTHING_TO_LEARN: Final = "there is nothing to learn from"  # of the error with which a training gives up
MANY_IN_VAIN: Final = 100  # own groups without signal; with one right answer in 100 and 8 tries a group: 1 in 3,000
SOME_IN_VAIN: Final = 16  # the same, once the time without a step is up, or where every answer is cut off
MINUTE_IN_VAIN: Final = 48  # the same after MINUTE_S without a step; with one right answer in 100: 1 in 50
MINUTE_S: Final = 60.0
FEW_UNSCORED: Final = 4
UNSCORED_SHARE: Final = 0.1  # from which on it is more than a slip
SLOW_SHARE: Final = 0.5  # of the time that scoring takes
LEAST_SCORING_S: Final = 20.0  # the first process takes some of them to start
SLOW_GROUP_S: Final = 0.3  # the tiny models generate faster than any reward is asked
COMPARED: Final = 16  # answers of each kind from which their rewards can be compared
CUT_SHARE: Final = 0.5  # of answers that end at the longest length
NO_SIGNAL: Final = frozenset({"cannot_be_scored", "cut_off", "all_wrong", "all_right", "all_equal"})
_EDGE: Final = 1e-6


def cannot_be_scored(snapshot: Snapshot) -> Diagnosed | None:
    """The reward raises, the verifier dies, or the engine gives no answers."""
    unscored = [event for event in snapshot.attempts if isinstance(event, GroupUnscored)]
    num_put, _, num_unscored, error = snapshot.own
    if not snapshot.attempts:
        share, count, total = (num_unscored / max(1, num_put + num_unscored), num_unscored, num_put + num_unscored)
    else:
        share, count, total = len(unscored) / len(snapshot.attempts), len(unscored), len(snapshot.attempts)
    if count < FEW_UNSCORED or share < UNSCORED_SHARE:
        return None
    errors = Counter(_kind_of(event.error) for event in unscored)
    newest = unscored[-1].error if unscored else error
    envs = ", ".join(f"{env} ({n})" for env, n in Counter(event.env for event in unscored).most_common(3))
    what, fix = _unscored_words(newest, snapshot)
    return Diagnosed(
        name="cannot_be_scored",
        claim=f"{what}: {count} of the newest {total} own groups were dropped without a reward"
        + (f", the newest for: {shortened(newest)}" if newest else ""),
        evidence=(
            "errors of groups: unscored in events.jsonl",
            *([f"environments: {envs}"] if envs else []),
            *(
                [f"kinds of errors: {', '.join(f'{n} x {kind}' for kind, n in errors.most_common(3))}"]
                if errors
                else []
            ),
        ),
        fix=fix,
        gravity=Gravity.STOPS if share > 0.95 else Gravity.HARMS,
        follows_from=frozenset({"disk_full"}),
    )


def scoring_is_slow(snapshot: Snapshot) -> Diagnosed | None:
    """Most of the time goes into the scoring of own answers, one group at a time."""
    scoring_s, up_s = snapshot.value("scoring_s", 0.0), snapshot.at_s - snapshot.value("started_at_s", snapshot.at_s)
    num_put = snapshot.value("num_put", 0)
    if scoring_s < max(LEAST_SCORING_S, SLOW_SHARE * up_s, SLOW_GROUP_S * num_put) or num_put < FEW_UNSCORED:
        return None
    return Diagnosed(
        name="scoring_is_slow",
        claim=f"answers wait for their scoring: the reward takes {scoring_s / num_put:.2g} s for a group",
        evidence=(f"scoring_s {scoring_s:.0f} of {up_s:.0f} s since the start, num_put {num_put} (status.json)",),
        fix="a faster reward: no sleep, no process or model that is loaded for each answer, no pattern that "
        f"backtracks; swarm doctor --config {snapshot.directory / 'node.toml'} measures it",
        gravity=Gravity.WASTES,
        certainty=Certainty.LIKELY,
        key="environments.dataset",
    )


def _kind_of(error: str) -> str:
    """An error without the number of its task."""
    return shortened(re.sub(r"task \d+", "task N", error))[:120]


def _unscored_words(error: str, snapshot: Snapshot) -> tuple[str, str]:
    """What an error of a dropped group means, and the fix."""
    samples = f"swarm samples {snapshot.directory}"
    if "MemoryError" in error:
        return (
            "scoring runs out of memory",
            "a reward that keeps what it made (a list, a cache without a bound) takes more with every answer: keep "
            "nothing there; or, where one answer needs so much, " + snapshot.set_key("sandbox.memory_bytes", 4 * 2**30),
        )
    if "the verifier raised" in error:
        return (
            "the reward function fails on answers of the model",
            "mend the place that the error names: a reward must give a number for every text, also for an empty or "
            f"broken answer (it runs confined: no network, no other files); then {snapshot.start}",
        )
    if "timeout_s" in error or "answer_cpu_s" in error:
        return (
            "scoring takes too long",
            "make the reward faster, or " + snapshot.set_key("sandbox.timeout_s", 30, why=" (seconds, for one group)"),
        )
    if "scoring process" in error:
        return (
            "the process that scores answers dies",
            "it needs more memory than sandbox.memory_bytes, or its code ends the process: try it outside, or "
            + snapshot.set_key("sandbox.memory_bytes", 4 * 2**30),
        )
    if "engine" in error:
        return "the generation engine ends answers before they are done", "read the engine's log; docs/engines.md"
    if "not the episode that its actions make" in error:
        return (
            "an environment does not play the same episode twice",
            f"make its transitions depend on the task and the actions alone: swarm check --config "
            f"{snapshot.directory / 'node.toml'}",
        )
    return "answers cannot be scored", f"mend what the error names; {samples} shows what is asked and answered"


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


def gave_up(snapshot: Snapshot) -> bool:
    """Whether the node ended itself, as its groups had no signal."""
    ends = [event.error for event in events_of(LoopFailed, snapshot.events) if event.loop == NODE]
    return not snapshot.runs and bool(ends) and NOTHING_TO_LEARN in ends[-1]


def _is_vain(snapshot: Snapshot, num_equal: int) -> bool:
    """Whether so many groups without signal are no chance."""
    idle_s = snapshot.at_s - snapshot.value("last_step_at_s", snapshot.at_s)
    has_waited = idle_s > snapshot.max_idle_s
    cut = cut_share(snapshot)
    is_given_up = gave_up(snapshot)
    few = SOME_IN_VAIN if has_waited or is_given_up or (cut is not None and cut > 0.95) else MANY_IN_VAIN
    few = min(few, MINUTE_IN_VAIN) if idle_s > MINUTE_S else few
    return num_equal >= few and not snapshot.is_finished


def cut_share(snapshot: Snapshot) -> float | None:
    """Of the answers of the newest own groups, those that ended at the longest length; None: unknown."""
    flags = [cut for group in snapshot.answers for cut in group.is_cut]
    if flags:
        return mean([float(cut) for cut in flags])
    if snapshot.config is None or not snapshot.puts:
        return None
    longest = snapshot.config.generator.max_new_tokens * snapshot.config.generator.group_size
    if any(put.num_turns > 1 for put in snapshot.puts):
        return None
    return mean([float(put.num_tokens >= longest) for put in snapshot.puts])


def _waits(count: int, unscored: int = 0) -> str:
    return f"waits for own groups: {count + unscored} generated, 0 with differing rewards"


def cut_off(snapshot: Snapshot) -> Diagnosed | None:
    """Answers reach the longest length before the model ends them, and are worth less for it."""
    share = cut_share(snapshot)
    if share is None or share < CUT_SHARE or snapshot.config is None:
        return None
    cut, whole = _rewards_by_end(snapshot)
    if cut and mean(cut) > 0.5 and mean(cut) >= mean(whole) - 0.1:
        return None  # cut answers are worth as much: the reward does not need the end
    num_equal, means = _num_equal(snapshot)
    is_vain = _is_vain(snapshot, num_equal) and mean(means) < 1 - _EDGE
    # one lucky answer that ended in time says nothing of what ending in time is worth
    is_no_loss = len(whole) >= COMPARED and mean(whole) <= mean(cut) + 0.05
    if not is_vain and (len(cut) < 32 or is_no_loss):
        return None
    longest = snapshot.config.generator.max_new_tokens
    evidence = [
        f"{share:.0%} of the answers of the newest {len(snapshot.answers)} own groups end at {longest} tokens "
        "without an end of their own (groups.sqlite)"
    ]
    evidence += (
        [
            f"mean reward of those cut off {mean(cut):.3g}"
            + (f", of those that end {mean(whole):.3g}" if whole else "; none ends by itself")
        ]
        if cut
        else []
    )
    evidence += [_waits(num_equal)] if is_vain else []
    return Diagnosed(
        name="cut_off",
        key="generator.max_new_tokens",
        claim=f"answers are cut off at generator.max_new_tokens = {longest} before they are finished",
        evidence=tuple(evidence),
        fix=snapshot.set_key("generator.max_new_tokens", 4 * longest, why=" (the same on every node of the run)")
        + "; or ask for a shorter answer in the prompt",
        gravity=Gravity.STOPS if is_vain else Gravity.HARMS,
        certainty=Certainty.SURE if share > 0.95 else Certainty.LIKELY,
        follows_from=frozenset({"cannot_be_scored", "learning_rate_too_high", "weights_decay"}),
    )


def episodes_cut_off(snapshot: Snapshot) -> Diagnosed | None:
    """Episodes end where another turn has no room, and nothing is won by then."""
    room = [each for group in snapshot.answers for each in group.has_room]
    num_equal, means = _num_equal(snapshot)
    config, num_full = snapshot.config, room.count(False)
    if config is None or len(room) < COMPARED or num_full < CUT_SHARE * len(room):
        return None
    if not _is_vain(snapshot, num_equal) or mean(means) >= 1 - _EDGE:
        return None
    most = config.generator.max_episode_tokens
    return Diagnosed(
        name="episodes_cut_off",
        key="generator.max_episode_tokens",
        claim=f"episodes end at generator.max_episode_tokens = {most}, before they are over",
        evidence=(
            f"{num_full} of the newest {len(room)} episodes had no room for another turn of "
            f"generator.max_new_tokens = {config.generator.max_new_tokens} (groups.sqlite)",
            _waits(num_equal),
        ),
        fix=snapshot.set_key(
            "generator.max_episode_tokens", max(4 * most, 2048), why=" (the same on every node of the run)"
        ),
        gravity=Gravity.STOPS,
        certainty=Certainty.LIKELY,
        follows_from=frozenset({"cannot_be_scored", "cut_off", "learning_rate_too_high", "weights_decay"}),
    )


def _has_own_reward(snapshot: Snapshot) -> bool:
    """Whether answers are judged by functions of one's own alone."""
    return snapshot.config is not None and all(each.kind == "function" for each in snapshot.config.environments)


def _worth_of_references(snapshot: Snapshot) -> str:
    """How to see whether the reward knows a right answer."""
    return (
        f"swarm check --config {snapshot.directory / 'node.toml'} shows what the right answers (references) are worth"
    )


def _rewards_by_end(snapshot: Snapshot) -> tuple[list[float], list[float]]:
    """Rewards of answers that were cut off, and of those that ended by themselves."""
    pairs = [pair for group in snapshot.answers for pair in zip(group.rewards, group.is_cut, strict=True)]
    return [reward for reward, is_cut in pairs if is_cut], [reward for reward, is_cut in pairs if not is_cut]


def _by_env(puts: Iterable[GroupPut]) -> str:
    """Mean reward of each environment."""
    found: dict[str, list[float]] = {}
    for put in puts:
        found.setdefault(put.env, []).append(put.reward_mean)
    return ", ".join(f"{env} {mean(means):.3g} ({len(means)} groups)" for env, means in sorted(found.items())[:5])


def equal_rewards(snapshot: Snapshot) -> Diagnosed | None:
    """Every answer to a question gets the same reward: all wrong, all right, or a reward that does not look."""
    num_equal, means = _num_equal(snapshot)
    if not _is_vain(snapshot, num_equal):
        return None
    level = mean(means)
    is_stopped = bool(snapshot.num_in_vain) or not snapshot.made
    shown = f"mean rewards by environment: {_by_env(snapshot.puts[-num_equal:])} (put in events.jsonl)"
    evidence = [f"{_waits(num_equal)} (status.json)" if is_stopped else f"{num_equal} own groups in a row", shown]
    if means and level >= 1 - _EDGE:
        right = [flag for group in snapshot.answers for flag in group.is_right]
        evidence += [f"{sum(right)} of {len(right)} answers are the right one of the file"] if right else []
        name, claim = "all_right", "every answer gets the full reward, so nothing is left to learn from these tasks"
        fix = (
            f"look at them: swarm samples {snapshot.directory}. Where they are right: harder tasks ([[environments]] "
            "params or another dataset), or a reward that tells good from better. Where they are wrong, the reward "
            f"pays for the wrong thing: {_worth_of_references(snapshot)}"
        )
    elif means and level > _EDGE and max(means) - min(means) < _EDGE:
        name, claim = (
            "all_equal",
            f"every answer gets the same reward, {level:.3g}: the reward does not tell them apart",
        )
        fix = f"look at answers with their rewards: swarm samples {snapshot.directory}; then mend the reward"
    elif not means or level <= _EDGE:
        name, claim = (
            "all_wrong",
            "no answer gets any reward, so no answer is better than another: nothing to learn from",
        )
        fix = (
            f"look at them: swarm samples {snapshot.directory}. Then easier tasks, or a model that can do some of them "
            "(model.source), a reward that grades (part of the way is worth something), a prompt that shows the form "
            "of the answer, or more tries (generator.group_size)"
        )
        if _has_own_reward(snapshot):
            fix = (
                f"{_worth_of_references(snapshot)}; worth 0, the reward itself fails: it runs confined, without "
                "network and without files but its own, and an error that it catches looks like a wrong answer. "
                f"Else {fix}"
            )
    else:
        name, claim = "all_equal", "all answers to a question get equal rewards, though questions differ"
        fix = (
            "more tries ([generator] group_size) or a higher generator.temperature, so that answers differ; a reward "
            "that grades"
        )
    if is_stopped:
        claim = f"{claim} ({_waits(num_equal)})"
    return Diagnosed(
        name=name,
        claim=claim,
        evidence=tuple(evidence),
        fix=fix,
        gravity=Gravity.STOPS if is_stopped else Gravity.WASTES if name == "all_right" else Gravity.HARMS,
        certainty=Certainty.SURE if snapshot.num_in_vain else Certainty.LIKELY,
        follows_from=frozenset({"cut_off", "episodes_cut_off", "cannot_be_scored", "disk_full"})
        | {"learning_rate_too_high", "weights_decay", "reward_is_upside_down", "right_answers_unpaid"},
    )


def small_signal(snapshot: Snapshot) -> Diagnosed | None:
    """Most own groups teach nothing, and some do."""
    used = [
        (draw.num_zero_variance, sum(use.origin == "local" for use in draw.groups)) for draw in snapshot.draws[-20:]
    ]
    num_equal, num_used = sum(n for n, _ in used), sum(n for _, n in used)
    if len(used) < 10 or num_equal < 50 or num_equal / (num_equal + num_used) < 0.9:
        return None
    return Diagnosed(
        name="small_signal",
        claim="nine of ten own groups have equal rewards, and their generation is for nothing",
        evidence=(
            f"{num_equal} of {num_equal + num_used} own groups of the newest {len(used)} draws (draw in events.jsonl)",
        ),
        fix="a recipe that chooses its tasks (swarm recipes), tasks nearer to what the model can, or more tries",
        gravity=Gravity.NOTE,
    )
