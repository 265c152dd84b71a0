"""Rules about groups of others that come and are admitted: whether a step learns from them."""

from swarm.causes.connection_rules import PATIENCE_S
from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.refusal_rules import HARMLESS, OF_REFUSALS
from swarm.causes.snapshot import RECENT_STEPS, Snapshot


def no_external(snapshot: Snapshot) -> Diagnosed | None:
    """Peers are connected, and no group of theirs is learned from."""
    config, peers = snapshot.config, snapshot.value("peers", list[str]())
    if config is None or not config.replay.external_groups or not peers or not snapshot.is_trainer:
        return None
    made = [step for step in snapshot.made if step.at_s > (snapshot.started_at_s or 0.0)]
    if snapshot.value("num_external_used", 0) or len(made) < RECENT_STEPS or snapshot.up_s < PATIENCE_S / 2:
        return None
    num_refused = sum(snapshot.refused.values()) - snapshot.refused_of(*HARMLESS)
    if snapshot.num_admitted:
        claim = "groups of others come and are admitted, and none is learned from"
        fix = (
            "learn/guard_held_sources tells whether they are set aside; else replay.max_age_steps is too low "
            "for their delay"
        )
    elif num_refused:
        most, count = snapshot.refused.most_common(1)[0]
        claim = f"groups of others come, and all are refused (mostly {most}: {count})"
        fix = "docs/operating.md tells what each reason means"
    elif num_copies := snapshot.refused_of(*HARMLESS):
        claim = f"groups of others come, and all {num_copies} were known: they repeat what this node has seen before"
        fix = "are they nodes of their own? Two with one key, or the same deterministic one twice, make equal groups"
    else:
        claim = "other nodes are connected, and no group comes from them"
        fix = "ask swarm why on them: they may generate nothing, or only what has no signal"
    return Diagnosed(
        name="no_external",
        claim=claim,
        evidence=(
            f"{len(peers)} peers, {snapshot.num_admitted} groups admitted, {num_refused} refused, 0 "
            f"learned from in "
            f"{len(made)} steps (status.json)",
        ),
        fix=fix,
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        follows_from=OF_REFUSALS | {"all_set_aside", "held_out_falls", "coordinator_refuses"},
    )


def newcomers(snapshot: Snapshot) -> Diagnosed | None:
    """All others are newcomers here, who together fill an eighth of the places."""
    standing: dict[str, str] = snapshot.value("standing", {})
    config = snapshot.config
    if config is None or not standing or not config.replay.external_groups or not snapshot.is_trainer:
        return None
    fresh = [peer for peer, kind in standing.items() if kind == "newcomer"]
    if len(fresh) < len(standing):
        return None
    recent = snapshot.draws[-RECENT_STEPS:]
    used = sum(use.origin == "external" for draw in recent for use in draw.groups)
    places = sum(draw.num_places for draw in recent)
    return Diagnosed(
        name="newcomers",
        key="entry.established",
        claim="every other node is a newcomer here: all of them together fill at most an eighth of the places "
        "for groups of "
        "others",
        evidence=(
            f"standing: {len(fresh)} of {len(standing)} peers are newcomers (status.json); the newest "
            f"{len(recent)} draws took "
            f"{used} groups of others, of {places} places (draw in events.jsonl)",
        ),
        fix="list those whom you know under entry.members (of coordinator.toml, where there is one), or invite them: "
        'swarm-node invite ID; in a closed network: entry.established = "everybody"',
        gravity=Gravity.WASTES,
        certainty=Certainty.SURE,
    )
