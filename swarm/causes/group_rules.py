"""Rules about what the newest own groups hold: the questions that are asked, the answers, and how these are scored.

Invariant: only whether prompts and answers are equal is looked at, never what they say.
"""

import math
from collections import defaultdict
from dataclasses import replace
from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity, Suspect
from swarm.causes.signal_rules import NO_SIGNAL
from swarm.causes.snapshot import AnsweredGroup, Snapshot, mean, middle
from swarm.events import GroupAdmitted, GroupPut, events_of

FEW_GROUPS: Final = 8  # fewer say nothing
FEW_QUESTIONS: Final = 20  # of a training that are learned by heart within minutes
ALIKE: Final = 0.95
NOISE_NATS: Final = 2.5  # 12 equally likely tokens; language models have .2 to 1.5
MANY_PUT: Final = 40  # groups of all environments from which their shares can be compared
RARELY: Final = 0.01
_EDGE: Final = 1e-6


def one_question(snapshot: Snapshot) -> Diagnosed | None:
    """Different tasks are asked with one and the same prompt."""
    for env, groups in _by_env(snapshot).items():
        tasks, prompts = {each.task_id for each in groups}, {each.prompt for each in groups}
        if len(tasks) >= FEW_GROUPS and len(prompts) == 1:
            return Diagnosed(
                name="one_question",
                claim=f"every task of {env} is the same question",
                evidence=(f"{len(tasks)} different tasks, 1 prompt (groups.sqlite)",),
                fix=f"a data file whose records differ, and a prompt with what differs in them: "
                f"swarm samples {snapshot.directory} shows it; then {snapshot.start}",
                gravity=Gravity.HARMS,
                key="environments.dataset",
            )
    return None


def answers_are_noise(snapshot: Snapshot) -> Diagnosed | None:
    """Each token is drawn of very many equally likely ones: a symptom, as of a model that begins at nothing."""
    nats = _nats(snapshot)
    if nats < NOISE_NATS:
        return None
    return Diagnosed(
        name="answers_are_noise",
        claim=f"answers are nearly random: each token is drawn of about {math.exp(nats):.0f} that are equally likely",
        evidence=(f"{nats:.2g} nats a token in the newest {len(snapshot.answers)} own groups (groups.sqlite)",),
        gravity=Gravity.NOTE,
    )


def _nats(snapshot: Snapshot) -> float:
    """Entropy of what tokens are drawn from, at the sampling temperature; 0 where it is not known."""
    found = [each.nats for each in snapshot.answers if math.isfinite(each.nats)]
    return middle(found) if len(found) >= FEW_GROUPS else 0.0


def one_answer(snapshot: Snapshot) -> Diagnosed | None:
    """The model gives one and the same answer to every question."""
    groups = [each for each in snapshot.answers if each.texts]
    texts = [text for each in groups for text in each.texts]
    if len({(each.env, each.task_id) for each in groups}) < FEW_GROUPS or not texts:
        return None
    most = max(set(texts), key=texts.count)
    share, rewards = texts.count(most) / len(texts), [reward for each in groups for reward in each.rewards]
    if share < ALIKE:
        return None
    return Diagnosed(
        name="one_answer",
        claim="the model gives one and the same answer to every question"
        + (", and gets a reward for it" if mean(rewards) > 0.5 else ""),
        evidence=(f"{share:.0%} of {len(texts)} answers to {len(groups)} questions are equal (groups.sqlite)",),
        fix=f"look at it: swarm samples {snapshot.directory}. A reward that pays for one answer, whatever is asked, "
        "has to be mended; then begin again from a checkpoint before",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        follows_from=frozenset({"one_question", "learning_rate_too_high", "weights_decay"}),
    )


def environment_in_vain(snapshot: Snapshot) -> Diagnosed | None:
    """One environment of several gives the learner nothing."""
    by_env: dict[str, list[GroupPut]] = defaultdict(list)
    for put in snapshot.puts:
        by_env[put.env].append(put)
    vain = {
        env: puts
        for env, puts in by_env.items()
        if len(puts) >= 2 * FEW_GROUPS and all(not _EDGE < put.reward_mean < 1 - _EDGE for put in puts)
    }
    if len(by_env) < 2 or not 0 < len(vain) < len(by_env):
        return None
    env, puts = max(vain.items(), key=lambda each: len(each[1]))
    level = mean([put.reward_mean for put in puts])
    how = "all are wrong" if level < _EDGE else "all are right" if level > 1 - _EDGE else "of each question all or none"
    return Diagnosed(
        name="environment_in_vain",
        claim=f"environment {env} gives the learner nothing: of its answers {how}",
        evidence=(
            f"{len(puts)} of {len(snapshot.puts)} own groups, none with differing rewards (put in events.jsonl); "
            f"others: {', '.join(sorted(set(by_env) - {env}))}",
        ),
        fix=f"other tasks or another prompt or reward for {env}, or a small weight under [generator.env_weights]",
        gravity=Gravity.WASTES,
        certainty=Certainty.LIKELY,
    )


def environment_not_asked(snapshot: Snapshot) -> Diagnosed | None:
    """An environment of the configuration of which next to no task is asked."""
    config = snapshot.config
    if config is None or len(config.environments) < 2 or len(snapshot.attempts) < MANY_PUT:
        return None
    counts = {each.name: sum(put.env == each.name for put in snapshot.attempts) for each in config.environments}
    env, count = min(counts.items(), key=lambda each: each[1])
    others = [event for event in events_of(GroupAdmitted, snapshot.events) if event.env == env]
    if count > RARELY * len(snapshot.attempts) or others:  # learned from what other nodes ask
        return None
    return Diagnosed(
        name="environment_not_asked",
        claim=f"environment {env} is hardly ever asked: generator.env_weights leaves it {count} of "
        f"{len(snapshot.attempts)} groups",
        evidence=(f"generator.env_weights = {config.generator.env_weights} (node.toml); put in events.jsonl",),
        fix=f"under [generator.env_weights] set {env} nearer to the others",
        gravity=Gravity.WASTES,
        key="generator.env_weights",
    )


def suspects(snapshot: Snapshot) -> list[Suspect]:
    """What is odd about questions and answers, and harms where nothing is learned from them."""
    groups = [each for each in snapshot.answers if each.texts]
    if len(groups) < FEW_GROUPS:
        return []
    found = [_few_questions(snapshot, groups), _same_answers(snapshot, groups), _empty_answers(snapshot, groups)]
    return [each for each in [*found, _noise(snapshot), _parts_cancel(snapshot)] if each is not None]


def _noise(snapshot: Snapshot) -> Suspect | None:
    """A model that does not know this form of question, or anything."""
    symptom = answers_are_noise(snapshot)
    if symptom is None:
        return None
    finding = replace(
        symptom,
        name="model_knows_nothing",
        claim=f"{symptom.claim}: the temperature is too high, or the model does not know such questions",
        fix=f"look at them: swarm samples {snapshot.directory}. generator.temperature near 1; weights that were loaded "
        "to the end, the tokenizer and chat template that belong to them, and a prompt in a form that the model knows",
        certainty=Certainty.LIKELY,
    )
    return Suspect(finding=finding, explains=NO_SIGNAL - {"cannot_be_scored", "all_right"})


def _few_questions(snapshot: Snapshot, groups: list[AnsweredGroup]) -> Suspect | None:
    count = len({(each.env, each.prompt) for each in groups})
    if count > FEW_QUESTIONS or count > len(groups) * 2 / 3:
        return None
    finding = Diagnosed(
        name="few_questions",
        claim=f"the same few questions are asked again and again: the newest {len(groups)} groups are of {count}",
        evidence=("prompts of the newest own groups (groups.sqlite)",),
        fix="more problems: a larger data file without the same ones again, or a greater num_tasks under "
        "[[environments]]",
        gravity=Gravity.NOTE,
        certainty=Certainty.LIKELY,
        key="environments.num_tasks",
    )
    return Suspect(
        finding=finding,
        explains=frozenset({"overfits", "held_out_falls", "held_out_stays", "all_right", "all_equal", "one_answer"}),
    )


def _same_answers(snapshot: Snapshot, groups: list[AnsweredGroup]) -> Suspect | None:
    same = sum(len(set(each.texts)) == 1 for each in groups)
    if same < ALIKE * len(groups):
        return None
    finding = Diagnosed(
        name="answers_alike",
        claim="all answers to a question are the same text, so none can be better than another",
        evidence=(f"in {same} of {len(groups)} newest own groups (groups.sqlite)",),
        fix="begin again from a checkpoint before the policy lost its variety, with a lower learning rate; or "
        + snapshot.set_key("generator.temperature", 1.0),
        gravity=Gravity.NOTE,
        follows_from=frozenset({"learning_rate_too_high", "weights_decay"}),
    )
    return Suspect(finding=finding, explains=NO_SIGNAL - {"all_right", "cannot_be_scored"})


def _empty_answers(snapshot: Snapshot, groups: list[AnsweredGroup]) -> Suspect | None:
    lengths = [count for each in groups for count in each.num_tokens]
    short = sum(count <= 1 for count in lengths) / max(1, len(lengths))
    if short < ALIKE:
        return None
    finding = Diagnosed(
        name="empty_answers",
        claim="the model ends its answers before they begin: they are empty",
        evidence=(f"{short:.0%} of {len(lengths)} answers have at most one token (groups.sqlite)",),
        fix="prompt, prefill and system under [[environments]] have to fit the chat template of the model: swarm check "
        f"--config {snapshot.directory / 'node.toml'} shows the prompt as it is asked",
        gravity=Gravity.NOTE,
        certainty=Certainty.LIKELY,
        follows_from=frozenset({"learning_rate_too_high", "weights_decay"}),
    )
    return Suspect(finding=finding, explains=NO_SIGNAL)


def _parts_cancel(snapshot: Snapshot) -> Suspect | None:
    """Named rewards differ from group to group, and what an episode is worth does not."""
    parts = {name for put in snapshot.puts for name in put.reward_parts}
    courses = {name: [put.reward_parts[name] for put in snapshot.puts if name in put.reward_parts] for name in parts}
    moving = [name for name, course in courses.items() if max(course) - min(course) > 0.05]
    if not moving:
        return None
    finding = Diagnosed(
        name="rewards_add_up_to_nothing",
        claim=f"named rewards differ ({', '.join(sorted(moving)[:4])}), and what answers are worth does not: their "
        "weights add up to nothing, or beyond 1",
        evidence=("reward_parts and reward_mean of put (events.jsonl)",),
        fix="reward_weights under [[environments]]: the weighted sum is clipped to [0, 1], and has to lie inside",
        gravity=Gravity.NOTE,
        certainty=Certainty.LIKELY,
        key="environments.reward_weights",
    )
    return Suspect(finding=finding, explains=NO_SIGNAL - {"cannot_be_scored", "cut_off"})


def _by_env(snapshot: Snapshot) -> dict[str, list[AnsweredGroup]]:
    found: dict[str, list[AnsweredGroup]] = defaultdict(list)
    for each in snapshot.answers:
        found[each.env].append(each)
    return found
