"""Rules about the signal of own groups: answers to one question that get different rewards.

Invariant: each rule is a pure function of a snapshot, and shows no text of an answer.
"""

import math
from collections import defaultdict
from typing import Final

from swarm.diagnosis.snapshot import (
    COMPARED,
    EDGE,
    FEW_GROUPS,
    FEW_STEPS,
    MOST,
    Diagnosed,
    Gravity,
    Snapshot,
    mean,
    middle,
    shortened,
)
from swarm.events import NODE, GroupAdmitted, GroupPut, LoopFailed, events_of
from swarm.telemetry.warning_log import NOTHING_TO_LEARN
from swarm.trained.learning_evidence import KNOWN, Learned

MANY_IN_VAIN: Final = 100  # own groups without signal; with one right answer in 100 and 8 tries a group: 1 in 3,000
MINUTE_IN_VAIN: Final = 48  # the same after MINUTE_S without a step; with one right answer in 100: 1 in 50
SOME_IN_VAIN: Final = 16  # the same, once the time without a step is up, or where every answer is cut off
MINUTE_S: Final = 60.0
MANY_PUT: Final = 40  # groups of all environments from which their shares can be compared
SOME_STEPS: Final = 15  # from which on a slope differs from chance
CUT_SHARE: Final = 0.5  # of answers that end at the longest length
MOSTLY_MALFORMED: Final = 0.5  # of actions
NOISE_NATS: Final = 2.5  # 12 equally likely tokens; language models have .2 to 1.5


def gave_up(snapshot: Snapshot) -> bool:
    """True if the node stopped because its groups had no signal."""
    ends = [event.error for event in events_of(LoopFailed, snapshot.events) if event.loop == NODE]
    return not snapshot.runs and bool(ends) and NOTHING_TO_LEARN in ends[-1]


def _num_equal(snapshot: Snapshot) -> tuple[int, list[float]]:
    """Number of newest own groups in a row without signal, and the mean rewards of those that are in the events."""
    if snapshot.num_in_vain and snapshot.own[0]:
        num_put = snapshot.own[0]
        return num_put, [put.reward_mean for put in snapshot.puts[-num_put:]]
    means: list[float] = []  # without the node's own count: means at an end of the range are of equal rewards
    for put in reversed(snapshot.puts):
        if EDGE < put.reward_mean < 1 - EDGE:
            break
        means.append(put.reward_mean)
    return len(means), means[::-1]


def has_no_signal(snapshot: Snapshot) -> bool:
    """True if so many own groups in a row have equal rewards that chance is unlikely; False for a finished node."""
    num_equal, _ = _num_equal(snapshot)
    idle_s = snapshot.stepless_s
    is_few_enough = idle_s > snapshot.max_idle_s or gave_up(snapshot) or (cut_share(snapshot) or 0.0) > 0.95
    few = SOME_IN_VAIN if is_few_enough else MINUTE_IN_VAIN if idle_s > MINUTE_S else MANY_IN_VAIN
    return num_equal >= few and not snapshot.is_finished


def has_flat_reward(snapshot: Snapshot) -> bool:
    """True if the reward did not rise beyond chance; healthy training may look the same at its beginning."""
    rewards = snapshot.course("reward_mean")
    if len(rewards) < SOME_STEPS or mean(rewards[-SOME_STEPS // 2 :]) > MOST:
        return False
    center, level = (len(rewards) - 1) / 2, mean(rewards)
    places = [place - center for place in range(len(rewards))]
    spread = sum(place * place for place in places)
    slope = sum(place * (value - level) for place, value in zip(places, rewards, strict=True)) / spread
    rest = sum((value - level - slope * place) ** 2 for place, value in zip(places, rewards, strict=True))
    return slope <= max(math.sqrt(rest / (len(rewards) - 2) / spread), 1e-9)


def has_small_signal(snapshot: Snapshot) -> bool:
    """True if at least nine of ten, and at least 50, own groups of the newest draws have equal rewards."""
    draws = snapshot.draws[-20:]
    num_equal = sum(draw.num_zero_variance for draw in draws)
    num_used = sum(use.origin == "local" for draw in draws for use in draw.groups)
    return len(draws) >= 10 and num_equal >= max(50, MOST * (num_equal + num_used))


def teaches_little(snapshot: Snapshot) -> bool:
    """True if own groups have no or little signal, or the reward does not rise."""
    return has_no_signal(snapshot) or has_flat_reward(snapshot) or has_small_signal(snapshot)


def has_no_success(snapshot: Snapshot) -> bool:
    """True if held-out success is known, and not shown to have risen, after at least FEW_STEPS steps."""
    found = snapshot.learning
    is_known = found.verdict in (Learned.NO, Learned.WORSE, Learned.COMMONEST, Learned.BY_REWARD)
    return is_known and len(snapshot.made) >= FEW_STEPS and found.whole is not None and found.whole.after < KNOWN


def cut_share(snapshot: Snapshot) -> float | None:
    """Share of the newest own answers that ended at the token limit; None if unknown."""
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
    """Finds answers that the token limit cuts off, if they are worth less for that."""
    share = cut_share(snapshot)
    if share is None or share < CUT_SHARE or snapshot.config is None:
        return None
    pairs = [pair for group in snapshot.answers for pair in zip(group.rewards, group.is_cut, strict=True)]
    cut, whole = [reward for reward, is_cut in pairs if is_cut], [reward for reward, is_cut in pairs if not is_cut]
    if cut and mean(cut) > 0.5 and mean(cut) >= mean(whole) - 0.1:
        return None  # cut answers are worth as much: the reward does not need the end
    is_vain = has_no_signal(snapshot) and mean(_num_equal(snapshot)[1]) < 1 - EDGE
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
    """Finds episodes without room for another turn, in own groups without signal."""
    config = snapshot.config
    if config is None or not has_no_signal(snapshot) or mean(_num_equal(snapshot)[1]) >= 1 - EDGE:
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
    """Finds equal rewards of all answers to a question: all wrong, all right, or not distinguished by the reward."""
    if not has_no_signal(snapshot):
        return None
    num_equal, means = _num_equal(snapshot)
    level, is_stopped = mean(means), bool(snapshot.num_in_vain) or not snapshot.made
    by_env: dict[str, list[float]] = defaultdict(list)
    for put in snapshot.puts[-num_equal:]:
        by_env[put.env].append(put.reward_mean)
    shown = ", ".join(f"{env} {mean(each):.3g} ({len(each)} groups)" for env, each in sorted(by_env.items())[:5])
    look = f"look at answers: {snapshot.look}"
    check = f"{snapshot.check} shows what the right answers (references) are worth"
    if means and level >= 1 - EDGE:
        name, claim = "all_right", "every answer gets the full reward, so nothing is left to learn from these tasks"
        fix = (
            f"{look}. Where they are right: harder tasks ([[environments]] params or another dataset), or a reward "
            f"that tells good from better. Where they are wrong, the reward pays for the wrong thing: {check}"
        )
    elif not means or level <= EDGE:
        name = "all_wrong"
        claim = "no answer gets any reward, so no answer is better than another: nothing to learn from"
        fix = (
            f"{look}. Then {f'{first}; or ' if (first := snapshot.warm_up) else ''}easier tasks, a model that can do "
            "some of them (model.source), a reward that grades "
            "(part of the way is worth something), a prompt that shows the form of the answer, or more tries "
            f"(generator.group_size){of_prompt(snapshot)}"
        )
        if snapshot.config is not None and all(each.kind == "function" for each in snapshot.environments):
            fix = (
                f"{check}; worth 0, the reward itself fails: it runs confined, without network and without files but "
                f"its own, and an error that it catches looks like a wrong answer. Else {fix}"
            )
    elif max(means) - min(means) < EDGE:
        name = "all_equal"
        claim = f"every answer gets the same reward, {level:.3g}: the reward does not tell them apart"
        fix = f"{look}, with their rewards; then correct the reward"
    else:
        name, claim = "all_equal", "all answers to a question get equal rewards, though questions differ"
        fix = "more tries ([generator] group_size) or a higher generator.temperature; a reward that grades"
    known = len(snapshot.is_right)
    right = [f"{snapshot.num_right} of {known} answers are the right one of the file"] if known else []
    return Diagnosed(
        name=name,
        claim=f"{claim} ({_waits(snapshot)})" if is_stopped else claim,
        fix=fix,
        evidence=(
            f"{_waits(snapshot)} (status.json)" if is_stopped else f"{num_equal} own groups in a row",
            f"mean rewards by environment: {shown} (put in events.jsonl)",
            *right,
        ),
        gravity=Gravity.STOPS if is_stopped else Gravity.WASTES if name == "all_right" else Gravity.HARMS,
    )


def of_prompt(snapshot: Snapshot) -> str:
    """Text that lists prompt settings other than the defaults, as a possible cause; "" if there are none."""
    shaped = [
        f"environments.{key} of {each.name} = {shortened(getattr(each, key))[:60]}"
        for each in snapshot.environments
        for key, usual in (("prefill", ""), ("system", ""), ("prompt", "{question}"))
        if getattr(each, key) != usual
    ]
    return f". Of what is not the default, this bears on it: {', '.join(shaped[:3])}" if shaped else ""


def draws_noise(snapshot: Snapshot) -> bool:
    """True if tokens are drawn nearly at random among many, as at a very high temperature."""
    found = [each.nats for each in snapshot.answers if math.isfinite(each.nats)]
    return len(found) >= FEW_GROUPS and middle(found) >= NOISE_NATS


def model_knows_nothing(snapshot: Snapshot) -> Diagnosed | None:
    """Finds nearly random answers in own groups without signal."""
    if not draws_noise(snapshot) or not has_no_signal(snapshot):
        return None
    return Diagnosed(
        claim="answers are nearly random: the temperature is too high, or the model does not know such questions",
        fix=f"look at them: {snapshot.look}. generator.temperature near 1; weights that were loaded "
        "to the end, the tokenizer and chat template that belong to them, and a prompt in a form that the model knows"
        + (f"; or {snapshot.warm_up}" if snapshot.warm_up else ""),
        evidence=(
            f"{middle([each.nats for each in snapshot.answers]):.2g} nats a token in the newest "
            f"{len(snapshot.answers)} own groups (groups.sqlite)",
        ),
    )


def malformed_share(snapshot: Snapshot) -> float | None:
    """Share of the newest own actions that the environment could not read; None if too little is known."""
    flags = [flag for group in snapshot.answers for flag in group.is_malformed]
    return mean([float(flag) for flag in flags]) if len(flags) >= COMPARED else None


def malformed_actions(snapshot: Snapshot) -> Diagnosed | None:
    """Finds own episodes whose actions the environment mostly cannot read, where they teach little."""
    share = malformed_share(snapshot)
    if share is None or share < MOSTLY_MALFORMED or not teaches_little(snapshot):
        return None
    return Diagnosed(
        claim=f"the environment cannot read {share:.0%} of the actions: the model does not know their form",
        fix=f"read some: {snapshot.look}. A prompt that shows the form of an action by an example, a form that the "
        f"model writes by itself, or a reward for a readable action{of_prompt(snapshot)}",
        evidence=(f"status malformed, in the newest {len(snapshot.answers)} own groups (groups.sqlite)",),
        gravity=Gravity.STOPS if has_no_signal(snapshot) else Gravity.HARMS,
    )


def environment_in_vain(snapshot: Snapshot) -> Diagnosed | None:
    """Finds an environment without signal beside another with signal."""
    by_env: dict[str, list[GroupPut]] = defaultdict(list)
    for put in snapshot.puts:
        by_env[put.env].append(put)
    vain = [
        (env, puts)
        for env, puts in by_env.items()
        if len(puts) >= 2 * FEW_GROUPS and all(not EDGE < put.reward_mean < 1 - EDGE for put in puts)
    ]
    if not 0 < len(vain) < len(by_env):
        return None
    env, puts = max(vain, key=lambda each: len(each[1]))
    level = mean([put.reward_mean for put in puts])
    how = "all are wrong" if level < EDGE else "all are right" if level > 1 - EDGE else "of each question all or none"
    return Diagnosed(
        claim=f"environment {env} gives the learner nothing: of its answers {how}",
        fix=f"other tasks or another prompt or reward for {env}, or a small weight under [generator.env_weights]",
        evidence=(
            f"{len(puts)} of {len(snapshot.puts)} own groups, none with differing rewards (put in events.jsonl)",
        ),
    )


def environment_not_asked(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a configured environment that gets at most 1 % of the own groups, and no groups of others."""
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
