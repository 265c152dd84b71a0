"""Rules about the coordinator: whether it answers and lets the node in, its clock, and the manifest of the run."""

from swarm.causes.connection_rules import PATIENCE_S
from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.snapshot import Snapshot, shortened
from swarm.wire.held_manifest import HELD, Difference, in_words


def manifest_differences(snapshot: Snapshot) -> list[Difference] | None:
    """From the run's manifest; None where the node holds none."""
    found: list[Difference] | None = (snapshot.status or {}).get("differs_from_run")
    return found


def differs_from_run(snapshot: Snapshot) -> Diagnosed | None:
    """This node is set otherwise than the manifest of its run says."""
    found = manifest_differences(snapshot)
    if not found:
        return None
    keys = ", ".join(str(key) for key, _, _ in found)
    return Diagnosed(
        name="differs_from_run",
        claim=f"this node is set otherwise than its run: {shortened(in_words(found))}; those who are set as the run "
        "refuse its groups, and it refuses theirs",
        evidence=(f"node.toml, with --set, and {HELD} differ in {keys}",),
        fix=f"put {keys} in {snapshot.directory / 'node.toml'} as the run has them, or delete that file and join again "
        f"(key, groups and checkpoints stay); then {snapshot.start}",
        gravity=Gravity.HARMS,
    )


def clock_is_wrong(snapshot: Snapshot) -> Diagnosed | None:
    """Coordinator and peers name another time than this machine."""
    finding = snapshot.value("clock", "")
    if not finding:
        return None
    return Diagnosed(
        name="clock_is_wrong",
        claim=shortened(finding),
        evidence=("clock (status.json), measured at each Hello",),
        fix="set the clock: timedatectl set-ntp true (or chronyc makestep); the node goes on by itself",
        gravity=Gravity.HARMS,
    )


def coordinator_refuses(snapshot: Snapshot) -> Diagnosed | None:
    """The coordinator does not let this node in."""
    refusal = snapshot.value("coordinator_refusal", "")
    if not refusal:
        return None
    if "denie" in refusal:
        fix = "ask who runs it why (entry.denied in coordinator.toml); another key is another node: delete identity.key"
    elif "manifest" in refusal:
        fix = "join again by the link that the coordinator prints now: swarm join LINK --dir NEW"
    elif "expected node" in refusal or "fingerprint" in refusal:
        fix = (
            "the coordinator there has another key than the one of this node's link: ask who runs it whether that is "
            "meant. If so, delete node.toml and manifest.json here and join by its link of now (key, groups and "
            f"checkpoints stay): swarm join LINK --dir {snapshot.directory}"
        )
    else:
        fix = (
            "ask a member for an invitation (swarm-node invite ID, with the id of swarm-node id --dir "
            f"{snapshot.directory}), then swarm join LINK --invitation TEXT; or compare run_id and fingerprint "
            f"with the link"
        )
    return Diagnosed(
        name="coordinator_refuses",
        claim=f"the coordinator refuses this node: {shortened(refusal)}",
        evidence=("coordinator_refusal (status.json)",),
        fix=fix,
        gravity=Gravity.HARMS,
        follows_from=frozenset({"clock_is_wrong"}),
    )


def coordinator_away(snapshot: Snapshot) -> Diagnosed | None:
    """The coordinator does not answer; a node works without it."""
    is_away = (snapshot.status or {}).get("is_coordinator_reachable") is False
    if not is_away or snapshot.value("coordinator_refusal", "") or snapshot.up_s < PATIENCE_S:
        return None
    address = "" if snapshot.config is None else snapshot.config.coordinator.address
    return Diagnosed(
        name="coordinator_away",
        claim=f"the coordinator does not answer ({shortened(address)}); the node goes on without it",
        evidence=("is_coordinator_reachable false (status.json)",),
        fix=f"is it running, and its port open? swarm doctor --config {snapshot.directory / 'node.toml'} tries it",
        gravity=Gravity.WASTES if not snapshot.value("peers", list[str]()) else Gravity.NOTE,
        certainty=Certainty.LIKELY,
    )


def coordinator_alarm(snapshot: Snapshot) -> Diagnosed | None:
    """The coordinator's advisor sees late groups off policy at many nodes."""
    if snapshot.value("advice", "ok") != "alarm":
        return None
    return Diagnosed(
        name="coordinator_alarm",
        claim="the coordinator's alarm: late groups are far off-policy everywhere (local limits still hold)",
        evidence=("advice (status.json)",),
        fix="a lower replay.max_age_steps on all nodes, or a lower learner.learning_rate; the alarm ends by itself",
        gravity=Gravity.WASTES,
        follows_from=frozenset({"learning_rate_too_high"}),
    )
