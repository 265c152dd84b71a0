"""One group through every node that saw it: made, admitted or refused, drawn, learned from.

Invariant: a line says what an event or a store of the named node says; what neither can know is listed apart.
"""

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from swarm.errors import ConfigError
from swarm.events import (
    Event,
    GroupAdmitted,
    GroupGivenUp,
    GroupPut,
    GroupRefused,
    GroupsDrawn,
    GroupStored,
    GroupUse,
    NodeRestored,
    StepMade,
    groups_learned_from,
)
from swarm.report.node_directory import NodeDirectory
from swarm.trained.newest_groups import group_of, reading
from swarm.trained.samples import STORE
from swarm.types import FinishReason, NodeId, ScoredGroup, short

MIN_PREFIX: Final = 4  # hexadecimal digits
MAX_FOUND: Final = 1000  # digests that begin alike
_DIGEST = re.compile(r"[0-9a-f]{4,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceLine:
    """One thing that happened to the group at one node."""

    at_s: float  # wall clock of the node; 0: it is not known when
    node: str
    text: str


@dataclass(frozen=True, kw_only=True)
class GroupTrace:
    """What is known of a group."""

    digest: str
    env: str
    producer: str  # name or id
    policy: str  # the lineage that generated it
    lines: tuple[TraceLine, ...]  # in order of time
    unknown: tuple[str, ...]  # what nobody here can tell


@dataclass
class _Sighting:
    """What one node's log says of one digest."""

    events: list[Event] = field(default_factory=list[Event])
    draws: dict[int, GroupsDrawn] = field(default_factory=dict[int, GroupsDrawn])
    steps: dict[int, StepMade] = field(default_factory=dict[int, StepMade])  # by draw


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """What one node's store has of a digest."""

    scored: ScoredGroup | None
    deleted_s: float | None
    weights: Mapping[int, float]  # draw -> how likely a draw chose its source, where the coordinator said it


def trace_group(directories: Sequence[NodeDirectory], prefix: str) -> GroupTrace:
    """Follows the group whose digest begins with `prefix` through the logs and stores of some nodes (blocking).

    Raises:
        ConfigError: no digest, none that begins so, or several.
    """
    prefix = prefix.lower()
    if not _DIGEST.fullmatch(prefix):
        raise ConfigError(
            f"{prefix!r:.80}: no digest of a group; give {MIN_PREFIX} to 64 hexadecimal digits of one that "
            "`swarm samples` shows"
        )
    logs = [_sightings(directory, prefix) for directory in directories]
    digests = {digest for log in logs for digest in log}
    digests |= {digest for directory in directories for digest in _stored_digests(directory, prefix)}
    where = ", ".join(each.name for each in directories)
    if not digests:
        raise ConfigError(
            f"{prefix}: no group whose digest begins so, in the logs and stores of {where}; name more directories with "
            "--dir (logs keep the newest 256 MB, refusals mostly without a digest)"
        )
    if len(digests) > 1:
        some = ", ".join(digest[:16] for digest in sorted(digests)[:4])
        raise ConfigError(f"{prefix}: {len(digests)} groups begin so ({some}, ...); give more digits")
    (digest,) = digests
    return _trace(digest, directories, [log.get(digest, _Sighting()) for log in logs])


def _trace(digest: str, directories: Sequence[NodeDirectory], sightings: Sequence[_Sighting]) -> GroupTrace:
    names = {each.node_id: each.name for each in directories if each.node_id}
    stores = [
        _read_store(directory, digest, sighting) for directory, sighting in zip(directories, sightings, strict=True)
    ]
    scored = next((each.scored for each in stores if each.scored is not None), None)
    known = next((each for one in sightings for each in one.events if isinstance(each, GroupStored)), None)
    of = known or (scored.group if scored is not None else None)
    lines = [
        line
        for directory, sighting, stored in zip(directories, sightings, stores, strict=True)
        for line in _lines(directory, digest, sighting, stored, names)
    ]
    return GroupTrace(
        digest=digest,
        env=of.env if of else "unknown",
        producer=_name(of.producer, names) if of else "unknown",
        policy=_name(of.policy_id, names) if of else "unknown",
        lines=tuple(sorted(lines, key=lambda line: line.at_s)),
        unknown=tuple(_unknown(digest, of.producer if of else "", directories, sightings, names)),
    )


# --- what logs say -----------------------------------------------------------------------------------------


def _sightings(directory: NodeDirectory, prefix: str) -> dict[str, _Sighting]:
    """Digest that begins with the prefix -> what the log says of it; steps that learned from it included."""
    found: dict[str, _Sighting] = {}
    steps: dict[int, set[str]] = {}  # draw -> digests in it
    begins = prefix.encode()

    def is_wanted(line: bytes) -> bool:
        return b'"' + begins in line or (bool(steps) and line.startswith(b'{"kind":"step"'))

    for event in directory.events.stream(is_wanted):
        if isinstance(event, StepMade):
            for digest in steps.get(event.draw_step, ()):
                found[digest].steps[event.draw_step] = event
            continue
        for digest in {each for each in _digests_of(event) if each.startswith(prefix)}:
            if len(found) >= MAX_FOUND and digest not in found:
                continue
            sighting = found.setdefault(digest, _Sighting())
            if isinstance(event, GroupsDrawn):
                sighting.draws[event.draw_step] = event
                steps.setdefault(event.draw_step, set()).add(digest)
            else:
                sighting.events.append(event)
    return found


def _digests_of(event: Event) -> Iterable[str]:
    match event:
        case GroupStored() | GroupGivenUp() | GroupRefused():
            return (event.digest,)
        case GroupsDrawn():
            return (*(use.digest for use in event.groups), *event.zero_variance, *event.too_old)
        case NodeRestored():
            return (digest for digest, _ in event.held)
        case _:
            return ()


# --- what stores say ---------------------------------------------------------------------------------------


def _stored_digests(directory: NodeDirectory, prefix: str) -> list[str]:
    if not (directory.path / STORE).is_file():
        return []
    like = "SELECT lower(hex(digest)) FROM {} WHERE hex(digest) LIKE ? LIMIT ?"
    query = " UNION ".join(f"SELECT * FROM ({like.format(table)})" for table in ("groups", "tombstones", "drawn"))
    with reading(directory.path / STORE) as connection:
        return [row[0] for row in connection.execute(query, (f"{prefix.upper()}%", MAX_FOUND) * 3)]


def _read_store(directory: NodeDirectory, digest: str, sighting: _Sighting) -> _Stored:
    if not (directory.path / STORE).is_file():
        return _Stored(scored=None, deleted_s=None, weights={})
    is_one = len(digest) == 64 and _DIGEST.fullmatch(digest)  # a log that the disk changed may have anything
    key = bytes.fromhex(digest) if is_one else b""
    with reading(directory.path / STORE) as connection:
        deleted = connection.execute("SELECT deleted_s FROM tombstones WHERE digest = ?", (key,)).fetchone()
        return _Stored(
            scored=group_of(connection, key),
            deleted_s=None if deleted is None else deleted[0],
            weights=_weights(connection, digest, sighting),
        )


def _weights(connection: sqlite3.Connection, digest: str, sighting: _Sighting) -> dict[int, float]:
    weights: dict[int, float] = {}
    for step, draw in sighting.draws.items():
        use = _use_of(draw, digest)
        row = connection.execute("SELECT source_weights FROM draws WHERE step = ?", (step,)).fetchone()
        with suppress(ValueError, TypeError, AttributeError):
            of_sources: Any = json.loads(row[0]) if row else {}
            if use is not None and use.producer in of_sources:
                weights[step] = float(of_sources[use.producer])
    return weights


# --- in words ----------------------------------------------------------------------------------------------


def _lines(
    directory: NodeDirectory, digest: str, sighting: _Sighting, stored: _Stored, names: Mapping[NodeId, str]
) -> Iterable[TraceLine]:
    def line(at_s: float, text: str) -> TraceLine:
        return TraceLine(at_s=at_s, node=directory.name, text=text)

    for event in sighting.events:
        if text := _words(event, digest, names):
            yield line(event.at_s, text)
    for step, draw in sighting.draws.items():
        weight = stored.weights.get(step)
        chance = "" if weight is None else f"; its source was drawn with weight {weight:.3g}"
        yield line(draw.at_s, _words_of_draw(draw, digest) + chance)
        use, made = _use_of(draw, digest), sighting.steps.get(step)
        if use is not None and made is not None:
            yield line(made.at_s, _words_of_step(draw, made, use))
    if stored.scored is not None:
        began_s = min((event.at_s for event in sighting.events), default=0.0)  # a store writes before the log does
        rewards = " ".join(f"{value:g}" for value in stored.scored.rewards.tolist()[:16])
        yield line(
            max(stored.scored.first_seen_s, began_s),
            f"in its store, {stored.scored.size_bytes:,} bytes, {_words_of_group(stored.scored)}; rewards by its own "
            f"verifier: {rewards}",
        )
    if stored.deleted_s is not None:
        yield line(stored.deleted_s, "deleted from its store; the digest is kept, so that it is not taken again")


def _words(event: Event, digest: str, names: Mapping[NodeId, str]) -> str:
    match event:
        case GroupPut():
            parts = "".join(f", {name} {value:.3g}" for name, value in event.reward_parts.items())
            count = sum(event.finishes.values())
            cut = f" in {count} responses, {event.finishes.get(FinishReason.LENGTH, 0)} cut off" if count else ""
            return (
                f"made and stored: {event.num_tokens} tokens{cut}, mean reward {event.reward_mean:.3g}{parts}, "
                f"with {_versions(event)}"
            )
        case GroupAdmitted():
            return (
                f"admitted, sent by {_name(event.via, names)} {event.age_s:.1f} s after it was made; mean reward "
                f"{event.reward_mean:.3g}, {event.size_bytes:,} bytes, {_versions(event)}"
            )
        case GroupRefused():
            return f"refused, sent by {_name(event.via, names)}: {event.reason}"
        case GroupGivenUp():
            return f"given up: it ended the learner's process alone; draw {event.draw_step} is used without it"
        case NodeRestored():
            is_made_here = dict(event.held).get(digest)
            return f"held after a restart, {'made here' if is_made_here else 'of another node'}"
        case _:
            return ""


def _versions(event: GroupStored) -> str:
    if not event.versions:
        return f"version {event.oldest_step}"
    steps = [step for step, _ in event.versions]
    named = f"version {steps[0]}" if len(steps) == 1 else f"versions {steps[0]} to {steps[-1]}"
    return f"{named} ({event.versions[-1][1]})"


def _words_of_group(scored: ScoredGroup) -> str:
    group = scored.group
    steps = f"step {group.oldest_step}" if group.oldest_step == group.newest_step else (
        f"steps {group.oldest_step} to {group.newest_step}"
    )  # fmt: skip
    return f"task {group.task_id}, {len(group.rollouts)} responses of {group.num_tokens} tokens by {steps}"


def _words_of_draw(draw: GroupsDrawn, digest: str) -> str:
    use = _use_of(draw, digest)
    if use is None:
        why = "without signal, all its rewards are equal" if digest in draw.zero_variance else "too old, never drawn"
        return f"used up by draw {draw.draw_step}: {why}"
    flight = f", {use.in_flight_steps} of them in flight" if use.in_flight_steps else ""
    newcomer = "" if use.is_established else ", in the places of newcomers"
    return (
        f"drawn for draw {draw.draw_step}, one of {len(draw.groups)} groups: age {use.age_steps} of at most "
        f"{draw.max_age_steps} steps{flight}, use {use.use} of {draw.max_reuse}, {use.origin}{newcomer}"
    )


def _words_of_step(draw: GroupsDrawn, made: StepMade, use: GroupUse) -> str:
    if made.was_skipped:
        return f"not learned from: the step was skipped, and version {made.step} stayed"
    if all(each.digest != use.digest for each in groups_learned_from(draw, made)):
        return f"not learned from: the guard left it out of step {made.step}"
    edge = next((each for each in made.edges if each.source == use.producer), None)
    source = f"; its source: ESS {edge.ess_share:.2f}, KL {edge.mismatch_kl:.3g} nats a token" if edge else ""
    return f"learned from: version {made.step}, {made.digest[:16]}{source}"


def _use_of(draw: GroupsDrawn, digest: str) -> GroupUse | None:
    return next((use for use in draw.groups if use.digest == digest), None)


def _name(node: NodeId, names: Mapping[NodeId, str]) -> str:
    return names.get(node) or short(node) or "unknown"


# --- what cannot be known ----------------------------------------------------------------------------------


def _unknown(
    digest: str,
    producer: NodeId,
    directories: Sequence[NodeDirectory],
    sightings: Sequence[_Sighting],
    names: Mapping[NodeId, str],
) -> Iterable[str]:
    if producer not in names:
        yield f"when and how it was made, as {_name(producer, names)} saw it: its directory is not among these"
    for directory, sighting in zip(directories, sightings, strict=True):
        if not sighting.events and not sighting.draws:
            yield _why_not_seen(directory, producer)
        elif not directory.is_whole:
            yield f"what {directory.name} did with it before its event log begins: older files are gone"
    yield "to whom it was advertised or sent: nodes log what they take, not what they give"
    if any(_use_of(draw, digest) for sighting in sightings for draw in sighting.draws.values()):
        yield "how much this group alone weighed in a gradient: steps log figures of each source, not of each group"


def _why_not_seen(directory: NodeDirectory, producer: NodeId) -> str:
    """A log has the digest of a refused group only where it is the first of its reason and producer in a while."""
    nameless = Counter[str]()
    for event in directory.events.stream(lambda line: line.startswith(b'{"kind":"refused"')):
        if isinstance(event, GroupRefused) and not event.digest and event.producer in (producer, ""):
            nameless[event.reason] += event.count
    refused = ", ".join(f"{count} {reason}" for reason, count in nameless.most_common(4))
    told = f"it refused {nameless.total()} groups that may be of this producer ({refused}), summed up" if refused else (
        "it refused none without a digest"
    )  # fmt: skip
    return f"whether {directory.name} was offered it: no event there names it; {told}"
