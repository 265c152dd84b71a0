"""Rules about weights between nodes: generators without trainer, weights or credit; a trainer without followers."""

from typing import Final

from swarm.causes.connection_rules import PATIENCE_S
from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.pace_rules import no_newer_version, overdue
from swarm.causes.refusal_rules import OF_REFUSALS
from swarm.causes.snapshot import Snapshot, shortened
from swarm.events import (
    ApplyFailed,
    GroupPut,
    GroupUnscored,
    OwnerEquivocated,
    VersionApplied,
    VersionUnpublished,
    events_of,
)
from swarm.types import JsonDict, Role, short

SEARCH_S: Final = 15.0  # a node needs some of them to find a trainer


def no_trainer(snapshot: Snapshot) -> Diagnosed | None:
    """A generator has chosen nobody to follow, or somebody who publishes nothing."""
    following = snapshot.following
    if following is None:
        return None
    candidates, without_weights = following.get("candidates"), following["trainers_without_weights"]
    publish = (
        "on the trainer, in its node.toml under [weights]: publish = true (swarm join ... --set weights.publish=true)"
    )
    if candidates:
        names = ", ".join(map(short, candidates))
        claim = f"the run has {len(candidates)} trainers ({names}): set follow.policy to the id of the one to follow"
        fix = snapshot.set_key("follow.policy", candidates[0], why=" (the one that you mean)")
    elif not following["policy"] and without_weights:
        names = ", ".join(map(short, without_weights))
        claim = f"no trainer publishes weights (there is {names}): on the trainer set weights.publish=true"
        fix = publish
    elif not following["policy"]:
        if snapshot.started_at_s is not None and snapshot.up_s < SEARCH_S:
            return None  # it has only begun to search
        claim = "no trainer is in the directory: nobody to follow (follow.policy names one)"
        fix = (
            "is a trainer running that publishes weights, in the same run and reachable? swarm doctor --config "
            f"{snapshot.directory / 'node.toml'} tries coordinator and bootstrap addresses"
        )
    elif following["policy"] in without_weights and following["served_step"] is None:
        claim = f"the trainer {short(following['policy'])} publishes no weights: set weights.publish=true there"
        fix = publish
    else:
        return None
    return Diagnosed(
        name="no_trainer",
        claim=claim,
        evidence=_evidence(following),
        fix=fix,
        gravity=Gravity.STOPS if snapshot.up_s >= PATIENCE_S / 2 or candidates or without_weights else Gravity.HARMS,
        certainty=Certainty.SURE,
        follows_from=frozenset({"clock_is_wrong", "coordinator_refuses", "equivocated"}),
    )


def _evidence(following: JsonDict) -> tuple[str, ...]:
    keys = ("state", "served_step", "head_step", "is_trainer_connected", "credit", "num_applied")
    shown = ", ".join(f"{key} {following[key]}" for key in keys if key in following)
    return (f"following: {shown} (status.json)",)


def trainer_away(snapshot: Snapshot) -> Diagnosed | None:
    """The trainer that is followed is not connected."""
    following = snapshot.following
    if following is None or not following["policy"] or following["is_trainer_connected"]:
        return None
    if following["policy"] in following["trainers_without_weights"] and following["served_step"] is None:
        return None
    return Diagnosed(
        name="trainer_away",
        claim=f"the trainer {short(following['policy'])} does not answer: generation waits for its credit",
        evidence=_evidence(following),
        fix="is it running, and can its address be dialled from here (exchange.advertise there)? Where it is gone for "
        f"good: delete {snapshot.directory / 'followed.json'}, and follow.policy in node.toml",
        gravity=Gravity.STOPS,
        follows_from=frozenset({"clock_is_wrong", "coordinator_refuses", "equivocated", "cannot_dial", "worker_dies"}),
    )


def versions_refused(snapshot: Snapshot) -> Diagnosed | None:
    """The engine does not take versions of the trainer."""
    following = snapshot.following
    failed = events_of(ApplyFailed, snapshot.events)
    applied = events_of(VersionApplied, snapshot.events)
    newest = failed[-1] if failed and (not applied or failed[-1].at_s > applied[-1].at_s) else None
    error = (following or {}).get("last_error") or (newest.error if newest else "")
    if following is None or not error:
        return None
    served = following["served_step"]
    is_other = served is None and not applied
    hint = (
        "model.source and model.dtype must be those of the trainer (swarm join takes them from the manifest); "
        if is_other
        else "engine and trainer compute log-probs too differently: engine.tolerance_nats, docs/engines.md; "
    )
    return Diagnosed(
        name="versions_refused",
        claim=f"the engine did not take a version and serves step {served} on: {shortened(error)}",
        evidence=(
            f"{len(failed)} versions were not taken, {len(applied)} were (apply_failed, applied in events.jsonl)",
            *_evidence(following),
        ),
        fix=f"{hint}then {snapshot.start}",
        gravity=Gravity.STOPS if is_other else Gravity.HARMS,
        follows_from=frozenset({"disk_full", "out_of_memory"}),
    )


def no_weights_yet(snapshot: Snapshot) -> Diagnosed | None:
    """A trainer is followed and connected, and no version of it is served."""
    following = snapshot.following
    if following is None or not following["is_trainer_connected"] or following["served_step"] is not None:
        return None
    if snapshot.up_s < PATIENCE_S / 2 or following.get("last_error") or following["trainers_without_weights"]:
        return None
    return Diagnosed(
        name="no_weights_yet",
        claim=f"no version of the trainer {short(following['policy'])} has come in {snapshot.up_s:.0f} s",
        evidence=_evidence(following),
        fix="a faster connection; room for one version at least in weights.store_bytes, here and on the trainer",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        follows_from=frozenset({"clock_is_wrong", "coordinator_refuses", "equivocated", "cannot_dial", "disk_full"}),
    )


def no_credit(snapshot: Snapshot) -> Diagnosed | None:
    """The trainer is connected, its weights are served, and it grants nothing."""
    following = snapshot.following
    if following is None or not following["is_trainer_connected"] or following["served_step"] is None:
        return None
    idle_s = snapshot.at_s - snapshot.value("last_step_at_s", snapshot.at_s)
    if following.get("credit", 1) > 0 or (
        idle_s < snapshot.max_idle_s / 2 and overdue(snapshot, GroupPut, GroupUnscored) is None
    ):
        return None
    stands = no_newer_version(snapshot)
    claim = f"the trainer {short(following['policy'])} grants no credit" + (
        f" and makes no steps ({stands}): it is paused, was stopped, or waits itself"
        if stands
        else ": it can use no more groups than it gets"
    )
    asked = "ask swarm why and swarm status on the trainer (swarm resume, where it is paused). " if stands else ""
    return Diagnosed(
        name="no_credit",
        claim=claim,
        evidence=(*_evidence(following), f"no group for {idle_s:.0f} s (last_step_at_s)"),
        fix=f"{asked}swarm plan --run RUN tells how many generators a trainer needs; where it makes no steps, "
        "ask swarm why there. A machine too slow for replay.max_age_steps gets little: smaller batches ([generator] "
        "groups_per_batch = 1)",
        gravity=Gravity.STOPS,
        certainty=Certainty.LIKELY,
    )


def equivocated(snapshot: Snapshot) -> Diagnosed | None:
    """The trainer signed two versions of one step."""
    events = events_of(OwnerEquivocated, snapshot.events)
    if snapshot.following is None or not events:
        return None
    newest = events[-1]
    return Diagnosed(
        name="equivocated",
        claim=f"the trainer {short(newest.policy_id)} signed two versions of step {newest.step}: it is followed "
        f"no longer",
        evidence=(f"{newest.first[:16]} and {newest.second[:16]} (equivocated in events.jsonl)",),
        fix="ask who runs it: two processes with one key do this, too; to follow another: "
        + snapshot.set_key("follow.policy", "ID"),
        gravity=Gravity.STOPS,
    )


def not_published(snapshot: Snapshot) -> Diagnosed | None:
    """A trainer cannot offer its versions."""
    events = events_of(VersionUnpublished, snapshot.events)
    if not events or events[-1].step < snapshot.value("published_step", -1):
        return None
    return Diagnosed(
        name="not_published",
        claim=f"version {events[-1].step} could not be offered to followers: {shortened(events[-1].error)}",
        evidence=(f"unpublished in events.jsonl, {len(events)} times",),
        fix=snapshot.set_key("weights.store_bytes", 16 * 2**30, why=" (more than now), or make room on the disk"),
        gravity=Gravity.HARMS,
        follows_from=frozenset({"disk_full"}),
    )


def nobody_follows(snapshot: Snapshot) -> Diagnosed | None:
    """A trainer that leaves generation to others has no follower."""
    config = snapshot.config
    if config is None or Role.GENERATOR in config.roles or Role.TRAINER not in config.roles or snapshot.is_finished:
        return None
    if not config.weights.publish or snapshot.value("followers", dict[str, JsonDict]()) or snapshot.status is None:
        return None
    if snapshot.up_s < PATIENCE_S / 2:
        return None
    return Diagnosed(
        name="nobody_follows",
        key="roles",
        claim="this node only trains, and nobody generates for it",
        evidence=(f"roles: trainer; followers: none after {snapshot.up_s:.0f} s (status.json)",),
        fix="start generators (swarm join LINK --dir my-generator --generate), or let it generate, too: in "
        f'{snapshot.directory / "node.toml"} set roles = ["trainer", "generator"]',
        gravity=Gravity.STOPS,
        certainty=Certainty.SURE,
        follows_from=frozenset(
            {"clock_is_wrong", "coordinator_refuses", "not_published", "nobody_can_dial", "no_relay"} | OF_REFUSALS
        ),
    )


def far_behind(snapshot: Snapshot) -> Diagnosed | None:
    """The engine serves versions much older than the newest."""
    following = snapshot.following
    if following is None or following["served_step"] is None or following.get("last_error"):
        return None
    behind = (following.get("head_step") or 0) - following["served_step"]
    bound = 4 if snapshot.config is None else snapshot.config.replay.max_age_steps
    if behind <= max(2, bound):
        return None
    return Diagnosed(
        name="far_behind",
        claim=f"this generator is {behind} versions behind its trainer, which may use at most {bound} steps of age",
        evidence=_evidence(following),
        fix="a faster connection or a trainer that steps more slowly; where generation is slow, smaller batches "
        "([generator] groups_per_batch = 1)",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        follows_from=frozenset({"disk_full", "trainer_away", "hangs"}),
    )
