"""The rule about a training that did not learn for no cause that is known, with what to try, the likeliest first.

Invariant: the verdict is that of `learning_evidence`; only where held-out success decides nothing do the rewards of the
node's own groups speak, and these never prove that it learned.
"""

import math
from statistics import variance
from typing import Final

from swarm.diagnosis import learning_rules as learning
from swarm.diagnosis.signal_rules import cut_share, malformed_share
from swarm.diagnosis.snapshot import FEW_STEPS, Diagnosed, Gravity, Snapshot, mean, middle
from swarm.events import GroupPut, events_of
from swarm.printable import as_argument
from swarm.trained.intervals import Z_95, Interval
from swarm.trained.learning_evidence import KNOWN, Learned

MANY_STEPS: Final = 50  # of a training that goes on: fewer need not have taught anything yet
LEAST_REWARDS: Final = 48  # that can be compared by thirds
SMALL_SHARE: Final = 0.3  # of own groups with differing rewards
SOME_CUT: Final = 0.2  # of answers
SOME_MALFORMED: Final = 0.1  # of actions
SLOW: Final = 0.01  # nats that a step moves log-probs by; docs/metrics.md
WIDE: Final = 0.1  # of an interval to each side
SHORT: Final = 300  # steps
MOST_TRIES: Final = 4
EASY: Final = 0.9  # mean reward of the first own groups, from which on hardly anything is left to learn


def training_gain(snapshot: Snapshot) -> tuple[float, float, Interval] | None:
    """Mean reward of the first and of the newest third of the own groups, and the interval of the gain.

    Groups without signal count, too. Without own groups the rewards of steps count; None for fewer than LEAST_REWARDS.
    """
    rewards = _own_rewards(snapshot)
    rewards = rewards if len(rewards) >= LEAST_REWARDS else snapshot.course("reward_mean")
    if len(rewards) < LEAST_REWARDS:
        return None
    third = len(rewards) // 3
    first, newest = rewards[:third], rewards[-third:]
    half = Z_95 * math.sqrt((variance(first) + variance(newest)) / third)
    gain = mean(newest) - mean(first)
    return mean(first), mean(newest), (gain - half, gain + half)


def _own_rewards(snapshot: Snapshot) -> list[float]:
    return [put.reward_mean for put in events_of(GroupPut, snapshot.events) if math.isfinite(put.reward_mean)]


def did_not_learn(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a training whose held-out success did not rise, or, where that decides nothing, whose rewards did not."""
    evidence, gain, is_over = snapshot.learning, training_gain(snapshot), snapshot.is_finished or not snapshot.runs
    if not snapshot.is_trainer or len(snapshot.made) < (FEW_STEPS if is_over else MANY_STEPS):
        return None
    first, newest, (low, high) = gain or (0.0, 0.0, (0.0, 0.0))
    verdict, whole, gravity = evidence.verdict, evidence.whole, Gravity.HARMS
    is_by_heart = whole is not None and low > max(0.0, whole.interval[1])
    if verdict is Learned.NO and whole is not None and whole.before < KNOWN <= whole.after:
        return Diagnosed(
            claim="nearly all held-out problems are right, and these are too few to show a gain",
            fix=_closer_look(snapshot),
            evidence=(f"{evidence.words} (evaluation in events.jsonl)",),
            gravity=Gravity.NOTE,
        )
    claim = {
        Learned.NO: "it did not learn, and no known fault explains it",
        Learned.WORSE: "it got worse, and no known fault explains it",
        Learned.COMMONEST: "it learned no more than the commonest answer would give",
    }.get(verdict, "")
    if verdict is Learned.NO and whole is not None and low > 0:
        gravity = Gravity.HARMS if is_by_heart or is_over else Gravity.NOTE
        claim = "the reward in training rose, and held-out success did not: " + (
            "what is learned does not carry over"
            if is_by_heart
            else "the problems are too few to show it, or it is luck"
        )
        if whole.reward is not None and whole.reward[2][0] > 0:
            claim = "held-out answers earn a little more, and no more of them are right"
    elif verdict in (Learned.UNKNOWN, Learned.TOO_FEW) and gain is not None and low <= 0 and newest < KNOWN:
        claim = "the reward in training did not rise, and held-out success is not known"
    if not claim or (verdict is Learned.COMMONEST and not is_over):
        return None
    reward = f"mean reward {first:.3g} in the first third, {newest:.3g} in the newest (95 %: {low:+.2g} to {high:+.2g})"
    return Diagnosed(
        claim=claim,
        fix="; ".join(
            f"{number}) {each}"
            for number, each in enumerate(_what_to_try(snapshot, low > 0, is_by_heart)[:MOST_TRIES], 1)
        ),
        evidence=(
            f"{evidence.words} (evaluation in events.jsonl)",
            *([] if gain is None else [f"{reward} (put in events.jsonl)"]),
        ),
        gravity=gravity,
    )


def _what_to_try(snapshot: Snapshot, is_rising: bool, is_by_heart: bool) -> list[str]:
    """Things to try, the likeliest first, each with the figure that speaks for it.

    `is_rising`: the reward in training rises; `is_by_heart`: by more than held-out success can have risen.
    """
    whole, found = snapshot.learning.whole, list[str]()
    paid = mean(_own_rewards(snapshot)[:LEAST_REWARDS])
    is_easy = paid >= EASY or (whole is not None and whole.before >= KNOWN)
    if is_easy:
        found.append(f"harder tasks: nothing is left to learn from these (mean reward in the beginning: {paid:.2g})")
    is_short = not is_easy and bool(snapshot.made) and snapshot.made[-1].step < SHORT
    if is_short and is_rising and not is_by_heart:
        found.append(f"more steps than {snapshot.made[-1].step}: the reward in training rises")
    used = sum(use.is_own_policy for draw in snapshot.draws for use in draw.groups)
    equal = sum(draw.num_zero_variance for draw in snapshot.draws)
    if not is_easy and used + equal and used <= SMALL_SHARE * (used + equal):
        found.append(
            f"easier tasks to begin with, a reward that grades, or more tries ([generator] group_size): in {used} of "
            f"{used + equal} own groups answers had differing rewards, and only these teach"
        )
        if snapshot.warm_up and mean(snapshot.course("reward_mean")[-LEAST_REWARDS:]) < SMALL_SHARE:
            found.append(snapshot.warm_up)
    if (malformed_share(snapshot) or 0.0) >= SOME_MALFORMED:
        found.append(
            "a prompt that shows the form of an action: the environment cannot read "
            f"{malformed_share(snapshot):.0%} of them ({snapshot.look})"
        )
    if (cut_share(snapshot) or 0.0) >= SOME_CUT and snapshot.config is not None:
        longest = snapshot.config.generator.max_new_tokens
        found.append(f"longer answers than generator.max_new_tokens = {longest}: {cut_share(snapshot):.0%} are cut off")
    if is_by_heart:
        found.append("more different questions: the reward rises on those that it trains on")
    found += _of_rate(snapshot)
    if is_short and not is_rising:
        found.append(f"more steps than {snapshot.made[-1].step}")
    is_compared = whole is not None and whole.is_change
    if not snapshot.environments and not is_compared:  # agents' runs alone
        found.append("a measure: runs with held_out = true, of the same tasks before and now (docs/agents.md)")
    elif whole is None or not is_compared:
        found.append(
            f"evaluations: under [evaluation] set every_steps; now: swarm eval {as_argument(snapshot.directory)}"
        )
    elif whole.interval[1] - whole.interval[0] > 2 * WIDE:
        found.append(_closer_look(snapshot))
    return [*found, f"read answers with their rewards: {snapshot.look}. Does the reward know the right ones?"]


def _closer_look(snapshot: Snapshot) -> str:
    count = 0 if snapshot.learning.whole is None else snapshot.learning.whole.num_problems
    return f"a closer look: swarm eval {as_argument(snapshot.directory)} --problems 256 shows what {count} cannot"


def _of_rate(snapshot: Snapshot) -> list[str]:
    """Advice on the learning rate by the size of steps; [] where they are of usual size, or not known."""
    config, moves = snapshot.config, snapshot.course("log_ratio_std")
    if config is None or len(moves) < 5:
        return []
    rate = config.learner.learning_rate
    if middle(moves) < SLOW or rate < config.model.usual_rate / 2:
        return [f"a higher learning rate than {rate:g}: a step moves log-probs by {middle(moves):.2g} nats"]
    if learning.leaps(snapshot):
        return [f"a lower learning rate than {rate:g}: {learning.leaps(snapshot)[0]}"]
    return []
