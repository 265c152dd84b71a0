"""Rules about other nodes: whether any are found, whether their groups can be used, and why not."""

from typing import Any, Final

from swarm.addresses import is_private_host
from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.snapshot import RECENT_STEPS, Snapshot, shortened
from swarm.types import NodeId, RefusalReason, short
from swarm.wire.held_manifest import HELD, Difference, in_words

PATIENCE_S: Final = 60.0  # a node needs some of them to find others
FEW_REFUSED: Final = 8
HARMLESS: Final = frozenset({RefusalReason.DUPLICATE, RefusalReason.COPIED})
_SETTINGS: Final = {
    RefusalReason.BAD_SAMPLING: (
        "generator.temperature or generator.max_new_tokens",
        "they sample otherwise than here",
    ),
    RefusalReason.WRONG_GROUP_SIZE: (
        "generator.group_size and generator.largest_group",
        "their groups have another size",
    ),
    RefusalReason.WRONG_RUN: ("run_id", "they belong to another run"),
    RefusalReason.TOO_LARGE: ("exchange.max_group_bytes", "their groups are larger than this node takes"),
    RefusalReason.UNUSABLE_CORRECTION: (
        "learner.recipe, recipe_without_logprobs and recipe_text_only",
        "the recipes here cannot learn from groups such as theirs",
    ),
}
_ENVIRONMENTS: Final = {
    RefusalReason.UNKNOWN_ENVIRONMENT: "this node has no environment of that name, or keeps it to itself",
    RefusalReason.UNKNOWN_TASK: "their tasks have numbers that do not exist here",
    RefusalReason.OTHER_ENVIRONMENT: "the environment of that name is another version there",
    RefusalReason.WRONG_EPISODE: "the same actions lead elsewhere here",
    RefusalReason.HELD_OUT: "they train on what is held out here",
    RefusalReason.NOT_BELIEVED: "the environment believes listed nodes only (scored_from)",
}
_TOKENS: Final = {
    RefusalReason.WRONG_PROMPT: "the prompt differs: another template, system message or tokenizer",
    RefusalReason.TEXT_MISMATCH: "their tokens decode to other text here",
    RefusalReason.BAD_TOKENS: "their tokens do not fit the vocabulary or the length here",
    RefusalReason.UNUSABLE_TEXT: "their text has characters that the tokenizer here does not keep",
}
_REST: Final = {
    RefusalReason.OVER_REPLAY_TIME: "scoring them again takes longer than sandbox.replay_s_per_minute allows",
    RefusalReason.BAD_VERSION: "they name versions that never were: their node began again with one key",
    RefusalReason.UNKNOWN_HEAD: "too little is known here of the versions that made them",
    RefusalReason.LOW_REPUTATION: "their makers sent too much before that was no good",
    RefusalReason.NO_CREDIT: "more come than this trainer granted credit for",
    RefusalReason.NO_ROOM: "there is no room for them here",
}
OF_REFUSALS: Final = frozenset(
    {
        "clock_is_wrong",
        "settings_differ",
        "environments_differ",
        "tokens_differ",
        "come_too_late",
        "no_entry",
        "liar",
        "quota_too_low",
    }
)


def _share(snapshot: Snapshot, num_refused: int) -> float:
    """Of the groups of others that came, those refused for some reasons; copies aside."""
    harmless = snapshot.refused_of(*HARMLESS)
    total = snapshot.num_admitted + sum(snapshot.refused.values()) - harmless
    return num_refused / max(1, total)


def _who(snapshot: Snapshot, *reasons: RefusalReason) -> tuple[list[NodeId], str]:
    """Producers of refused groups, most first, and the same in words."""
    counts: dict[NodeId, int] = {}
    for reason in reasons:
        for producer, count in snapshot.refused_by.get(str(reason), {}).items():
            counts[producer] = counts.get(producer, 0) + count
    ranked = sorted(counts, key=counts.__getitem__, reverse=True)
    shown = ", ".join(f"{short(each)} ({counts[each]})" for each in ranked[:4])
    return ranked, f"by producer: {shown} (refused in events.jsonl)" if shown else ""


def _counted(snapshot: Snapshot, reasons: list[RefusalReason]) -> str:
    named = ", ".join(f"{reason} {snapshot.refused[str(reason)]}" for reason in reasons)
    return f"refusals: {named}; admitted: {snapshot.num_admitted} (status.json)"


def _newest(snapshot: Snapshot, reason: RefusalReason) -> str:
    """Who was refused last for a reason, with what it had and what is expected here; "" where that is unknown."""
    producer, detail = snapshot.value("newest_refusals", {}).get(str(reason), ("", ""))
    return f" (the newest, of {short(producer)}: {shortened(detail)})" if detail else ""


def _newest_producer(snapshot: Snapshot, reason: RefusalReason) -> str:
    producer, _ = snapshot.value("newest_refusals", {}).get(str(reason), ("", ""))
    return f"node {short(producer)}" if producer else "their node"


def _differing(snapshot: Snapshot, name: str, reasons: list[RefusalReason], claim: str, fix: str) -> Diagnosed | None:
    """A finding about groups that do not fit this node, graver the more of them there are."""
    count = snapshot.refused_of(*reasons)
    share = _share(snapshot, count)
    is_all = share > 0.9
    # Where nothing of theirs fits, the streams of one side end after a dozen groups, and those of both with them.
    if count < (FEW_REFUSED // 2 if is_all else FEW_REFUSED) or share < 0.05:
        return None
    _, by = _who(snapshot, *reasons)
    return Diagnosed(
        name=name,
        claim=claim + _newest(snapshot, reasons[0]),
        evidence=tuple(filter(None, (_counted(snapshot, reasons), f"{share:.0%} of what came", by))),
        fix=fix,
        gravity=Gravity.HARMS if is_all or share > 0.3 else Gravity.WASTES,
        certainty=Certainty.SURE if is_all else Certainty.LIKELY,
        follows_from=frozenset({"clock_is_wrong", "differs_from_run"}),
    )


def _present(
    snapshot: Snapshot, reasons: dict[RefusalReason, str] | dict[RefusalReason, tuple[str, str]]
) -> list[RefusalReason]:
    found = [reason for reason in reasons if snapshot.refused[str(reason)]]
    return sorted(found, key=lambda reason: -snapshot.refused[str(reason)])


def _differences(snapshot: Snapshot) -> list[Difference] | None:
    """From the run's manifest; None where the node holds none."""
    found: list[Difference] | None = (snapshot.status or {}).get("differs_from_run")
    return found


def differs_from_run(snapshot: Snapshot) -> Diagnosed | None:
    """This node is set otherwise than the manifest of its run says."""
    found = _differences(snapshot)
    if not found:
        return None
    keys = ", ".join(str(key) for key, _, _ in found)
    return Diagnosed(
        name="differs_from_run",
        claim=f"this node is set otherwise than its run: {shortened(in_words(found))}; the others refuse its groups, "
        "and it refuses theirs",
        evidence=(f"node.toml, with --set, and {HELD} differ in {keys}",),
        fix=f"put {keys} in {snapshot.directory / 'node.toml'} as the run has them, or delete that file and join again "
        f"(key, groups and checkpoints stay); then {snapshot.start}",
        gravity=Gravity.HARMS,
    )


def settings_differ(snapshot: Snapshot) -> Diagnosed | None:
    """Groups of others are refused since a setting that must be equal is not."""
    present = _present(snapshot, _SETTINGS)
    if not present:
        return None
    keys, why = _SETTINGS[present[0]]
    if _differences(snapshot) == []:  # a manifest is there, and this node is as it says
        who = _newest_producer(snapshot, present[0])
        fix = f"here they are as the run's manifest says: {who} has to take {keys} of it, by joining again"
    else:
        fix = (
            f"compare {keys} in node.toml here and there (swarm samples --from own --json shows what is sampled here), "
            "and take those of the run: a node that joins by the link gets them from its manifest; then "
            + snapshot.start
        )
    return _differing(
        snapshot,
        "settings_differ",
        present,
        f"groups of others are refused, since {why}: {keys} must be equal on all nodes",
        fix,
    )


def environments_differ(snapshot: Snapshot) -> Diagnosed | None:
    """Groups of others are refused since environments of one name differ."""
    present = _present(snapshot, _ENVIRONMENTS)
    if not present:
        return None
    return _differing(
        snapshot,
        "environments_differ",
        present,
        f"groups of others are refused, since environments differ between the nodes: {_ENVIRONMENTS[present[0]]}",
        "make [[environments]] equal on all nodes: name, kind, dataset, params, seed, num_tasks, "
        "prompt, prefill, system and reward_weights, and the same version of their packages and files; "
        f"swarm check --config {snapshot.directory / 'node.toml'} shows these",
    )


def nobody_agrees(snapshot: Snapshot) -> Diagnosed | None:
    """That no group of others fits this node, for `swarm status`, which is to say nothing of a few odd peers.

    Only where none was admitted: what strangers send must not make a node that learns from others look broken.
    """
    if snapshot.num_admitted:
        return None
    found = (rule(snapshot) for rule in (settings_differ, environments_differ, tokens_differ))
    return next((each for each in found if each is not None), None)


def tokens_differ(snapshot: Snapshot) -> Diagnosed | None:
    """Groups of others are refused since prompt template or tokenizer differ."""
    present = _present(snapshot, _TOKENS)
    if not present:
        return None
    return _differing(
        snapshot,
        "tokens_differ",
        present,
        f"groups of others are refused, since tokenizer or prompt differ between the nodes: {_TOKENS[present[0]]}",
        "make model.source (its tokenizer and chat template) and prompt, prefill and system under "
        "[[environments]] equal "
        f"on all nodes; then {snapshot.start}. Where another tokenizer is meant: generator.byte_lengths = true on both",
    )


def liar(snapshot: Snapshot) -> Diagnosed | None:
    """Rewards that a peer claims are not those of the verifier here."""
    reason = RefusalReason.FALSE_REWARD
    count = snapshot.refused_of(reason, RefusalReason.VERIFIER_FAILED)
    if count < 3:
        return None
    producers, by = _who(snapshot, reason, RefusalReason.VERIFIER_FAILED)
    share = _share(snapshot, count)
    is_everybody = share > 0.9 and len(producers) > 1
    evidence = (_counted(snapshot, [reason]), *([by] if by else []))
    if is_everybody:
        claim = (
            "rewards that all others claim differ from those of the verifier here: environments or their "
            "packages differ"
        )
        fix = (
            "compare [[environments]] and the version of the packages that score (swarm check --config "
            f"{snapshot.directory / 'node.toml'}) here and there"
        )
    else:
        who = short(producers[0]) if producers else "a node"
        low = snapshot.refused_of(RefusalReason.LOW_REPUTATION)
        claim = f"node {who} claims rewards that its answers do not have: it lies, or scores with another version"
        claim += f"; {low} more of it were refused for its reputation" if low else ""
        fix = (
            "nothing: what it sends is refused here, and learned from by nobody; to shut it out, put its whole id "
            f"({producers[0] if producers else 'see events.jsonl'}) under entry.denied"
        )
    return Diagnosed(
        name="liar",
        claim=claim,
        evidence=evidence,
        fix=fix,
        gravity=Gravity.HARMS if is_everybody else Gravity.WASTES,
        certainty=Certainty.LIKELY,
        follows_from=frozenset({"environments_differ"}),
    )


def forgers(snapshot: Snapshot) -> Diagnosed | None:
    """Somebody sends what no honest node would send."""
    reasons = [
        RefusalReason.MALFORMED,
        RefusalReason.WRONG_SIGNATURE,
        RefusalReason.WRONG_DIGEST,
        RefusalReason.FORGED_PRODUCER,
        RefusalReason.BAD_LOGPROBS,
        RefusalReason.TOO_MANY_ITEMS,
    ]
    present = [reason for reason in reasons if snapshot.refused[str(reason)]]
    if snapshot.refused_of(*present) < FEW_REFUSED:
        return None
    _, by = _who(snapshot, *present)
    return Diagnosed(
        name="forgers",
        claim="a peer sends groups that are forged or damaged; all of them are refused",
        evidence=tuple(filter(None, (_counted(snapshot, present), by))),
        fix="nothing, as long as own steps go on; entry.denied shuts an id out",
        gravity=Gravity.WASTES,
    )


def come_too_late(snapshot: Snapshot) -> Diagnosed | None:
    """Groups of others are too old when they come."""
    late, future = snapshot.refused_of(RefusalReason.TOO_OLD), snapshot.refused_of(RefusalReason.FROM_THE_FUTURE)
    count = late + future
    share = _share(snapshot, count)
    if count < FEW_REFUSED or share < 0.2:
        return None
    _, by = _who(snapshot, RefusalReason.TOO_OLD, RefusalReason.FROM_THE_FUTURE)
    if future > late:
        claim = "groups of others come from the future: their clock is ahead of this node's, or this node's is behind"
        fix = "set the clocks of both machines (run NTP: timedatectl set-ntp true); swarm doctor asks the coordinator's"
    else:
        claim = "groups of others are too old when they come: they are slow, far away, or a clock is off"
        fix = (
            snapshot.set_key("replay.max_age_steps", 8)
            + "; and check the clocks (timedatectl): groups carry their maker's time"
        )
    return Diagnosed(
        name="come_too_late",
        claim=claim,
        evidence=tuple(
            filter(
                None,
                (
                    _counted(snapshot, [RefusalReason.TOO_OLD, RefusalReason.FROM_THE_FUTURE]),
                    f"{share:.0%} of what came",
                    by,
                ),
            )
        ),
        fix=fix,
        gravity=Gravity.HARMS if share > 0.9 else Gravity.WASTES,
        certainty=Certainty.LIKELY,
        follows_from=frozenset({"clock_is_wrong"}),
    )


def quota_too_low(snapshot: Snapshot) -> Diagnosed | None:
    """Groups of others are refused since they are more than this node takes from one peer."""
    reasons = [RefusalReason.OVER_QUOTA, RefusalReason.TOO_MANY_ITEMS]
    config, count = snapshot.config, snapshot.refused_of(*reasons)
    if config is None or not snapshot.refused[str(RefusalReason.OVER_QUOTA)]:
        return None
    quota = config.exchange.groups_per_minute
    if count < FEW_REFUSED or _share(snapshot, count) < 0.3 or quota >= 600:  # else it is a flood
        return None
    return Diagnosed(
        name="quota_too_low",
        key="exchange.groups_per_minute",
        claim=f"this node takes {quota} groups a minute from one peer, and they make more: the rest is refused",
        evidence=(_counted(snapshot, reasons), f"exchange.groups_per_minute = {quota} (node.toml)"),
        fix=snapshot.set_key("exchange.groups_per_minute", 6000),
        gravity=Gravity.HARMS,
        certainty=Certainty.SURE,
    )


def others_refused(snapshot: Snapshot) -> Diagnosed | None:
    """Groups of others are refused for a reason that no other rule tells."""
    present = _present(snapshot, _REST)
    if not present:
        return None
    return _differing(
        snapshot,
        "others_refused",
        present,
        f"groups of others are refused: {_REST[present[0]]}",
        ("docs/operating.md tells what each reason means; ask swarm why on the node that makes them, too"),
    )


def turns_others_away(snapshot: Snapshot) -> Diagnosed | None:
    """The entry rule here lets nobody in who calls."""
    count = snapshot.value("num_entry_refused", 0)
    if count < FEW_REFUSED // 2 or snapshot.value("peers", list[str]()):
        return None
    kind = "" if snapshot.config is None else f" (entry.kind = {snapshot.config.entry.kind})"
    return Diagnosed(
        name="turns_others_away",
        claim=f"this node turns away all others: they show nothing that its entry rule asks for{kind}",
        evidence=(f"num_entry_refused {count}, peers: none (status.json)",),
        fix="compare [entry] with the run's; list them under entry.members, or invite them: swarm-node invite ID",
        gravity=Gravity.HARMS,
        key="entry.kind",
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


def no_entry(snapshot: Snapshot) -> Diagnosed | None:
    """Others show nothing that lets them into the run."""
    count = snapshot.refused_of(RefusalReason.NO_ENTRY)
    if count < FEW_REFUSED or _share(snapshot, count) < 0.5:
        return None
    _, by = _who(snapshot, RefusalReason.NO_ENTRY)
    return Diagnosed(
        name="no_entry",
        claim="groups of others are refused, since the entry rule here does not let their makers into the run",
        evidence=tuple(filter(None, (_counted(snapshot, [RefusalReason.NO_ENTRY]), by))),
        fix="compare [entry] (kind, members) with the run's: a node that joins by the link follows its "
        "manifest; or invite "
        "them: swarm-node invite ID",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
    )


def cannot_dial(snapshot: Snapshot) -> Diagnosed | None:
    """Addresses of others do not answer, and nobody is connected."""
    dials: dict[str, int] = snapshot.value("dials", {})
    failed, answered = dials.get("failed", 0), dials.get("answered", 0)
    if snapshot.value("peers", list[str]()) or not failed or answered or snapshot.up_s < PATIENCE_S / 2:
        return None
    return Diagnosed(
        name="cannot_dial",
        claim="other nodes are known, and none of their addresses answers",
        evidence=(f"dials: {failed} failed, 0 answered; peers: none (status.json)",),
        fix="on them: exchange.advertise must be an address that others can dial (a mapped port, a public "
        "name), and the "
        f"firewall must let it through; swarm doctor --config {snapshot.directory / 'node.toml'} tries what is "
        f"set here",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        follows_from=frozenset({"clock_is_wrong", "coordinator_refuses"}),
    )


def nobody_can_dial(snapshot: Snapshot) -> Diagnosed | None:
    """Others are elsewhere, and the address that they get from this node is of this machine alone."""
    if snapshot.config is None or not snapshot.has_others:
        return None
    endpoints = snapshot.value("endpoints", list[str]())
    local = [each for each in endpoints if each.rpartition(":")[0].strip("[]") in ("127.0.0.1", "localhost", "::1")]
    known = [snapshot.config.coordinator.address.split(",")[0].rpartition(":")[0]]
    known += [each.split("/")[2] for each in snapshot.config.directory.bootstrap if each.count("/") > 3]
    far = [host for host in known if host and host not in ("127.0.0.1", "localhost", "::1")]
    if not local or len(local) < len(endpoints) or not far:
        return None
    kind = "in a private network" if is_private_host(far[0]) else "on the internet"
    return Diagnosed(
        name="nobody_can_dial",
        key="exchange.listen",
        claim="no other machine can dial this node: it announces an address of this machine alone",
        evidence=(f"endpoints: {', '.join(endpoints)} (status.json); the run is {kind} ({far[0]})",),
        fix=snapshot.set_key(
            "exchange.listen",
            "0.0.0.0:7700",
            why=', [exchange] advertise = "HOST:7700", and under '
            '[directory] listen = "/ip4/0.0.0.0/tcp/7701" and announce',
        ),
        gravity=Gravity.HARMS,
        certainty=Certainty.SURE,
    )


def no_relay(snapshot: Snapshot) -> Diagnosed | None:
    """Others cannot dial this node, and it has a reservation at no relay."""
    reach: dict[str, Any] = snapshot.value("reach", {})
    if reach.get("kind") != "outward" or reach.get("relays") or snapshot.up_s < PATIENCE_S / 2:
        return None
    return Diagnosed(
        name="no_relay",
        claim="nobody takes groups or weights from this node: others cannot dial it, and it holds no relay reservation",
        evidence=(f"reached: outward, through nobody; {reach.get('detail', '')} (status.json)",),
        fix="forward a TCP port to this machine and name it in exchange.listen and exchange.advertise, or have the "
        "operator set relay_reservations above 0 in coordinator.toml; swarm doctor LINK tries what this network allows",
        gravity=Gravity.HARMS,
        certainty=Certainty.SURE,
        follows_from=frozenset({"clock_is_wrong", "coordinator_refuses"}),
    )


def alone(snapshot: Snapshot) -> Diagnosed | None:
    """A node that looks for others has found none."""
    config = snapshot.config
    if config is None or not snapshot.has_others or snapshot.up_s < PATIENCE_S or snapshot.is_finished:
        return None
    if snapshot.value("peers", list[str]()) or snapshot.following is not None:
        return None
    wants = config.replay.external_groups > 0
    knows = bool(config.directory.bootstrap or config.coordinator.address)
    known = snapshot.value("known_peers", 0)
    if not knows:
        claim = "this node is alone: it is told of nobody (directory.bootstrap is empty), and nobody came"
        fix = "where others are there: " + snapshot.set_key("directory.bootstrap", "ADDRESS").replace(
            '"ADDRESS"', '["ADDRESS"], the row bootstrap of their swarm status'
        )
    else:
        claim = "this node is alone: no other node of the run was found"
        fix = (
            f"is anybody else there? swarm doctor --config {snapshot.directory / 'node.toml'} tries the "
            f"bootstrap addresses"
        )
    return Diagnosed(
        name="alone",
        claim=claim,
        evidence=(
            f"peers: none, known_peers {known} after {snapshot.up_s:.0f} s (status.json); bootstrap: "
            f"{len(config.directory.bootstrap)} addresses (node.toml)",
        ),
        fix=fix,
        gravity=Gravity.HARMS if wants and knows else Gravity.NOTE,
        certainty=Certainty.POSSIBLE,
        follows_from=frozenset(
            {"cannot_dial", "coordinator_refuses", "clock_is_wrong", "coordinator_away", "nobody_can_dial", "no_relay"}
            | {"turns_others_away"}
        ),
    )


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


def barrier_waits(snapshot: Snapshot) -> Diagnosed | None:
    """With a barrier every step waits for the slowest."""
    config = snapshot.config
    if config is None or not config.replay.barrier or not snapshot.made:
        return None
    recent = snapshot.made[-RECENT_STEPS:]
    waited = sum(step.seconds.get("draw_wait_s", step.seconds.get("draw_wait", 0.0)) for step in recent)
    span = recent[-1].at_s - recent[0].at_s
    if len(recent) < 5 or span <= 0 or waited / span < 0.8:
        return None
    return Diagnosed(
        name="barrier_waits",
        key="replay.barrier",
        claim="each step waits for the slowest node: replay.barrier is on",
        evidence=(f"{waited:.0f} s of {span:.0f} s waiting for a draw (seconds of step in events.jsonl)",),
        fix=snapshot.set_key("replay.barrier", False),
        gravity=Gravity.WASTES,
        certainty=Certainty.LIKELY,
    )
