"""Rules about what the node logged: warnings and errors of its parts, and doubts about its tasks, as it wrote them.

Invariant: a warning is blamed only where a finding is there that its part of the node can bring about.
"""

from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity, Suspect
from swarm.causes.refusal_rules import OF_REFUSALS
from swarm.causes.signal_rules import NO_SIGNAL
from swarm.causes.snapshot import Snapshot, shortened
from swarm.telemetry import LoggedWarning

DOUBT: Final = "right answers are worth nothing, or are too long"  # of a training that is about to begin
UPSIDE_DOWN: Final = "a right answer is worth less than an empty one"  # the same
SLOW_DTYPE: Final = "passes are computed in a dtype that is slow on this machine"
DOUBT_S: Final = 300.0  # that a training takes from a doubt to its start
SILENT: Final = frozenset(  # what rules tell better, and what is no fault
    {
        DOUBT,
        UPSIDE_DOWN,
        SLOW_DTYPE,
        "paused: no batch or step begins until: swarm resume",
        "goes on after a pause",
        "loop failed",
        "worker failed",
        "worker died; starting it again",
        "this node is set otherwise than its run",
        "the coordinator does not answer; the node goes on without it",
        "no session with the coordinator: it refuses this node, or has another key",
        "step skipped",
        "a rollout group of ours could not be scored",
        "events are being lost",
        "resumed from an earlier step; later versions are no longer served",
        "the machine went down while the store was open; newest groups may be lost",
        "a group could not be scored when it was made",
        "held-out accuracy fell",
        "store is full; groups of ours are dropped until there is room on the disk",
        "store is full; groups of peers are refused until it has room",
        "store is full; learning waits until there is room",
        "the engine refused a version; it keeps serving the previous one",
        "a version could not be loaded; trying again after a pause",
    }
)
_OF_NETWORK: Final = frozenset({"alone", "no_external", "cannot_dial", "no_trainer", "trainer_away", "nobody_follows"})
_OF_STEPS: Final = frozenset({"no_steps", "step_needs_many", "loops_fail", "worker_dies", "nothing_trained"})
_OF_WEIGHTS: Final = frozenset({"not_published", "versions_refused", "far_behind", "no_weights_yet", "trainer_away"})
# Part of the node, as loggers are named -> findings that it can bring about.
EXPLAINS: Final = {
    "swarm.peers": _OF_NETWORK,
    "swarm.wire": _OF_NETWORK,
    "swarm.relay": _OF_NETWORK | {"no_relay"},
    "swarm.loops.neighbours": _OF_NETWORK,
    "node.credential": _OF_NETWORK | OF_REFUSALS | {"coordinator_refuses"},
    "node.manifest_refresh": _OF_NETWORK | OF_REFUSALS | {"differs_from_run", "coordinator_refuses"},
    "swarm.generation": _OF_STEPS | {"cannot_be_scored", "versions_refused"},
    "swarm.environments": _OF_STEPS | NO_SIGNAL | {"environment_in_vain", "helpers_die"},
    "swarm.exchange": _OF_STEPS | {"disk_full", "steps_made_again"},
    "swarm.learn": _OF_STEPS | {"not_a_number", "held_out_falls", "steps_made_again"},
    "swarm.weights": _OF_WEIGHTS,
    "swarm.weight_sync": _OF_WEIGHTS | {"no_trainer", "no_credit"},
    "swarm.loops.learn_loop": _OF_STEPS | _OF_WEIGHTS,
    "swarm.loops.generate_loop": _OF_STEPS,
    "swarm.loops.update_weights": _OF_WEIGHTS,
    "swarm.loops.fetch_weights": _OF_WEIGHTS,
    "swarm.loops.evaluate": frozenset({"held_out_falls", "evaluations_take_time"}),
}


OF_DOUBTS: Final = frozenset({"learns_nothing", "gets_worse", "reward_ignores_question", "right_answers_unpaid"})


def suspects(snapshot: Snapshot) -> list[Suspect]:
    """Doubts about the tasks, and warnings by the part of the node that logged them, the newest first."""
    found = [_doubt(snapshot)]
    found += [_warning(each, explains) for each in reversed(snapshot.logged) if (explains := _explained_by(each))]
    return [each for each in found if each is not None]


def reward_is_upside_down(snapshot: Snapshot) -> Diagnosed | None:
    """A right answer was worth less than an empty one before the start."""
    noted = _noted(snapshot, UPSIDE_DOWN)
    if noted is None:
        return None
    environments = () if snapshot.config is None else snapshot.config.environments
    is_weighted = any(environment.reward_weights for environment in environments)
    fix = "where it measures how wrong an answer is, return 1 minus that"
    if is_weighted:  # .01 of shortness beside .99 of rightness: the tiny model learned to say nothing
        fix = (
            "under [[environments]] set the weight to 0 of each reward that wrong answers get, too, however small it "
            "is; the function can pay that to right answers alone. Then a new directory, or a checkpoint of before"
        )
    return Diagnosed(
        name="reward_is_upside_down",
        claim=f"the reward pays less for a right answer than for an empty one: {shortened(noted.fields)}",
        evidence=("noted before the start (warnings.jsonl)", f"seen of it: {_course(snapshot)}"),
        fix=f"{fix}; swarm check --config {snapshot.directory / 'node.toml'} shows what right answers are worth",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        key="environments.dataset",
    )


def slow_compute_dtype(snapshot: Snapshot) -> Diagnosed | None:
    """bfloat16 was asked for by hand, or came with a checkpoint, on a machine that has no hardware for it."""
    noted = _noted(snapshot, SLOW_DTYPE)
    if noted is None:
        return None
    return Diagnosed(
        name="slow_compute_dtype",
        claim=f"passes are computed in a dtype that this machine has no hardware for: {shortened(noted.fields)}",
        evidence=("measured when the model was loaded (warnings.jsonl)",),
        fix=f'set compute_dtype = "float32" in {snapshot.directory / "node.toml"}; published versions stay the same',
        gravity=Gravity.WASTES,
        certainty=Certainty.SURE,
        key="compute_dtype",
    )


def _course(snapshot: Snapshot) -> str:
    rewards = snapshot.course("reward_mean")
    return f"mean reward {rewards[0]:.2f} at first, {rewards[-1]:.2f} now" if rewards else "no step yet"


def logged_errors(snapshot: Snapshot) -> Diagnosed | None:
    """Errors in the node's log of which no other rule knows."""
    errors = [each for each in snapshot.logged if each.is_error and each.message not in SILENT]
    if not errors:
        return None
    newest = errors[-1]
    return Diagnosed(
        name="logged_errors",
        claim=f"the node logged an error: {_words(newest)}",
        evidence=tuple(f"{each.count} times: {_words(each)} (warnings.jsonl)" for each in reversed(errors[-3:])),
        fix=f"mend what it names; then {snapshot.start}",
        gravity=Gravity.WASTES,
        certainty=Certainty.POSSIBLE,
    )


def _doubt(snapshot: Snapshot) -> Suspect | None:
    newest = _noted(snapshot, DOUBT)
    if newest is None:
        return None
    finding = Diagnosed(
        name="reference_worth_nothing",
        claim=f"right answers are worth no more than none, or are too long: {shortened(newest.fields)}",
        evidence=("noted before the start (warnings.jsonl); swarm check shows it again",),
        fix="a reward that knows a right answer by its reference (params.answer of the data names the field), and a "
        f"generator.max_new_tokens that has room for it: swarm check --config {snapshot.directory / 'node.toml'}",
        gravity=Gravity.NOTE,
        certainty=Certainty.LIKELY,
        key="environments.dataset",
    )
    return Suspect(finding=finding, explains=(NO_SIGNAL - {"cannot_be_scored", "cut_off"}) | OF_DOUBTS)


def _noted(snapshot: Snapshot, message: str) -> LoggedWarning | None:
    """What was noted under this message before the present or last process started."""
    since = snapshot.value("started_at_s", snapshot.now_s) - DOUBT_S
    return next((each for each in reversed(snapshot.warnings) if each.message == message and each.at_s >= since), None)


def _explained_by(logged: LoggedWarning) -> frozenset[str]:
    if logged.message in SILENT:
        return frozenset()
    parts = [part for part in EXPLAINS if f"{logged.logger}.".startswith(f"{part}.")]
    return EXPLAINS[max(parts, key=len)] if parts else frozenset()


def _warning(logged: LoggedWarning, explains: frozenset[str]) -> Suspect:
    finding = Diagnosed(
        name="log_says",
        claim=f"the node logged: {_words(logged)}",
        evidence=(f"{logged.level.lower()}, {logged.count} times (warnings.jsonl)",),
        fix="mend what it names",
        gravity=Gravity.NOTE,
        certainty=Certainty.LIKELY if logged.is_error else Certainty.POSSIBLE,
    )
    return Suspect(finding=finding, explains=explains)


def _words(logged: LoggedWarning) -> str:
    return shortened(f"{logged.message}: {logged.fields}" if logged.fields else logged.message)
