"""Rules about peers that send what no honest node would: rewards that are not true, and forged groups."""

from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.refusal_rules import FEW_REFUSED, counts_in_words, producers_of, share_of
from swarm.causes.snapshot import Snapshot
from swarm.types import RefusalReason, short


def liar(snapshot: Snapshot) -> Diagnosed | None:
    """Rewards that a peer claims are not those of the verifier here."""
    reason = RefusalReason.FALSE_REWARD
    count = snapshot.refused_of(reason, RefusalReason.VERIFIER_FAILED)
    if count < 3 or snapshot.refused_of(reason) < count / 2:  # else `others_refused`: nobody knows what they are worth
        return None
    producers, by = producers_of(snapshot, reason, RefusalReason.VERIFIER_FAILED)
    share = share_of(snapshot, count)
    is_everybody = share > 0.9 and len(producers) > 1
    evidence = (counts_in_words(snapshot, [reason]), *([by] if by else []))
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
    _, by = producers_of(snapshot, *present)
    return Diagnosed(
        name="forgers",
        claim="a peer sends groups that are forged or damaged; all of them are refused",
        evidence=tuple(filter(None, (counts_in_words(snapshot, present), by))),
        fix="nothing, as long as own steps go on; entry.denied shuts an id out",
        gravity=Gravity.WASTES,
    )
