"""Rules about other nodes: coordinator, connections, refused groups, and weights between trainer and generators.

Invariant: each rule is a pure function of a snapshot. The table in `swarm.diagnosis.rules` orders them.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from swarm.addresses import is_private_host
from swarm.diagnosis.learning_rules import overdue
from swarm.diagnosis.snapshot import RECENT_STEPS, Diagnosed, Gravity, Snapshot, shortened
from swarm.events import (
    ApplyFailed,
    GroupAdmitted,
    GroupPut,
    GroupUnscored,
    OwnerEquivocated,
    VersionApplied,
    VersionUnpublished,
    events_of,
)
from swarm.printable import as_argument
from swarm.types import JsonDict, NodeId, RefusalReason, Role, short
from swarm.wire.held_manifest import HELD, Difference, in_words

PATIENCE_S: Final = 60.0  # a node needs some of them to find others
SEARCH_S: Final = 15.0  # the same, for a trainer
FEW_CALLERS: Final = 4
FEW_REFUSED: Final = 8
MOST_SHARE: Final = 0.9
HARMLESS: Final = frozenset({RefusalReason.DUPLICATE, RefusalReason.COPIED})
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


def _peers(snapshot: Snapshot) -> list[str]:
    return snapshot.value("peers", list[str]())


# --- the coordinator --------------------------------------------------------------------------------------


def _differences(snapshot: Snapshot) -> list[Difference] | None:
    """Returns the differences from the run's manifest; None if the node has no manifest."""
    found: list[Difference] | None = (snapshot.status or {}).get("differs_from_run")
    return found


def differs_from_run(snapshot: Snapshot) -> Diagnosed | None:
    """Finds settings of this node that differ from its run's manifest."""
    found = _differences(snapshot)
    if not found:
        return None
    keys = ", ".join(str(key) for key, _, _ in found)
    return Diagnosed(
        claim=f"this node is set otherwise than its run: {shortened(in_words(found))}; nodes that are set as the run "
        "refuse its groups, and it refuses theirs",
        fix=f"put {keys} in {snapshot.toml} as the run has them, or delete that file and join again (key, groups and "
        f"checkpoints stay); then {snapshot.start}",
        evidence=(f"node.toml, with --set, and {HELD} differ in {keys}",),
    )


def clock_is_wrong(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a clock that differs from those of coordinator and peers."""
    finding = snapshot.value("clock", "")
    if not finding:
        return None
    return Diagnosed(
        claim=shortened(finding),
        fix="set the clock: timedatectl set-ntp true (or chronyc makestep); the node goes on by itself",
    )


def coordinator_refuses(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a coordinator that does not let this node in."""
    refusal = snapshot.value("coordinator_refusal", "")
    if not refusal:
        return None
    if "denie" in refusal:
        fix = "ask its operator why (entry.denied in coordinator.toml); another key is another node: "
        fix += "delete identity.key"
    elif "manifest" in refusal:
        fix = "join again by the link that the coordinator prints now: swarm join LINK --dir NEW"
    elif "expected node" in refusal or "fingerprint" in refusal:
        fix = (
            "the coordinator there has another key than the one of this node's link: ask its operator whether that is "
            "meant. If so, delete node.toml and manifest.json here and join by its link of now (key, groups and "
            f"checkpoints stay): swarm join LINK --dir {snapshot.directory}"
        )
    else:
        fix = (
            "ask a member for an invitation (swarm-node invite ID, with the id of swarm-node id --dir "
            f"{snapshot.directory}), then swarm join LINK --invitation TEXT; or compare run_id and fingerprint with "
            "the link"
        )
    return Diagnosed(claim=f"the coordinator refuses this node: {shortened(refusal)}", fix=fix)


def coordinator_away(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a coordinator that does not answer; a node with peers works without it."""
    is_away = (snapshot.status or {}).get("is_coordinator_reachable") is False
    if not is_away or snapshot.up_s < PATIENCE_S:
        return None
    address = "" if snapshot.config is None else snapshot.config.coordinator.address
    return Diagnosed(
        claim=f"the coordinator does not answer ({shortened(address)}); the node goes on without it",
        fix=f"is it running, and its port open? swarm doctor {as_argument(snapshot.directory)} tries it",
        gravity=Gravity.NOTE if _peers(snapshot) else Gravity.WASTES,
    )


def coordinator_alarm(snapshot: Snapshot) -> Diagnosed | None:
    """Finds late groups that the coordinator sees far off policy at many nodes."""
    if snapshot.value("advice", "ok") != "alarm":
        return None
    return Diagnosed(
        claim="the coordinator's alarm: late groups are far off-policy everywhere (local limits still hold)",
        fix="a lower replay.max_age_steps on all nodes, or a lower learner.learning_rate; the alarm ends by itself",
    )


# --- connections ------------------------------------------------------------------------------------------


def turns_others_away(snapshot: Snapshot) -> Diagnosed | None:
    """Finds an entry rule of this node that refuses every caller."""
    count = snapshot.value("num_entry_refused", 0)
    if count < FEW_CALLERS or _peers(snapshot):
        return None
    kind = "" if snapshot.config is None else f" (entry.kind = {snapshot.config.entry.kind})"
    return Diagnosed(
        claim=f"this node turns away all others: they show nothing that its entry rule asks for{kind}",
        fix="compare [entry] with the run's; list them under entry.members, or invite them: swarm-node invite ID",
        evidence=(f"num_entry_refused {count}, peers: none (status.json)",),
        key="entry.kind",
    )


def cannot_dial(snapshot: Snapshot) -> Diagnosed | None:
    """Finds that every dial to other nodes failed, while this node has no peers."""
    dials: dict[str, int] = snapshot.value("dials", {})
    failed = dials.get("failed", 0)
    if _peers(snapshot) or not failed or dials.get("answered", 0) or snapshot.up_s < PATIENCE_S / 2:
        return None
    error = shortened(snapshot.value("newest_dial_error", ""))
    return Diagnosed(
        claim="other nodes are known, and none of their addresses answers" + (f": {error}" if error else ""),
        fix="on them: exchange.advertise must be an address that others can dial (a mapped port, a public name), and "
        f"the firewall must let it through; swarm doctor {as_argument(snapshot.directory)} tries what is set here",
        evidence=(f"dials: {failed} failed, 0 answered; peers: none (status.json)",),
    )


def nobody_can_dial(snapshot: Snapshot) -> Diagnosed | None:
    """Finds an announced address that only this machine can reach, while the run is on other machines."""
    config, endpoints = snapshot.config, snapshot.value("endpoints", list[str]())
    if config is None or not snapshot.has_others:
        return None
    is_local = bool(endpoints) and all(each.rpartition(":")[0].strip("[]") in LOOPBACK for each in endpoints)
    known = [address.rpartition(":")[0] for address in config.coordinator.addresses[:1]]
    known += [each.split("/")[2] for each in config.directory.bootstrap if each.count("/") > 3]
    far = [host for host in known if host and host not in LOOPBACK]
    if not is_local or not far:
        return None
    where = "in a private network" if is_private_host(far[0]) else "on the internet"
    listen = ', [exchange] advertise = "HOST:7700", and under [directory] listen = "/ip4/0.0.0.0/tcp/7701" and announce'
    return Diagnosed(
        claim="no other machine can dial this node: it announces an address of this machine alone",
        fix=snapshot.set_key("exchange.listen", "0.0.0.0:7700", why=listen),
        evidence=(f"endpoints: {', '.join(endpoints)} (status.json); the run is {where} ({far[0]})",),
        key="exchange.listen",
    )


def no_relay(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a node that others cannot dial, without a reservation at a relay."""
    reach: dict[str, Any] = snapshot.value("reach", {})
    if reach.get("kind") != "outward" or reach.get("relays") or snapshot.up_s < PATIENCE_S / 2:
        return None
    return Diagnosed(
        claim="nobody takes groups or weights from this node: others cannot dial it, and it holds no relay reservation",
        fix="forward a TCP port to this machine and name it in exchange.listen and exchange.advertise, or have the "
        "operator set relay_reservations above 0 in coordinator.toml; swarm doctor LINK tries what this network allows",
        evidence=(f"reached: outward, through nobody; {reach.get('detail', '')} (status.json)",),
    )


def directory_is_off(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a configuration that names other nodes although the node runs alone."""
    config = snapshot.config
    if config is None or config.directory.kind != "none":
        return None
    counts = (("directory.bootstrap", config.directory.bootstrap), ("exchange.anchors", config.exchange.anchors))
    named = [f"{key} ({len(each)})" for key, each in counts if each]
    if not named:
        return None
    return Diagnosed(
        claim='the node runs alone, as directory.kind is "none", though other nodes are named',
        fix=snapshot.set_key("directory.kind", "dht") + "; to leave it alone, take their addresses out",
        evidence=(f"{' and '.join(named)} (node.toml)",),
        key="directory.kind",
    )


def is_lonely(snapshot: Snapshot) -> bool:
    """True if a node that looks for others has no peer after a while; the first node of a run looks the same."""
    is_done = snapshot.is_finished or snapshot.up_s < PATIENCE_S / 3
    return snapshot.has_others and not is_done and not _peers(snapshot)


def alone(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a node that looks for others and has found none, or has lost all of them."""
    config = snapshot.config
    if config is None or snapshot.following is not None or snapshot.up_s < PATIENCE_S or not is_lonely(snapshot):
        return None
    newest_s = max((event.at_s for event in events_of(GroupAdmitted, snapshot.events)), default=0.0)
    are_gone = snapshot.started_at_s is not None and newest_s >= snapshot.started_at_s
    if are_gone and snapshot.at_s - newest_s < PATIENCE_S and overdue(snapshot, GroupAdmitted) is None:
        return None
    knows = bool(config.directory.bootstrap or config.coordinator.address)
    if are_gone:
        claim = f"the other nodes are gone: none is connected, and the newest of the {snapshot.num_admitted} groups "
        claim += f"that came is {snapshot.at_s - newest_s:.0f} s old"
        fix = "do they run (swarm why on them), and does the network between still work? This node goes on alone"
    elif knows:
        claim = "this node is alone: no other node of the run was found"
        fix = (
            f"is anybody else there, with the same run_id ({config.run_id}) and directory.shards "
            f"({config.directory.shards}), and do both clocks show the same time (timedatectl)? "
            f"swarm doctor {as_argument(snapshot.directory)} tries the bootstrap addresses"
        )
    else:
        claim = "this node is alone: it knows nobody (directory.bootstrap is empty), and nobody came"
        fix = "to meet others, set directory.bootstrap to the row bootstrap of their swarm status"
    error = shortened(snapshot.value("newest_dial_error", ""))
    return Diagnosed(
        claim=claim + (f"; the newest dial failed: {error}" if error else ""),
        fix=fix,
        evidence=(f"peers: none, known_peers {snapshot.value('known_peers', 0)} after {snapshot.up_s:.0f} s (status)",),
        gravity=Gravity.HARMS if config.replay.external_groups and (knows or are_gone) else Gravity.NOTE,
    )


# --- refused groups ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusalFamily:
    """A rule about reasons of refusal that share a fix; the claim names the most frequent reason."""

    claim: str  # with {why} and {keys}
    fix: str  # with {who}, {config} and {start}
    words: dict[RefusalReason, str]  # reason -> why, and after a `|` the keys that must be equal

    def __call__(self, snapshot: Snapshot) -> Diagnosed | None:
        """Applies the rule: the finding about these refusals; None if their number or share is small."""
        present = sorted((each for each in self.words if snapshot.refused[each]), key=lambda r: -snapshot.refused[r])
        count = snapshot.refused_of(*present)
        share = _share(snapshot, count)
        # Where none of their groups fits, the streams end after a dozen groups.
        if count < (FEW_REFUSED // 2 if share > MOST_SHARE else FEW_REFUSED) or share < 0.05:
            return None
        producer, detail = snapshot.value("newest_refusals", {}).get(str(present[0]), ("", ""))
        newest = f" (the newest, of {short(producer)}: {shortened(detail)})" if detail else ""
        why, _, keys = self.words[present[0]].partition("|")
        who = f"node {short(producer)}" if producer else "their node"
        fix = self.fix
        if keys and _differences(snapshot) == []:  # a manifest is there, and this node is as it says
            fix = "here they are as the run's manifest says: {who} has to take {keys} of it, by joining again"
        return Diagnosed(
            claim=self.claim.format(why=why, keys=keys) + newest,
            fix=fix.format(who=who, keys=keys, directory=as_argument(snapshot.directory), start=snapshot.start),
            evidence=(_counts(snapshot, *present), f"{share:.0%} of the groups that came", _by(snapshot, *present)[1]),
            gravity=Gravity.HARMS if share > 0.3 else Gravity.WASTES,
        )


settings_differ: Final = RefusalFamily(
    claim="groups of others are refused, since {why}: {keys} must be equal on all nodes",
    fix="compare {keys} in node.toml here and there (swarm samples --from own --json shows what is sampled here), and "
    "take those of the run: a node that joins by the link gets them from its manifest; then {start}",
    words={
        RefusalReason.BAD_SAMPLING: "they sample otherwise than here|generator.temperature or generator.max_new_tokens",
        RefusalReason.WRONG_GROUP_SIZE: "their groups have another size|"
        "generator.group_size and generator.largest_group",
        RefusalReason.WRONG_RUN: "they belong to another run|run_id",
        RefusalReason.TOO_LARGE: "their groups are larger than this node takes|exchange.max_group_bytes",
        RefusalReason.UNUSABLE_CORRECTION: "the recipes here cannot learn from groups such as theirs|learner.recipe, "
        "recipe_without_logprobs and recipe_text_only",
    },
)
environments_differ: Final = RefusalFamily(
    claim="groups of others are refused, since environments differ between the nodes: {why}",
    fix="make [[environments]] equal on all nodes: name, kind, dataset, params, seed, num_tasks, prompt, prefill, "
    "system and reward_weights, and the same version of their packages and files; swarm check {directory} shows "
    "these",
    words={
        RefusalReason.UNKNOWN_ENVIRONMENT: "this node has no environment of that name, or keeps it to itself",
        RefusalReason.UNKNOWN_TASK: "their tasks have numbers that do not exist here",
        RefusalReason.OTHER_ENVIRONMENT: "the environment of that name is another version there",
        RefusalReason.WRONG_EPISODE: "the same actions lead elsewhere here",
        RefusalReason.HELD_OUT: "they train on what is held out here",
        RefusalReason.NOT_BELIEVED: "the environment believes listed nodes only (scored_from)",
    },
)
tokens_differ: Final = RefusalFamily(
    claim="groups of others are refused, since tokenizer or prompt differ between the nodes: {why}",
    fix="make model.source (its tokenizer and chat template) and prompt, prefill and system under [[environments]] "
    "equal on all nodes; then {start}. If another tokenizer is meant: generator.byte_lengths = true on both",
    words={
        RefusalReason.WRONG_PROMPT: "the prompt differs: another template, system message or tokenizer",
        RefusalReason.TEXT_MISMATCH: "their tokens decode to other text here",
        RefusalReason.BAD_TOKENS: "their tokens do not fit the vocabulary or the length here",
        RefusalReason.UNUSABLE_TEXT: "their text has characters that the tokenizer here does not keep",
    },
)
others_refused: Final = RefusalFamily(
    claim="groups of others are refused: {why}",
    fix="docs/operating.md tells what each reason means; ask swarm why on the node that makes them, too",
    words={
        RefusalReason.NO_ENTRY: "the entry rule here does not let their makers into the run: compare [entry] (kind, "
        "members) with the run's, or invite them (swarm-node invite ID)",
        RefusalReason.OVER_REPLAY_TIME: "scoring them again takes longer than 15 s of a minute",
        RefusalReason.BAD_VERSION: "they name versions that never were: their node began again with one key",
        RefusalReason.UNKNOWN_HEAD: "too little is known here of the versions that made them",
        RefusalReason.LOW_REPUTATION: "their makers sent too many bad groups before",
        RefusalReason.NO_CREDIT: "more come than this trainer granted credit for",
        RefusalReason.NO_ROOM: "there is no room for them here",
        RefusalReason.VERIFIER_FAILED: "the verifier here fails on their answers: its package, sandbox.timeout_s or "
        "sandbox.memory_bytes may be other than there",
    },
)


def _share(snapshot: Snapshot, num_refused: int) -> float:
    """Share of `num_refused` in the groups of others that came, except harmless refusals such as copies."""
    total = snapshot.num_admitted + sum(snapshot.refused.values()) - snapshot.refused_of(*HARMLESS)
    return num_refused / max(1, total)


def _by(snapshot: Snapshot, *reasons: RefusalReason) -> tuple[list[NodeId], str]:
    """Returns the producers of groups refused for these reasons, the most frequent first, and the same in words."""
    counts = Counter[NodeId]()
    for reason in reasons:
        counts.update(snapshot.refused_by.get(str(reason), Counter()))
    shown = ", ".join(f"{short(each)} ({count})" for each, count in counts.most_common(4)) or "not known"
    return [each for each, _ in counts.most_common()], f"by producer: {shown} (refused in events.jsonl)"


def _counts(snapshot: Snapshot, *reasons: RefusalReason) -> str:
    named = ", ".join(f"{reason} {snapshot.refused[reason]}" for reason in reasons)
    return f"refusals: {named}; admitted: {snapshot.num_admitted} (status.json)"


def nobody_agrees(snapshot: Snapshot) -> Diagnosed | None:
    """Finds groups of others that are refused for their settings, environments or tokens, if none was admitted.

    With an admitted group nothing is found: strangers must not make a node that learns from others look broken.
    """
    if snapshot.num_admitted:
        return None
    found = (rule(snapshot) for rule in (settings_differ, environments_differ, tokens_differ))
    return next((each for each in found if each is not None), None)


def come_too_late(snapshot: Snapshot) -> Diagnosed | None:
    """Finds groups of others that are too old when they come, or from the future."""
    reasons = (RefusalReason.TOO_OLD, RefusalReason.FROM_THE_FUTURE)
    late, future = (snapshot.refused[reason] for reason in reasons)
    share = _share(snapshot, late + future)
    if late + future < FEW_REFUSED or share < 0.2:
        return None
    if future > late:
        claim = "groups of others come from the future: their clock is ahead of this node's, or this node's is behind"
        fix = "set the clocks of both machines (run NTP: timedatectl set-ntp true); swarm doctor asks the coordinator's"
    else:
        claim = "groups of others are too old when they come: they are slow, far away, or a clock is off"
        fix = snapshot.set_key("replay.max_age_steps", 8)
        fix += "; and check the clocks (timedatectl): groups carry their maker's time"
    return Diagnosed(
        claim=claim,
        fix=fix,
        evidence=(_counts(snapshot, *reasons), f"{share:.0%} of the groups that came", _by(snapshot, *reasons)[1]),
        key="" if future > late else "replay.max_age_steps",
        gravity=Gravity.HARMS if share > MOST_SHARE else Gravity.WASTES,
    )


def liar(snapshot: Snapshot) -> Diagnosed | None:
    """Finds rewards claimed by a peer that are not those of the verifier here."""
    reasons = (RefusalReason.FALSE_REWARD, RefusalReason.VERIFIER_FAILED)
    count, num_false = snapshot.refused_of(*reasons), snapshot.refused[RefusalReason.FALSE_REWARD]
    if count < 3 or num_false < count / 2:  # else `others_refused`: nobody knows what they are worth
        return None
    producers, by = _by(snapshot, *reasons)
    is_everybody = _share(snapshot, count) > MOST_SHARE and len(producers) > 1
    if is_everybody:
        claim = "rewards that all others claim differ from those of the verifier here: environments or their packages "
        claim += "differ"
        fix = "compare [[environments]] and the version of the packages that score (swarm check "
        fix += f"{as_argument(snapshot.directory)}) here and there"
    else:
        who, low = short(producers[0]) if producers else "a node", snapshot.refused[RefusalReason.LOW_REPUTATION]
        claim = f"node {who} claims rewards that its answers do not have: it lies, or scores with another version"
        claim += f"; {low} more of it were refused for its reputation" if low else ""
        fix = "nothing: its groups are refused here, and learned from by nobody; to shut it out, put its whole id "
        fix += f"({producers[0] if producers else 'see events.jsonl'}) under entry.denied"
    return Diagnosed(
        claim=claim,
        fix=fix,
        evidence=(_counts(snapshot, RefusalReason.FALSE_REWARD), by),
        gravity=Gravity.HARMS if is_everybody else Gravity.WASTES,
    )


def no_external(snapshot: Snapshot) -> Diagnosed | None:
    """Finds connected peers whose groups are never learned from."""
    config = snapshot.config
    followers = snapshot.value("followers", dict[str, object]())  # their groups are of our own policy
    peers = [peer for peer in _peers(snapshot) if peer not in followers]
    if config is None or not config.replay.external_groups or not peers or not snapshot.is_trainer:
        return None
    made = [step for step in snapshot.made if step.at_s > (snapshot.started_at_s or 0.0)]
    if snapshot.value("num_external_used", 0) or len(made) < RECENT_STEPS or snapshot.up_s < PATIENCE_S / 2:
        return None
    num_copies = snapshot.refused_of(*HARMLESS)
    num_refused = sum(snapshot.refused.values()) - num_copies
    if snapshot.num_admitted:
        claim = "groups of others come and are admitted, and none is learned from"
        fix = "learn/guard_held_sources tells whether they are set aside; else replay.max_age_steps is too low for "
        fix += "their delay"
    elif num_refused:
        most, count = snapshot.refused.most_common(1)[0]
        claim = f"groups of others come, and all are refused (mostly {most}: {count})"
        fix = "docs/operating.md tells what each reason means"
    elif num_copies:
        claim = f"groups of others come, and all {num_copies} were known: they repeat what this node has seen before"
        fix = "are they nodes of their own? Two with one key, or the same deterministic one twice, make equal groups"
    else:
        claim = "other nodes are connected, and no group comes from them"
        fix = "ask swarm why on them: they may generate nothing, or only groups without signal"
    return Diagnosed(
        claim=claim,
        fix=fix,
        evidence=(
            f"{len(peers)} peers, {snapshot.num_admitted} groups admitted, {num_refused} refused, 0 learned from in "
            f"{len(made)} steps (status.json)",
        ),
    )


def newcomers(snapshot: Snapshot) -> Diagnosed | None:
    """Finds other nodes that are all newcomers here, so that they share an eighth of the places."""
    standing: dict[str, str] = snapshot.value("standing", {})
    config = snapshot.config
    if config is None or not standing or not config.replay.external_groups or not snapshot.is_trainer:
        return None
    if any(kind != "newcomer" for kind in standing.values()):
        return None
    return Diagnosed(
        claim="every other node is a newcomer here: all of them together fill at most an eighth of the places for "
        "groups of others",
        fix="list the nodes that you know under entry.members (of coordinator.toml, where there is one), or invite "
        'them: swarm-node invite ID; in a closed network: entry.established = "everybody"',
        evidence=(f"standing: {len(standing)} of {len(standing)} peers are newcomers (status.json)",),
        key="entry.established",
    )


# --- weights between nodes --------------------------------------------------------------------------------


def _evidence(following: JsonDict) -> tuple[str, ...]:
    keys = ("state", "served_step", "head_step", "is_trainer_connected", "credit", "num_applied")
    shown = ", ".join(f"{key} {following[key]}" for key in keys if key in following)
    return (f"following: {shown} (status.json)",)


def no_trainer(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a generator that has chosen nobody to follow, or somebody who publishes nothing."""
    following = snapshot.following
    if following is None:
        return None
    candidates, policy = following.get("candidates"), following["policy"]
    without_weights = following["trainers_without_weights"]
    publish = "on the trainer, in its node.toml under [weights]: publish = true (swarm join ... --set "
    publish += "weights.publish=true)"
    if candidates:
        names = ", ".join(map(short, candidates))
        claim = f"the run has {len(candidates)} trainers ({names}): set follow.policy to the id of the one to follow"
        fix = snapshot.set_key("follow.policy", candidates[0], why=" (the one that you mean)")
    elif not policy and without_weights:
        names, fix = ", ".join(map(short, without_weights)), publish
        claim = f"no trainer publishes weights (there is {names}): on the trainer set weights.publish=true"
    elif not policy:
        if snapshot.started_at_s is not None and snapshot.up_s < SEARCH_S:
            return None  # it has only begun to search
        claim = "no trainer is in the directory: nobody to follow (follow.policy names one)"
        fix = "is a trainer running that publishes weights, in the same run and reachable? swarm doctor "
        fix += f"{as_argument(snapshot.directory)} tries coordinator and bootstrap addresses"
    elif policy in without_weights and following["served_step"] is None:
        claim, fix = f"the trainer {short(policy)} publishes no weights: set weights.publish=true there", publish
    else:
        return None
    return Diagnosed(claim=claim, fix=fix, evidence=_evidence(following))


def trainer_away(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a followed trainer that is not connected."""
    following = snapshot.following
    if following is None or not following["policy"] or following["is_trainer_connected"]:
        return None
    if following["policy"] in following["trainers_without_weights"] and following["served_step"] is None:
        return None
    return Diagnosed(
        claim=f"the trainer {short(following['policy'])} does not answer: generation waits for its credit",
        fix="is it running, and can its address be dialled from here (exchange.advertise there)? If it is gone for "
        f"good: delete {snapshot.directory / 'followed.json'}, and follow.policy in node.toml",
        evidence=_evidence(following),
    )


def versions_refused(snapshot: Snapshot) -> Diagnosed | None:
    """Finds versions of the trainer that the engine does not take."""
    following = snapshot.following
    failed, applied = events_of(ApplyFailed, snapshot.events), events_of(VersionApplied, snapshot.events)
    newest = failed[-1] if failed and (not applied or failed[-1].at_s > applied[-1].at_s) else None
    error = (following or {}).get("last_error") or (newest.error if newest else "")
    if following is None or not error:
        return None
    is_other = following["served_step"] is None and not applied
    fix = (
        "model.source and model.dtype must be those of the trainer (swarm join takes them from the manifest)"
        if is_other
        else "engine and trainer compute log-probs too differently: engine.tolerance_nats, docs/engines.md"
    )
    return Diagnosed(
        claim=f"the engine did not take a version and serves step {following['served_step']} on: {shortened(error)}",
        fix=f"{fix}; then {snapshot.start}",
        evidence=(
            f"{len(failed)} versions were not taken, {len(applied)} were (apply_failed, applied in events.jsonl)",
            *_evidence(following),
        ),
        gravity=Gravity.STOPS if is_other else Gravity.HARMS,
    )


def no_weights_yet(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a connected trainer none of whose versions is served yet."""
    following = snapshot.following
    if following is None or not following["is_trainer_connected"] or following["served_step"] is not None:
        return None
    if snapshot.up_s < PATIENCE_S / 2 or following.get("last_error") or following["trainers_without_weights"]:
        return None
    return Diagnosed(
        claim=f"no version of the trainer {short(following['policy'])} has come in {snapshot.up_s:.0f} s",
        fix="a faster connection; room for one version at least in weights.store_bytes, here and on the trainer",
        evidence=_evidence(following),
    )


def no_credit(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a connected trainer that grants nothing."""
    following = snapshot.following
    if following is None or not following["is_trainer_connected"] or following["served_step"] is None:
        return None
    idle_s = snapshot.stepless_s
    is_short = idle_s < snapshot.max_idle_s / 2 and overdue(snapshot, GroupPut, GroupUnscored) is None
    if following.get("credit", 1) > 0 or is_short:
        return None
    claim = f"the trainer {short(following['policy'])} grants no credit"
    if (found := overdue(snapshot, VersionApplied)) is not None:
        claim += f" and makes no steps (no newer version for {found[0]:.0f} s, where one came every {found[1]:.2g} s "
        claim += "before): it is paused, was stopped, or waits itself"
    else:
        claim += ": it can use no more groups than it gets"
    return Diagnosed(
        claim=claim,
        fix="ask swarm why and swarm status on the trainer (swarm resume, where it is paused). swarm plan --run RUN "
        "tells how many generators a trainer needs. A machine too slow for replay.max_age_steps gets little: smaller "
        "batches ([generator] groups_per_batch = 1)",
        evidence=(*_evidence(following), f"no group for {idle_s:.0f} s (last_step_at_s)"),
    )


def equivocated(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a trainer that signed two versions of one step."""
    events = events_of(OwnerEquivocated, snapshot.events)
    if snapshot.following is None or not events:
        return None
    newest = events[-1]
    return Diagnosed(
        claim=f"the trainer {short(newest.policy_id)} signed two versions of step {newest.step}: it is followed no "
        "longer",
        fix="ask its operator: two processes with one key do this, too; to follow another: "
        + snapshot.set_key("follow.policy", "ID"),
        evidence=(f"{newest.first[:16]} and {newest.second[:16]} (equivocated in events.jsonl)",),
    )


def not_published(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a trainer that cannot offer its versions."""
    events = events_of(VersionUnpublished, snapshot.events)
    if not events or events[-1].step < snapshot.value("published_step", -1):
        return None
    return Diagnosed(
        claim=f"version {events[-1].step} could not be offered to followers: {shortened(events[-1].error)}",
        fix=snapshot.set_key("weights.store_bytes", 16 * 2**30, why=" (more than now), or make room on the disk"),
        evidence=(f"unpublished in events.jsonl, {len(events)} times",),
        key="weights.store_bytes",
    )


def nobody_follows(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a trainer that leaves generation to others and has no follower."""
    config = snapshot.config
    if config is None or Role.GENERATOR in config.roles or Role.TRAINER not in config.roles or snapshot.is_finished:
        return None
    if not config.weights.publish or snapshot.value("followers", dict[str, JsonDict]()) or snapshot.status is None:
        return None
    if snapshot.up_s < PATIENCE_S / 2:
        return None
    return Diagnosed(
        claim="this node only trains, and nobody generates for it",
        fix="start generators (swarm join LINK --dir my-generator --generate), or let it generate, too: in "
        f'{snapshot.toml} set roles = ["trainer", "generator"]',
        evidence=(f"roles: trainer; followers: none after {snapshot.up_s:.0f} s (status.json)",),
        key="roles",
    )
