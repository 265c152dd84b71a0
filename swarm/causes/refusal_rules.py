"""Rules about groups of others that are refused here: which reasons outweigh the rest, and what differs."""

from typing import Final

from swarm.causes.coordinator_rules import manifest_differences
from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.snapshot import Snapshot, shortened
from swarm.types import NodeId, RefusalReason, short

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
    RefusalReason.VERIFIER_FAILED: "the verifier here fails on their answers: its package, sandbox.timeout_s or "
    "sandbox.memory_bytes may be other than there",
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


def share_of(snapshot: Snapshot, num_refused: int) -> float:
    """Of the groups of others that came, those refused for some reasons; copies aside."""
    harmless = snapshot.refused_of(*HARMLESS)
    total = snapshot.num_admitted + sum(snapshot.refused.values()) - harmless
    return num_refused / max(1, total)


def producers_of(snapshot: Snapshot, *reasons: RefusalReason) -> tuple[list[NodeId], str]:
    """Producers of refused groups, most first, and the same in words."""
    counts: dict[NodeId, int] = {}
    for reason in reasons:
        for producer, count in snapshot.refused_by.get(str(reason), {}).items():
            counts[producer] = counts.get(producer, 0) + count
    ranked = sorted(counts, key=counts.__getitem__, reverse=True)
    shown = ", ".join(f"{short(each)} ({counts[each]})" for each in ranked[:4])
    return ranked, f"by producer: {shown} (refused in events.jsonl)" if shown else ""


def counts_in_words(snapshot: Snapshot, reasons: list[RefusalReason]) -> str:
    """How many groups were refused for these reasons, beside those admitted."""
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
    share = share_of(snapshot, count)
    is_all = share > 0.9
    # Where nothing of theirs fits, the streams of one side end after a dozen groups, and those of both with them.
    if count < (FEW_REFUSED // 2 if is_all else FEW_REFUSED) or share < 0.05:
        return None
    _, by = producers_of(snapshot, *reasons)
    return Diagnosed(
        name=name,
        claim=claim + _newest(snapshot, reasons[0]),
        evidence=tuple(filter(None, (counts_in_words(snapshot, reasons), f"{share:.0%} of what came", by))),
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


def settings_differ(snapshot: Snapshot) -> Diagnosed | None:
    """Groups of others are refused since a setting that must be equal is not."""
    present = _present(snapshot, _SETTINGS)
    if not present:
        return None
    keys, why = _SETTINGS[present[0]]
    if manifest_differences(snapshot) == []:  # a manifest is there, and this node is as it says
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


def come_too_late(snapshot: Snapshot) -> Diagnosed | None:
    """Groups of others are too old when they come."""
    late, future = snapshot.refused_of(RefusalReason.TOO_OLD), snapshot.refused_of(RefusalReason.FROM_THE_FUTURE)
    count = late + future
    share = share_of(snapshot, count)
    if count < FEW_REFUSED or share < 0.2:
        return None
    _, by = producers_of(snapshot, RefusalReason.TOO_OLD, RefusalReason.FROM_THE_FUTURE)
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
                    counts_in_words(snapshot, [RefusalReason.TOO_OLD, RefusalReason.FROM_THE_FUTURE]),
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
    if count < FEW_REFUSED or share_of(snapshot, count) < 0.3 or quota >= 600:  # else it is a flood
        return None
    return Diagnosed(
        name="quota_too_low",
        key="exchange.groups_per_minute",
        claim=f"this node takes {quota} groups a minute from one peer, and they make more: the rest is refused",
        evidence=(counts_in_words(snapshot, reasons), f"exchange.groups_per_minute = {quota} (node.toml)"),
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


def no_entry(snapshot: Snapshot) -> Diagnosed | None:
    """Others show nothing that lets them into the run."""
    count = snapshot.refused_of(RefusalReason.NO_ENTRY)
    if count < FEW_REFUSED or share_of(snapshot, count) < 0.5:
        return None
    _, by = producers_of(snapshot, RefusalReason.NO_ENTRY)
    return Diagnosed(
        name="no_entry",
        claim="groups of others are refused, since the entry rule here does not let their makers into the run",
        evidence=tuple(filter(None, (counts_in_words(snapshot, [RefusalReason.NO_ENTRY]), by))),
        fix="compare [entry] (kind, members) with the run's: a node that joins by the link follows its "
        "manifest; or invite "
        "them: swarm-node invite ID",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
    )
